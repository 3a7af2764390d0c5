"""Expert modules in quantize_: which there are, what becomes of them, and why some stay."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from .formats.int8_group import GROUP_SIZES
from .integrations.transformers import int8_experts, why_not
from .module_sites import Site, find_sites
from .nn import Int8Experts, SparseNVFP4Experts

_PARTS = ("gate_up_proj", "down_proj")
_FORWARD = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def _int8(group_size: int) -> Callable[[torch.nn.Module, str], torch.nn.Module]:
    return lambda experts, backend: int8_experts(experts, group_size, backend=backend)


def _nvfp4(experts: torch.nn.Module, backend: str) -> torch.nn.Module:
    gate_up, down = _weights(experts)
    if not getattr(experts, "is_concatenated", True):
        gate_up = torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), 1)
    return SparseNVFP4Experts.from_dense(gate_up, down, backend=backend)


# scheme of quantize_ -> what it makes of transformers' expert modules; others leave them alone
MAKERS: dict[str, Callable[[torch.nn.Module, str], torch.nn.Module]] = {
    **{f"int8-g{size}": _int8(size) for size in GROUP_SIZES},
    "nvfp4-48": _nvfp4,
}


class ExpertSite(Site):
    """Every place of one expert module."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, 2I, H] of the first product's weights."""
        return tuple(_weights(self.module)[0].shape)


def find_experts(model: torch.nn.Module) -> list[ExpertSite]:
    """Modules with `gate_up_proj` and `down_proj` of three dimensions that are called as experts.

    That is how transformers 5 holds them. Others that have these names are no experts.
    """
    return find_sites(model, _is_experts, ExpertSite)


def _is_experts(module: torch.nn.Module) -> bool:
    if isinstance(module, (Int8Experts, SparseNVFP4Experts)):
        return False
    if any(getattr(getattr(module, part, None), "ndim", 0) != 3 for part in _PARTS):
        return False
    return list(inspect.signature(type(module).forward).parameters) == _FORWARD


def _weights(experts: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, H] and [E, H, I]."""
    gate_up, down = (getattr(experts, name).detach() for name in _PARTS)
    if getattr(experts, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return gate_up, down


def why_they_stay(site: ExpertSite, scheme: str) -> str | None:
    """Why a scheme leaves these experts as they are, or None."""
    if scheme not in MAKERS:
        return f"{scheme} has no experts; {', '.join(MAKERS)} have"
    module = site.module
    reason = site.hooks() or why_not(module)
    if reason is not None:
        return reason
    if scheme == "nvfp4-48":
        experts, hidden, inner = _weights(module)[1].shape
        if not 1 <= experts <= 4096:
            return f"there are {experts} of them; needed 1 to 4096"
        if hidden % 32 or inner % 32:
            return f"their sizes {hidden} and {inner} are not both multiples of 32"
    return None


def check_finite(site: ExpertSite) -> None:
    """ValueError where a weight holds NaN or Inf."""
    for part, weight in zip(_PARTS, _weights(site.module)):
        site.check_finite(f"{site.name}.{part}", weight)


def swap(site: ExpertSite, scheme: str, backend: str) -> torch.nn.Module:
    """Put the scheme's module in every place; gives it."""
    old = site.module
    new = MAKERS[scheme](old, backend).train(old.training)
    site.put(new)
    return new
