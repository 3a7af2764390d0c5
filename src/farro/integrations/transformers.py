"""transformers: experts_implementation="farro", and expert modules swapped for Int8Experts.

`register()` makes the name known; then

    model.set_experts_implementation("farro")       # or from_pretrained(experts_implementation=...)

runs the experts of any model whose expert modules transformers dispatches. Each module's weights
are quantized at its first call and kept beside the dense ones. `quantize_experts_(model)` swaps the
modules instead, which frees the dense weights, and works whatever implementation is set.
"""

from __future__ import annotations

import sys

import torch

from ..errors import UnsupportedError
from ..nn import Int8Experts

NAME = "farro"
_GROUP_SIZE = 256
_PARTS = ("gate_up_proj", "down_proj")

# of an expert module: the state of its weights, and what they were quantized to
_ATTRIBUTE = "_farro_int8"


def register(name: str = NAME) -> None:
    """Make `experts_implementation=name` known to transformers; once more does no harm.

    Raises:
        ImportError: transformers is not installed, or older than 5.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(name, experts_forward)
    # names are looked up in one registry or the other, and a model is asked for both
    from transformers.integrations import finegrained_fp8

    fp8 = getattr(finegrained_fp8, "FP8ExpertsInterface", None)
    if fp8 is not None:
        fp8.register(name, experts_forward)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What transformers calls in place of an expert module's forward; [T, H] in and out."""
    result: torch.Tensor = _of(self)(hidden_states, top_k_index, top_k_weights)
    return result


def _of(experts: torch.nn.Module) -> Int8Experts:
    """The module's weights in INT8, quantized anew where they have changed."""
    kept = experts.__dict__.get(_ATTRIBUTE)
    if torch.compiler.is_compiling():
        if kept is None:
            raise RuntimeError(
                f"{type(experts).__name__}: its experts are not quantized yet, and the model is "
                "being compiled; call the model once before, or quantize_experts_(model)"
            )
        compiled: Int8Experts = kept[1]
        return compiled
    parts = [getattr(experts, name, None) for name in _PARTS]
    state = tuple((p.data_ptr(), p._version) for p in parts if isinstance(p, torch.Tensor))
    if kept is None or kept[0] != state:
        kept = state, int8_experts(experts)
        experts.__dict__[_ATTRIBUTE] = kept  # no submodule: the state dict is the model's own
    made: Int8Experts = kept[1]
    return made


def int8_experts(
    experts: torch.nn.Module, group_size: int = _GROUP_SIZE, *, backend: str = "auto"
) -> Int8Experts:
    """The Int8Experts of one of transformers' expert modules, which is left as it is.

    Raises:
        UnsupportedError: experts that farro.moe_ffn does not compute: another activation than
            SiLU, biases, no gate, a norm or a gating of their own, weights that are quantized
            already.
        TypeError, ValueError: as Int8Experts.from_dense.
    """
    reason = why_not(experts)
    if reason is not None:
        raise UnsupportedError(
            f"moe_ffn cannot run {type(experts).__name__}: {reason}. Take another "
            "experts_implementation for this model"
        )
    gate_up, down = (getattr(experts, name).detach() for name in _PARTS)
    if getattr(experts, "is_transposed", False):  # [E, H, 2I] and [E, I, H]
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    concatenated = getattr(experts, "is_concatenated", True)
    return Int8Experts.from_dense(
        *(gate_up, down, group_size),
        gate_up_layout="concatenated" if concatenated else "interleaved",
        backend=backend,
    )


def why_not(experts: torch.nn.Module) -> str | None:
    """Why these experts are not what farro.moe_ffn computes, or None."""
    if not getattr(experts, "has_gate", True):
        return "they have no gate"
    if getattr(experts, "has_bias", False):
        return "they have biases"
    if getattr(experts, "has_post_expert_norm", False):
        return "they have a norm after each expert"
    for name in _PARTS:
        weight = getattr(experts, name, None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
            return f"they have no {name} of three dimensions"
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} has dtype {str(weight.dtype).removeprefix('torch.')}, not a dense one"
    # where it is not imported, nothing of its can be here
    moe = sys.modules.get("transformers.integrations.moe")
    gate = getattr(type(experts), "_apply_gate", None)
    usual = None if moe is None else getattr(moe, "_default_apply_gate", gate)
    if gate is not None and gate is not usual:
        return "they have a gating of their own"
    activation = getattr(experts, "act_fn", None)
    if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        return f"their activation is {type(activation).__name__}, not SiLU"
    return None


def quantize_experts_(
    model: torch.nn.Module, group_size: int = _GROUP_SIZE, *, backend: str = "auto"
) -> list[str]:
    """Swap every expert module of a transformers model for its Int8Experts, in place.

    Expert modules are told by `gate_up_proj` and `down_proj` of three dimensions. Their dense
    weights are freed one after the other. Linear layers are left to `farro.quantize_`.

    Returns:
        The dotted names of the swapped modules; empty where the model has none.

    Raises what `int8_experts` raises; nothing is swapped where one of the modules cannot be.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, Int8Experts)
        and all(getattr(getattr(module, part, None), "ndim", 0) == 3 for part in _PARTS)
    }
    for name, module in found.items():
        reason = why_not(module)
        if reason is not None:
            raise UnsupportedError(f"quantize_experts_: moe_ffn cannot run {name}: {reason}")
    names = list(found)
    found.clear()
    for name in names:
        experts = int8_experts(model.get_submodule(name), group_size, backend=backend)
        model.set_submodule(name, experts.train(model.training))
    return names
