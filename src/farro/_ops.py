"""The torch operators of farro: one library, whose namespace another build may rename here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    if grad:
        _refuse_backward(name)


def _raise_no_backward(grad: torch.Tensor, name: str) -> torch.Tensor:
    raise RuntimeError(
        f"farro.{name} is for inference: it has no backward. "
        "Run it under torch.no_grad(), or detach its inputs"
    )


LIBRARY.define("no_backward(Tensor grad, str name) -> Tensor")
LIBRARY.impl("no_backward", _raise_no_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::no_backward", lambda grad, name: torch.empty_like(grad), lib=LIBRARY
)


def _refuse_backward(name: str) -> None:
    """The refusal is an operator itself: compiling with gradients works, running it raises."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.inputs = len(inputs)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad = next(g for g in grads if g is not None)
        refusal = ops.no_backward(grad, name)
        return tuple(refusal for _ in range(ctx.inputs))

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )
