"""The models that are compared: the one loaded, copies with quantized layers, plain casts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..nn import QuantizedLinear
from ..quantize import SCHEMES, QuantizeReport, quantize_, weight_bytes
from .loading import DTYPES, EvaluationError

# NVFP4 is asked for by name: its dense forms are emulated, slowly
DEFAULT_SCHEMES = tuple(name for name in SCHEMES if not name.startswith("nvfp4"))
YARDSTICK = "float32"
_YARDSTICK_BYTES = 2 << 30


@dataclass(frozen=True)
class Variant:
    """One model of the comparison; `report` is None for the loaded model and for casts."""

    name: str
    model: Any
    report: QuantizeReport | None = None

    def layer(self, name: str) -> torch.nn.Module:
        module: torch.nn.Module = self.model.get_submodule(name)
        return module

    def layer_bytes(self, names: Iterable[str]) -> int:
        return sum(weight_bytes(self.layer(name)) for name in names)

    @property
    def model_bytes(self) -> int:
        return weight_bytes(self.model)


def check_schemes(names: Sequence[str]) -> None:
    """EvaluationError for a name that is no scheme of quantize_ and no dtype, or is given twice."""
    known = (*SCHEMES, *DTYPES)
    for name in names:
        if name not in known:
            raise EvaluationError(f"scheme is {name!r}; needed some of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise EvaluationError(f"a scheme is given twice: {', '.join(names)}")
    if not names:
        raise EvaluationError(f"no scheme is given; needed some of {', '.join(known)}")


def with_yardstick(
    model: torch.nn.Module, dtype: torch.dtype
) -> tuple[tuple[str, ...], str | None]:
    """(default schemes, a note). float32 comes first: what rounding to `dtype` alone costs.

    It is left out where the model is float32 itself, or where its copy would take over 2 GiB.
    """
    if dtype == torch.float32:
        return DEFAULT_SCHEMES, None
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    if needed > _YARDSTICK_BYTES:
        return DEFAULT_SCHEMES, (
            f"no {YARDSTICK} row, which shows what rounding to the loaded dtype costs: its copy "
            f"takes {needed / 1e9:.1f} GB; name it in --schemes to have it"
        )
    return (YARDSTICK, *DEFAULT_SCHEMES), None


def make_variant(model: Any, scheme: str, skip: Sequence[str], backend: str) -> Variant:
    """A copy of `model` for a scheme. Quantized copies share every tensor that is not swapped."""
    if scheme in DTYPES:
        cast = copy.deepcopy(model)
        for parameter in cast.parameters():  # not buffers: rotary frequencies stay as loaded
            parameter.data = parameter.data.to(DTYPES[scheme])
        return Variant(scheme, cast)
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    quantized = copy.deepcopy(model, shared)
    report = quantize_(quantized, scheme, skip, backend=backend)
    if not report.swapped:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in report.skipped[:3])
        raise EvaluationError(
            f"{scheme} swaps no layer of this model ({reasons or 'it has no torch.nn.Linear'})"
        )
    return Variant(scheme, quantized, report)


def quantized_layers(variant: Variant) -> dict[str, QuantizedLinear]:
    """Name -> module of every layer that the scheme swapped, in the model's order."""
    if variant.report is None:
        return {}
    layers = {layer.name: variant.layer(layer.name) for layer in variant.report.swapped}
    return {name: layer for name, layer in layers.items() if isinstance(layer, QuantizedLinear)}


def weight_matrix(layer: torch.nn.Module) -> torch.Tensor:
    """The weight of a linear layer as [N, K]; transformers' Conv1D holds it as [K, N]."""
    weight: torch.Tensor = layer.weight.detach()  # type: ignore[union-attr,operator,assignment]
    return weight if isinstance(layer, torch.nn.Linear) else weight.T
