"""Tactics: ways to cut a grouped product into tiles, by number, for callers that tune themselves.

One table for all kernels: each says in `why_not` which of them it has. Number 0 leaves the choice
to the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...checks import check_size
from ...problem import Problem

K_TILE = 128  # of K that a kernel takes in one step; a split has whole ones


@dataclass(frozen=True)
class Tactic:
    """A tile of weight rows x tokens, in how many parts K is split, and clusters of such tiles."""

    name: str
    rows: int = 0
    tokens: int = 0
    split_k: int = 1
    clusters: tuple[tuple[int, int], ...] = ((1, 1),)


TACTICS = (
    Tactic("auto"),
    *(Tactic(f"64x{tokens}", 64, tokens) for tokens in (8, 16, 32, 64, 128, 256)),
    *(Tactic(f"128x{tokens}", 128, tokens) for tokens in (16, 32, 64, 128, 256)),
    *(
        Tactic(f"64x{tokens}_split{split}", 64, tokens, split)
        for tokens in (8, 16)
        for split in (2, 4)
    ),
)
DEFAULT_TACTIC = (0, 1, 1)
_WIDEST = 128  # tokens of a suggested tile


def group_mm_configs() -> tuple[str, ...]:
    """Names of the tactics of group_mm, in the order of their config_id.

    "auto" is number 0: the kernel's own choice. "64x16" is a tile of 64 weight rows and 16 tokens,
    "64x16_split2" the same with K in two parts, which are added in a fixed order. Which of them a
    kernel has, `farro.explain` tells; one that cannot run raises farro.UnsupportedError.
    """
    return tuple(tactic.name for tactic in TACTICS)


def valid_clusters(name: str) -> tuple[tuple[int, int], ...]:
    """Pairs (cluster_m, cluster_n) that the tactic of that name can have; the first is usual.

    Raises TypeError where name is not a str, and ValueError where no tactic has it.
    """
    if not isinstance(name, str):
        raise TypeError(f"valid_clusters: name must be a str, got {type(name).__name__}")
    for tactic in TACTICS:
        if tactic.name == name:
            return tactic.clusters
    known = ", ".join(group_mm_configs())
    raise ValueError(f"valid_clusters: no tactic is named {name!r}; known: {known}")


def all_tactics() -> tuple[tuple[int, int, int], ...]:
    """Every (config_id, cluster_m, cluster_n) that group_mm knows, DEFAULT_TACTIC first.

    For an autotuner: those that cannot run a problem raise farro.UnsupportedError before anything
    is written.
    """
    return tuple((i, *cluster) for i, tactic in enumerate(TACTICS) for cluster in tactic.clusters)


def suggest_tactic(max_n: int) -> tuple[int, int, int]:
    """A tactic (config_id, cluster_m, cluster_n) for up to max_n rows an expert.

    The narrowest tile that holds max_n tokens: up to 64 weight rows and 64 tokens, then 128 and
    128. Like every tactic but DEFAULT_TACTIC it takes the choice from the tuned tables.

    Raises TypeError where max_n is not an int, and ValueError where it is negative.
    """
    check_size("suggest_tactic", "max_n", max_n)
    tokens = 16
    while tokens < min(max_n, _WIDEST):
        tokens *= 2
    name = f"{64 if tokens <= 64 else 128}x{tokens}"
    config_id = group_mm_configs().index(name)
    return (config_id, *TACTICS[config_id].clusters[0])


def check_tactic(name: str, config_id: Any, cluster_m: Any, cluster_n: Any) -> None:
    for argument, value in (
        *(("config_id", config_id), ("cluster_m", cluster_m), ("cluster_n", cluster_n)),
    ):
        check_size(name, argument, value)
    if config_id >= len(TACTICS):
        raise ValueError(
            f"{name}: config_id is {config_id}; needed 0 to {len(TACTICS) - 1}: "
            "farro.nvfp4.group_mm_configs() names them"
        )


def tactic_of(problem: Problem) -> Tactic:
    config_id = problem.param("config_id")
    assert isinstance(config_id, int)
    return TACTICS[config_id]


def rows_of(problem: Problem) -> int:
    """About how many rows the fullest experts have, for a choice of tiles.

    The capacity, and ragged the average, unless the caller expects fewer.
    """
    shape = problem.spec("out").shape
    mean = -(-shape[0] // problem.spec("a_comp").shape[0])
    rows = shape[-2] if len(shape) == 3 else mean
    expected = problem.param("expected_rows")
    assert isinstance(expected, int)
    if not expected:
        return rows
    # routers spread tokens over experts unevenly: a chance for each, and some experts preferred
    fullest = math.ceil(expected + 3 * math.sqrt(expected))
    return min(shape[-2], fullest)


def variant_of(problem: Problem) -> str:
    """As the benchmark names the forms that a table is tuned for."""
    if problem["sfb"] is None:
        return "w4a16"
    return "w4a4" if len(problem.spec("out").shape) == 3 else "ragged"


def illegal(problem: Problem) -> str | None:
    """Why no kernel runs the tactic on this problem, or None."""
    tactic, cluster = tactic_of(problem), problem.param("cluster")
    if cluster not in tactic.clusters:
        known = " or ".join(map(str, tactic.clusters))
        return f"tactic {tactic.name!r} has clusters {known}, not {cluster}"
    k = problem.spec("a_comp").shape[2] * 4
    tiles = -(-k // K_TILE)
    if tactic.split_k > max(tiles, 1):
        return (
            f"tactic {tactic.name!r} splits K in {tactic.split_k}, and K = {k} has {tiles} tiles "
            f"of {K_TILE}"
        )
    return None


def only_choices_of_its_own(problem: Problem) -> str | None:
    """Why plain torch operators do not run the tactic, or None: tiles mean nothing to them.

    On a GPU they refuse, so that "auto" never takes them for a kernel that a caller asked for.
    """
    tactic = tactic_of(problem)
    if problem.arch.name != "cpu" and tactic.name != "auto":
        return f"it has no tactics, and {tactic.name!r} was asked for"
    return illegal(problem)


__all__ = [
    "DEFAULT_TACTIC",
    "all_tactics",
    "group_mm_configs",
    "suggest_tactic",
    "valid_clusters",
]
