"""Where a model uses the modules that quantize_ swaps, and what it asks of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch


@dataclass
class Site:
    """Every place (parent, attribute, dotted name) where one module is used.

    It holds no reference to the module, so that each is freed as soon as it is swapped.
    """

    places: list[tuple[torch.nn.Module, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def names(self) -> list[str]:
        return [name for _, _, name in self.places]

    @property
    def module(self) -> torch.nn.Module:
        parent, attribute, _ = self.places[0]
        return parent.get_submodule(attribute)

    def put(self, new: torch.nn.Module) -> None:
        """The new module in every place of the old one."""
        for parent, attribute, _ in self.places:
            setattr(parent, attribute, new)

    def hooks(self) -> str | None:
        """Why hooks keep the module from being swapped, or None."""
        module = self.module
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return "it has hooks (or a patched forward), which a swap would drop; remove them first"
        return None

    def check_finite(self, what: str, weight: torch.Tensor) -> None:
        """ValueError where a weight holds NaN or Inf."""
        if weight.is_meta or weight.numel() == 0:
            return
        if not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):
            raise ValueError(
                f"quantize_: {what} holds NaN or Inf, for which there is no code; nothing was "
                f"swapped: mend the checkpoint or pass skip=({self.name!r}, ...)"
            )


S = TypeVar("S", bound=Site)


def find_sites(
    model: torch.nn.Module, wanted: Callable[[torch.nn.Module], bool], kind: type[S]
) -> list[S]:
    """The sites of all wanted modules below `model`, in the order of their first use."""
    sites: dict[int, S] = {}
    for prefix, parent in model.named_modules(remove_duplicate=False):
        for attribute, module in parent._modules.items():  # named_children hides a second use
            if module is not None and wanted(module):
                name = f"{prefix}.{attribute}" if prefix else attribute
                sites.setdefault(id(module), kind()).places.append((parent, attribute, name))
    return list(sites.values())
