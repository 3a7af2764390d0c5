"""From a call of a public function to the kernel that runs it: torch operators, fakes, the choice.

One torch operator gives a new tensor, one writes `out`, one adds to `residual` in place; the
epilogue is an argument of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ..._ops import define, is_plain, ops
from ...arch import Arch
from ...checks import check_no_overlap
from ...dispatch import Operator, explained_by, remember, select
from ...problem import Problem, kind_of
from .checks import FUNCTIONS, check, check_arguments, over_rows
from .kernels import OPERATOR, PINNING

F = TypeVar("F", bound=Callable[..., Any])
_Maybe = torch.Tensor | None


class Call(NamedTuple):
    """The arguments of a public function, whichever it is; in place, `out` is `residual`."""

    epilogue: str
    input: torch.Tensor
    weight: torch.Tensor
    alpha: float | torch.Tensor
    bias: _Maybe = None
    residual: _Maybe = None
    out: _Maybe = None
    variant: int = 0
    fast_accum: bool = False
    backend: str = "auto"

    @property
    def alpha_tensor(self) -> _Maybe:
        return self.alpha if isinstance(self.alpha, torch.Tensor) else None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, _Maybe, _Maybe, _Maybe, _Maybe]:
        return self.input, self.weight, self.alpha_tensor, self.bias, self.residual, self.out

    def check(self) -> None:
        check_arguments(*self)
        check(self.epilogue, *self.tensors())

    def problem(self, arch: Arch | None = None) -> Problem:
        """Checked, with the tile that it pins."""
        found = problem_of(self, arch)
        PINNING.check(FUNCTIONS[self.epilogue], found, self.backend)
        return found

    def runner(self) -> Any:
        """The kernel and configuration, checked and chosen once for each kind of call."""
        in_place = self.out is not None and self.out is self.residual
        options = (self.epilogue, self.variant, self.fast_accum, self.backend, in_place)
        key = (*map(kind_of, self.tensors()), *options)
        run = _RUNNERS.get(key)
        if run is None:
            self.check()
            run = select(OPERATOR, self.problem(), self.backend).run
            remember(_RUNNERS, key, run)
        return run

    def write(self, run: Callable[..., None], out: torch.Tensor) -> None:
        residual = over_rows(self.residual, self.input.shape[0])
        run(
            *(self.input, self.weight, self.alpha, self.bias, residual, out),
            *(self.epilogue, self.fast_accum),
        )


_RUNNERS: dict[Any, Any] = {}


def problem_of(call: Call, arch: Arch | None = None) -> Problem:
    """A call described: alpha is None where a number, a repeated residual has zero strides."""
    input, weight, alpha, bias, residual, out = call.tensors()
    shape = (input.shape[0], weight.shape[0])
    if out is None:  # what the call will allocate
        out = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    tensors = {
        "input": input,
        "weight": weight,
        "alpha": alpha,
        "bias": bias,
        "residual": over_rows(residual, shape[0]),
        "out": out,
    }
    params = {
        "epilogue": call.epilogue,
        "fast_accum": call.fast_accum,
        "variant": call.variant,
    }
    return Problem.of("fp8_linear", tensors, params, arch)


def _implementation(
    input: torch.Tensor,
    weight: torch.Tensor,
    number: float,
    alpha: _Maybe,
    bias: _Maybe,
    residual: _Maybe,
    epilogue: str,
    variant: int,
    fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    scale = number if alpha is None else alpha
    options = (variant, fast_accum, backend)
    call = Call(epilogue, input, weight, scale, bias, residual, None, *options)
    run = call.runner()
    shape = (input.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=torch.bfloat16, device=input.device)
    if out.numel():
        call.write(run, out)
    return out


def _out_implementation(
    input: torch.Tensor,
    weight: torch.Tensor,
    number: float,
    alpha: _Maybe,
    bias: _Maybe,
    epilogue: str,
    out: torch.Tensor,
    variant: int,
    fast_accum: bool,
    backend: str,
) -> None:
    scale = number if alpha is None else alpha
    options = (variant, fast_accum, backend)
    _write_over("out", out, Call(epilogue, input, weight, scale, bias, None, out, *options))


def _residual_implementation(
    input: torch.Tensor,
    weight: torch.Tensor,
    number: float,
    alpha: _Maybe,
    bias: torch.Tensor,
    residual: torch.Tensor,
    fast_accum: bool,
    backend: str,
) -> None:
    scale = number if alpha is None else alpha
    tensors = (input, weight, scale, bias, residual, residual)
    _write_over("residual", residual, Call("bias_residual", *tensors, 0, fast_accum, backend))


def _write_over(written: str, out: torch.Tensor, call: Call) -> None:
    run = call.runner()
    if out.numel() == 0:
        return
    inputs = dict(zip(("input", "weight", "alpha", "bias"), call.tensors()))
    check_no_overlap(FUNCTIONS[call.epilogue], written, out, **inputs)
    call.write(run, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # kernels that write by address do not


def _fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    number: float,
    alpha: _Maybe,
    bias: _Maybe,
    residual: _Maybe,
    epilogue: str,
    variant: int,
    fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    scale = number if alpha is None else alpha
    options = (variant, fast_accum, backend)
    Call(epilogue, input, weight, scale, bias, residual, None, *options).check()
    shape = (input.shape[0], weight.shape[0])
    return torch.empty(shape, dtype=torch.bfloat16, device=input.device)


def _out_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    number: float,
    alpha: _Maybe,
    bias: _Maybe,
    epilogue: str,
    out: torch.Tensor,
    variant: int,
    fast_accum: bool,
    backend: str,
) -> None:
    scale = number if alpha is None else alpha
    options = (variant, fast_accum, backend)
    Call(epilogue, input, weight, scale, bias, None, out, *options).check()


def _residual_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    number: float,
    alpha: _Maybe,
    bias: torch.Tensor,
    residual: torch.Tensor,
    fast_accum: bool,
    backend: str,
) -> None:
    scale = number if alpha is None else alpha
    tensors = (input, weight, scale, bias, residual, residual)
    Call("bias_residual", *tensors, 0, fast_accum, backend).check()


_OPERANDS = "Tensor input, Tensor weight, float number, Tensor? alpha"
define(
    f"fp8_linear({_OPERANDS}, Tensor? bias, Tensor? residual, str epilogue, int variant, "
    "bool fast_accum, str backend) -> Tensor",
    _implementation,
    _fake,
)
define(
    f"fp8_linear_out({_OPERANDS}, Tensor? bias, str epilogue, Tensor(a!) out, int variant, "
    "bool fast_accum, str backend) -> ()",
    _out_implementation,
    _out_fake,
    grad=False,
)
define(
    f"fp8_linear_bias_residual_({_OPERANDS}, Tensor bias, Tensor(a!) residual, "
    "bool fast_accum, str backend) -> ()",
    _residual_implementation,
    _residual_fake,
    grad=False,
)


def linear(
    epilogue: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: _Maybe,
    residual: _Maybe,
    out: _Maybe,
    variant: int,
    fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    """What the public functions do with their arguments."""
    tensors = (bias, residual, out)
    check_arguments(epilogue, input, weight, alpha, *tensors, variant, fast_accum, backend)
    number, scale = (1.0, alpha) if isinstance(alpha, torch.Tensor) else (alpha, None)
    number = float(number) if isinstance(number, int) else number
    plain = is_plain(input, weight, scale, *tensors)
    result: torch.Tensor
    if epilogue == "bias_residual":
        assert bias is not None and residual is not None
        if _records(input, weight, scale, bias, residual):
            # autograd has to learn of the write, and then refuses the backward
            operands = (input, weight, number, scale, bias, residual)
            result = ops.fp8_linear(*operands, epilogue, variant, fast_accum, backend)
            return residual.copy_(result)
        add = _residual_implementation if plain else ops.fp8_linear_bias_residual_
        add(input, weight, number, scale, bias, residual, fast_accum, backend)
        return residual
    options = (variant, fast_accum, backend)
    if out is None:
        call = _implementation if plain else ops.fp8_linear
        result = call(input, weight, number, scale, bias, residual, epilogue, *options)
        return result
    call_out = _out_implementation if plain else ops.fp8_linear_out
    call_out(input, weight, number, scale, bias, epilogue, out, *options)
    return out


def _records(*tensors: _Maybe) -> bool:
    """Whether autograd records a call on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def described(epilogue: str) -> Callable[[F], F]:
    """Register a public function with `explain`: its arguments, by its own signature."""

    def register(function: F) -> F:
        signature = inspect.signature(function)

        def describe(
            *args: Any, arch: Arch | None = None, **keywords: Any
        ) -> tuple[Operator, Problem, str]:
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            call = Call(epilogue, **bound.arguments)
            check_arguments(*call)
            if epilogue == "bias_residual":
                call = call._replace(out=call.residual)
            call.check()
            return OPERATOR, call.problem(arch), call.backend

        return explained_by(describe)(function)

    return register
