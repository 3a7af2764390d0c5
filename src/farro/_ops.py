"""The torch operators of farro: one library, whose namespace another build may rename here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

NAMESPACE = "farro"
LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
ops: Any = getattr(torch.ops, NAMESPACE)


def define(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], grad: bool = True
) -> None:
    """Define an operator for every device, with its fake and, if functional, a refusing backward.

    `Library.define` is used because an eager call through `custom_op` costs three times as much.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    kernel = implementation if grad else _without_grad(implementation)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    if grad:
        _refuse_backward(name)


def _without_grad(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An operator with no autograd kernel runs in the caller's grad mode: torch's out= refuses."""

    def run(*args: Any) -> Any:
        if forward_ad._current_level >= 0:  # no tangent of an input may reach what is written
            with torch._C._AutoDispatchBelowAutograd():
                return implementation(*args)
        if not torch.is_grad_enabled():
            return implementation(*args)
        with torch.no_grad():
            return implementation(*args)

    return run


def _raise_no_backward(
    grad: torch.Tensor, shape: list[int], dtype: torch.dtype, name: str
) -> torch.Tensor:
    raise RuntimeError(
        f"farro.{name} is for inference: it has no backward. "
        "Run it under torch.no_grad(), or detach its inputs"
    )


LIBRARY.define("no_backward(Tensor grad, SymInt[] shape, ScalarType dtype, str name) -> Tensor")
LIBRARY.impl("no_backward", _raise_no_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::no_backward",
    lambda grad, shape, dtype, name: grad.new_empty(shape, dtype=dtype),
    lib=LIBRARY,
)


def _refuse_backward(name: str) -> None:
    """The refusal is an operator itself: compiling with gradients works, running it raises."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.specs = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in inputs]

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad = next(g for g in grads if g is not None)
        return tuple(
            ops.no_backward(grad, spec[0], spec[1], name) if needed and spec is not None else None
            for spec, needed in zip(ctx.specs, ctx.needs_input_grad)
        )

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether a call may go straight to its kernel, past the dispatcher: half of its host time.

    Not while anything watches or rewrites calls (compiling, fake tensors, modes, transforms,
    tracing, profiling), nor for subclasses, meta tensors and lazy negations, whose memory holds
    other values, nor where autograd, backward or forward, must learn of the call.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._autograd._profiler_enabled() or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES or tensor.is_meta or tensor.is_neg():
            return False
        if grad and tensor.requires_grad:
            return False
    return True
