"""quantize_: swap a model's linear layers and experts for quantized ones, in place; report it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .checks import check_backend
from .formats.int8_group import GROUP_SIZES
from .module_sites import Site, find_sites
from .nn import (
    DTYPES,
    FP8BlockLinear,
    FP8Linear,
    Int8Linear,
    NVFP4Linear,
    QuantizedLinear,
    SparseNVFP4Linear,
)
from .quantize_experts import ExpertSite, check_finite, find_experts, swap, why_they_stay

# scheme -> module made from (weight [N, K], bias, backend=...); one line a scheme
SCHEMES: Mapping[str, Callable[..., QuantizedLinear]] = {
    **{f"int8-g{size}": partial(Int8Linear.from_weight, group_size=size) for size in GROUP_SIZES},
    "fp8-tensor": FP8Linear.from_weight,
    "fp8-row": partial(FP8Linear.from_weight, scaling="row"),
    "fp8-block128": FP8BlockLinear.from_weight,
    "nvfp4-48": SparseNVFP4Linear.from_weight,
    "nvfp4-48-a16": partial(SparseNVFP4Linear.from_weight, quantize_input=False),
    "nvfp4-g16": partial(NVFP4Linear.from_weight, group_size=16),
    "nvfp4-g32": partial(NVFP4Linear.from_weight, group_size=32),
}
# scheme -> (N, K) -> why a weight of that shape cannot be stored so, or None; absent: all can
MISFITS: Mapping[str, Callable[[int, int], str | None]] = {
    "nvfp4-48": SparseNVFP4Linear.why_not,
    "nvfp4-48-a16": SparseNVFP4Linear.why_not,
    "nvfp4-g16": partial(NVFP4Linear.why_not, group_size=16),
    "nvfp4-g32": partial(NVFP4Linear.why_not, group_size=32),
}

# These read .weight of the linears they own instead of calling them, so a swap would break them
_READ_THEIR_LINEARS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class SwappedLayer:
    """One module that was swapped; `also` holds its other names where a model uses it twice.

    Bytes of a weight that an earlier layer shares count there alone.
    """

    name: str
    shape: tuple[int, ...]  # [N, K]; of experts, [E, 2I, H] of the first product
    bytes_before: int
    bytes_after: int
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class SkippedLayer:
    """One linear layer, or one module of experts, that was left as it is."""

    name: str
    reason: str


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_` did. `str` is a summary to read; `as_dict` is the same for programs.

    Bytes count parameters and buffers, a shared tensor once.
    """

    scheme: str
    swapped: tuple[SwappedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    model_bytes_before: int
    model_bytes_after: int
    unmatched: tuple[str, ...] = ()  # skip patterns that matched none of these

    @property
    def bytes_before(self) -> int:
        """Bytes of the swapped layers before."""
        return sum(layer.bytes_before for layer in self.swapped)

    @property
    def bytes_after(self) -> int:
        """Bytes of the swapped layers after."""
        return sum(layer.bytes_after for layer in self.swapped)

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, ready for JSON."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {**asdict(self), **totals}

    def __str__(self) -> str:
        experts = sum(len(layer.shape) == 3 for layer in self.swapped)
        also = f" and {experts} modules of experts" if experts else ""
        lines = [
            f"{self.scheme}: {len(self.swapped) - experts} linear layers{also} swapped, "
            f"{len(self.skipped)} skipped",
            f"  swapped layers {_size(self.bytes_before)} -> {_size(self.bytes_after)}",
            f"  whole model    {_size(self.model_bytes_before)} -> {_size(self.model_bytes_after)}",
        ]
        lines += [f"  skipped {layer.name}: {layer.reason}" for layer in self.skipped]
        if self.unmatched:
            lines.append(f"  skip patterns that matched nothing: {', '.join(self.unmatched)}")
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


class _Site(Site):
    """Every place of one linear-like module."""

    @property
    def transposed(self) -> bool:
        """Whether the weight is [K, N], as in transformers' Conv1D."""
        return _is_transposed(self.module)

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    def matrix(self) -> torch.Tensor:
        """The weight as [N, K]."""
        return self.weight.detach().T if self.transposed else self.weight.detach()


DEFAULT_SKIP = ("lm_head",)  # whose absence is nothing to report


def quantize_(
    model: torch.nn.Module,
    scheme: str = "int8-g256",
    skip: Iterable[str] = DEFAULT_SKIP,
    *,
    backend: str = "auto",
) -> QuantizeReport:
    """Swap every torch.nn.Linear of `model`, and its experts, for quantized modules, in place.

    Args:
        model: any module. transformers' Conv1D (weight [K, N]) is swapped too.
        scheme: int8-g32, int8-g64, int8-g128, int8-g256 (`farro.nn.Int8Linear` with that group
            size); fp8-tensor, fp8-row (`farro.nn.FP8Linear`: one scale for the weight, and one for
            the input or for each of its rows), fp8-block128 (`farro.nn.FP8BlockLinear`); nvfp4-48,
            nvfp4-48-a16 (`farro.nn.SparseNVFP4Linear`: half of the weight's pairs pruned, inputs in
            NVFP4 or BF16); nvfp4-g16, nvfp4-g32 (`farro.nn.NVFP4Linear`: dense, emulated).
        skip: fnmatch patterns; a layer is left as it is where one matches its dotted name or the
            last part of it.
        backend: what the new modules ask of farro's operators.

    A module used under several names is swapped once; linears that share one weight share its
    codes, until the model is moved to another device: move it first. Left as they are, each named
    in the report with the reason: a weight tied to a module that stays (an embedding), a subclass
    of Linear with its own forward, a parametrized weight, a layer with hooks, a weight whose shape
    the scheme cannot store, the linears of torch.nn.MultiheadAttention and TransformerEncoderLayer,
    which read weights instead of calling layers.

    Experts are modules as transformers 5 has them: gate_up_proj and down_proj of three dimensions,
    and a forward of (hidden_states, top_k_index, top_k_weights). INT8 schemes make them
    `farro.nn.Int8Experts`, nvfp4-48 `farro.nn.SparseNVFP4Experts`; with another scheme they stay,
    as do those with biases, without a gate, or with another activation than SiLU.

    Returns:
        QuantizeReport: what was swapped, what was skipped and why, bytes before and after.

    Raises:
        TypeError: model is not a module, or skip holds something that is not a str.
        ValueError: an unknown scheme, model is itself a linear layer, NaN or Inf in a weight.
        No layer is swapped before all checks pass.
    """
    patterns = _check_arguments(model, scheme, skip, backend)
    sites = find_sites(model, _is_linear, _Site)
    before = weight_bytes(model)
    reasons = _skip_reasons(model, sites, patterns, scheme)
    chosen = [site for site in sites if site.name not in reasons]
    mixtures = find_experts(model)
    for experts in mixtures:
        reason = _matched_pattern(experts.names, patterns) or why_they_stay(experts, scheme)
        if reason:
            reasons[experts.name] = reason
    for site in chosen:
        site.check_finite(f"the weight of {site.name}", site.weight.detach())
    chosen_experts = [experts for experts in mixtures if experts.name not in reasons]
    for experts in chosen_experts:
        check_finite(experts)
    already = {
        name: f"is an {type(module).__name__} already, {module.form}"
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    swapped = _swap(chosen, partial(SCHEMES[scheme], backend=backend))
    swapped += [_swap_experts(experts, scheme, backend) for experts in chosen_experts]
    names = [name for site in (*sites, *mixtures) for name in site.names]
    return QuantizeReport(
        scheme=scheme,
        swapped=tuple(swapped),
        skipped=tuple(SkippedLayer(*item) for item in (*reasons.items(), *already.items())),
        model_bytes_before=before,
        model_bytes_after=weight_bytes(model),
        unmatched=tuple(
            p
            for p in patterns
            if p not in DEFAULT_SKIP and not any(_matches(p, name) for name in names)
        ),
    )


def _check_arguments(model: Any, scheme: Any, skip: Any, backend: Any) -> tuple[str, ...]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(scheme, str):
        raise TypeError(f"quantize_: scheme must be a str, got {type(scheme).__name__}")
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_: scheme is {scheme!r}; needed one of {', '.join(SCHEMES)}")
    check_backend("quantize_", backend)
    if not isinstance(skip, Iterable):
        raise TypeError(
            f"quantize_: skip must be str patterns, got {type(skip).__name__}; pass () for none"
        )
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"quantize_: skip holds a {type(pattern).__name__}; needed str patterns"
            )
    if _is_linear(model) or isinstance(model, QuantizedLinear):
        raise ValueError(
            f"quantize_: model is itself a {type(model).__name__}, which has no parent to be "
            "swapped in; use farro.nn.Int8Linear.from_linear(model), or another module of farro.nn"
        )
    return patterns


def _is_transposed(module: torch.nn.Module) -> bool:
    """transformers' Conv1D, told by its shape so that transformers need not be installed."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and getattr(module, "nf", None) == weight.shape[1]
    )


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or _is_transposed(module)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _skip_reasons(
    model: torch.nn.Module, sites: list[_Site], patterns: tuple[str, ...], scheme: str
) -> dict[str, str]:
    """Site name -> why it stays as it is."""
    reasons = {}
    for site in sites:
        reason = _matched_pattern(site.names, patterns) or _why_not(site) or _misfit(site, scheme)
        if reason:
            reasons[site.name] = reason
    # a weight that something else keeps would be held twice, so its other users stay too
    swappable = {id(site.module) for site in sites if site.name not in reasons}
    keepers: dict[Any, str] = {}
    for name, module in model.named_modules():
        if id(module) not in swappable:
            for key, parameter in module.named_parameters(recurse=False):
                keepers.setdefault(_identity(parameter), f"{name}.{key}" if name else key)
    for site in sites:
        keeper = keepers.get(_identity(site.weight))
        if keeper and site.name not in reasons:
            reasons[site.name] = f"its weight is tied to {keeper}, which stays as it is"
    return {site.name: reasons[site.name] for site in sites if site.name in reasons}


def _matched_pattern(names: Iterable[str], patterns: tuple[str, ...]) -> str | None:
    for pattern in patterns:
        if any(_matches(pattern, name) for name in names):
            return f"matches skip pattern {pattern!r}"
    return None


def _why_not(site: _Site) -> str | None:
    """Why a swap would change what this module does, or None."""
    module, kind = site.module, type(site.module).__name__
    for parent, _, _ in site.places:
        if isinstance(parent, _READ_THEIR_LINEARS):
            return f"{type(parent).__name__} reads its weight instead of calling it"
    if parametrize.is_parametrized(module):
        return (
            "its weight is parametrized; torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if not site.transposed and type(module).forward is not torch.nn.Linear.forward:
        return f"{kind} is a subclass of Linear with a forward of its own"
    if type(site.weight) is not torch.nn.Parameter:
        return f"its weight is a {type(site.weight).__name__}, not a plain Parameter"
    if hooks := site.hooks():
        return hooks
    for name, tensor in (("weight", site.weight), ("bias", module.bias)):
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in DTYPES:
            given = str(tensor.dtype).removeprefix("torch.")
            return f"its {name} has dtype {given}; needed bfloat16, float16 or float32"
    if isinstance(module.bias, torch.Tensor):
        n = site.matrix().shape[0]
        if tuple(module.bias.shape) != (n,):
            return f"its bias has shape {list(module.bias.shape)}; needed [{n}]"
        if module.bias.device != site.weight.device:
            return f"its bias is on {module.bias.device} and its weight on {site.weight.device}"
    return None


def _misfit(site: _Site, scheme: str) -> str | None:
    """Why the scheme cannot store a weight of this shape, or None."""
    why_not = MISFITS.get(scheme)
    n, k = site.matrix().shape
    return why_not(n, k) if why_not else None


def _swap(chosen: list[_Site], make: Callable[..., QuantizedLinear]) -> list[SwappedLayer]:
    made: dict[Any, QuantizedLinear] = {}  # linears that share one weight share its codes
    swapped = []
    for site in chosen:
        old, key = site.module, (_identity(site.weight), site.transposed)
        bias = old.bias if isinstance(old.bias, torch.Tensor) else None
        new = make(site.matrix(), bias).train(old.training)
        before, after = weight_bytes(old), weight_bytes(new)
        if key in made:
            before -= site.weight.numel() * site.weight.element_size()
            after -= new.tie_weight_(made[key])
        made[key] = new
        name, *also = site.names
        shape = (new.out_features, new.in_features)
        swapped.append(SwappedLayer(name, shape, before, after, tuple(also)))
        site.put(new)
    return swapped


def _swap_experts(site: ExpertSite, scheme: str, backend: str) -> SwappedLayer:
    before, shape = weight_bytes(site.module), site.shape
    after = weight_bytes(swap(site, scheme, backend))
    name, *also = site.names
    return SwappedLayer(name, shape, before, after, tuple(also))


def _identity(tensor: torch.Tensor) -> Any:
    """The same for two tensors that are the same memory."""
    if is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers; memory that two of them share counts once."""
    tensors = {
        _identity(tensor): tensor
        for tensor in (*module.parameters(), *module.buffers())
        if not is_lazy(tensor)
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
