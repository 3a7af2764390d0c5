"""Pinned tiles: the values that `variant` takes on a device, and kernels that obey it.

The tiles of all kernels that an architecture can run count from 1: kernels in the order of
`KERNELS`, and the tiles of each in the order in which its module lists them. A number means the
same tile for every back end that may be asked for, whatever is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...dispatch import Kernel
from ...problem import Problem

Refuses = Callable[[Any, Problem], str | None]  # why a configuration is not legal, or None


@dataclass(frozen=True)
class Tiles:
    """A kernel, the tiles of it that can be pinned (name -> configuration), and their legality."""

    kernel: Kernel
    variants: Mapping[str, Any]
    refuses: Refuses = lambda config, problem: None


@dataclass(frozen=True)
class Tile:
    """One value of `variant` on one architecture."""

    number: int
    name: str
    kernel: str
    backend: str
    config: Any
    refuses: Refuses


class Pinning:
    """Kernels with their tiles; `kernels` are those that obey the parameter `variant`."""

    def __init__(self, entries: Iterable[Tiles]) -> None:
        self.entries = tuple(entries)
        self.kernels = tuple(self._obedient(entry.kernel) for entry in self.entries)

    def tiles(self, problem: Problem) -> tuple[Tile, ...]:
        """All tiles of the problem's architecture, numbered from 1."""
        found = [
            (name, entry, config)
            for entry in self.entries
            if problem.arch.lacks(entry.kernel.needs) is None
            for name, config in entry.variants.items()
        ]
        return tuple(
            Tile(i, name, entry.kernel.name, entry.kernel.backend, config, entry.refuses)
            for i, (name, entry, config) in enumerate(found, 1)
        )

    def pinned(self, problem: Problem) -> Tile | None:
        """The tile that the problem asks for; None where the dispatcher is to choose."""
        variant = problem.param("variant")
        assert isinstance(variant, int)
        tiles = self.tiles(problem)
        return tiles[variant - 1] if 0 < variant <= len(tiles) else None

    def _obedient(self, kernel: Kernel) -> Kernel:
        """The kernel, which refuses a problem that pins a tile that is not its own or not legal."""

        def why_not(problem: Problem) -> str | None:
            tile = self.pinned(problem)
            if tile is None:
                return kernel.why_not(problem)
            if tile.kernel != kernel.name:
                return f"variant {tile.number} pins {tile.name} of {tile.kernel}"
            return kernel.why_not(problem) or tile.refuses(tile.config, problem)

        def config(problem: Problem) -> Any:
            tile = self.pinned(problem)
            return kernel.config(problem) if tile is None else tile.config

        return dataclasses.replace(
            kernel,
            why_not=why_not,
            config=config,
            must_run=lambda problem: self.pinned(problem) is None and kernel.must_run(problem),
            yields=lambda problem: None if self.pinned(problem) else kernel.yields(problem),
        )

    def check(self, function: str, problem: Problem, backend: str) -> None:
        """ValueError where `variant` is no tile that runs this problem here; it names those."""
        variant = problem.param("variant")
        if variant == 0:
            return
        legal, reason = [], "there is no such tile here"
        kernels = {kernel.name: kernel for kernel in self.kernels}
        for tile in self.tiles(problem):
            params = tuple((n, tile.number if n == "variant" else v) for n, v in problem.params)
            refused = kernels[tile.kernel].refuses(dataclasses.replace(problem, params=params))
            if backend not in ("auto", tile.backend):
                refused = f"backend={backend!r} was asked for"
            if refused is None:
                legal.append(f"{tile.number} ({tile.name})")
            if tile.number == variant:
                reason = f"{tile.name} of {tile.kernel}: {refused}"
                if refused is None:
                    return
        raise ValueError(
            f"{function}: variant is {variant}; {reason}. Legal on {problem.arch.name} for this "
            f"problem: 0 (the dispatcher chooses){''.join(f', {item}' for item in legal)}"
        )
