"""The edge cases of fp8_blockwise_swiglu_quantize_fp8, as data, and how near is near enough."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..dispatch import Kernel
from ..formats.fp8 import BLOCK, E4M3, SCALE_FLOOR, blocks
from ..ops.fp8_blockwise_linear.reference import product
from ..ops.fp8_swiglu_quantize import fp8_blockwise_swiglu_quantize_fp8
from .case import Call, Case, Outcome, generator
from .compare import FP8_PROMOTED_SUM
from .fp8_blockwise_linear import codes_of, magnitude_of, scales_of, sum_error_of
from .layouts import Guarded, guarded, laid_out

_F32 = 2.0**-20  # a few roundings to FP32


@dataclass(frozen=True)
class SwigluCase(Case):
    """One problem of fp8_blockwise_swiglu_quantize_fp8, n columns of the result.

    Layouts are names of `farro.testing.LAYOUTS`; codes and scales are those of `BlockwiseCase`.
    """

    name: str
    m: int = 9
    n: int = 150
    k: int = 300
    input: str = "contiguous"
    weight: str = "contiguous"
    input_scale: str = "contiguous"
    weight_scale: str = "contiguous"
    output: str | None = None
    output_scale: str | None = None
    codes: str = "normal"
    scales: str = "usual"
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> SwigluCall:
        random = generator(seed, self.name)
        m, n, k = self.m, self.n, self.k
        of_weight = (2 * blocks(n), blocks(k))
        tensors = {
            "input": (codes_of(self.codes, (m, k), random), self.input),
            "gate_up_weight": (codes_of(self.codes, (2 * n, k), random), self.weight),
            "input_scale": (scales_of(self.scales, (m, blocks(k)), random), self.input_scale),
            "gate_up_weight_scale": (scales_of(self.scales, of_weight, random), self.weight_scale),
        }
        inputs = {name: laid_out(*given, device) for name, given in tensors.items()}
        outputs = {
            "output": ((m, n), E4M3, self.output),
            "output_scale": ((m, blocks(n)), torch.float32, self.output_scale),
        }
        places = {
            name: guarded(shape, dtype, layout, device)
            for name, (shape, dtype, layout) in outputs.items()
            if layout is not None
        }
        return SwigluCall(inputs, places)


class SwigluCall(Call):
    """`expected` is what the reference gives; `exact` what it is judged by."""

    sum_error = FP8_PROMOTED_SUM

    def __init__(self, inputs: dict[str, Guarded], places: dict[str, Guarded]) -> None:
        views = {name: place.view for name, place in places.items()}
        super().__init__(fp8_blockwise_swiglu_quantize_fp8, inputs, views)
        self.places = places

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, ...]:
        given = {name: place.view.cpu() for name, place in self.inputs.items() if place is not None}
        q, scale = self.function(**given, backend="reference")
        return q, scale

    @functools.cached_property
    def products(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """gate and up, exact in float64, and the sums of magnitudes that they are made of."""
        x, weight, input_scale, weight_scale = (
            place.view.cpu() for place in self.inputs.values() if place is not None
        )
        n = weight.shape[0] // 2
        gate = (x, weight[:n], input_scale, weight_scale[: blocks(n)])
        up = (x, weight[n:], input_scale, weight_scale[blocks(n) :])
        return product(*gate), product(*up), magnitude_of(*gate), magnitude_of(*up)

    def check(self, kernel: Kernel) -> Outcome:
        self.sum_error = sum_error_of(kernel)
        for place in self.places.values():
            place.restore()
        return super().check(kernel)

    def _judge(
        self, actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
    ) -> Outcome:
        for name, place in self.inputs.items():
            if place is not None and place.changed():
                return Outcome("failed", f"{place.changed()} elements of {name} were written")
        for name, place in self.places.items():
            if place.overwritten():
                return Outcome("failed", f"{place.overwritten()} elements beside {name} written")
        q, scale = actual
        found = far_from_swiglu(q, scale, *self.products, self.sum_error)
        found = found or codes_that_differ(q, expected[0], self.sum_error)
        return Outcome("ok") if found is None else Outcome("failed", found)

    def direct(self, kernel: Kernel) -> tuple[torch.Tensor, ...]:
        given = self.arguments
        x, weight = given["input"], given["gate_up_weight"]
        m, n = x.shape[0], weight.shape[0] // 2
        output = given.get("output")
        if output is None:
            output = torch.empty(m, n, dtype=E4M3, device=x.device)
        scale = given.get("output_scale")
        if scale is None:
            scale = torch.empty(m, blocks(n), dtype=torch.float32, device=x.device)
        if output.numel():
            scales = (given["input_scale"], given["gate_up_weight_scale"])
            config = kernel.config(self.problem)
            kernel.function()(config, x, weight, *scales, output, scale)
        return output, scale


def far_from_swiglu(
    q: torch.Tensor,
    scale: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_magnitude: torch.Tensor,
    up_magnitude: torch.Tensor,
    sum_error: float,
    rounding: float = 2.0**-8,
) -> str | None:
    """What of q [M,N] and scale [M, ceil(N/128)] lies too far from the exact SwiGLU, or None.

    gate, up and the sums of magnitudes behind them are float64 [M,N]. Errors are followed through
    the formula: of both sums (`sum_error`), of two roundings to BF16 (`rounding`, half the spacing
    at 1), and of one to E4M3:

        |v - silu(gate) up|        <= D, the first four of these
        |scale - max|v| / 448|     <= max(D) / 448 over the group
        |q scale - silu(gate) up|  <= D + half a step of E4M3 there
    """
    if q.dtype != E4M3 or scale.dtype != torch.float32:
        return f"dtypes are {q.dtype} and {scale.dtype}, needed {E4M3} and torch.float32"
    shapes = [list(q.shape), list(scale.shape)]
    needed = [list(gate.shape), [gate.shape[0], blocks(gate.shape[1])]]
    if shapes != needed:
        return f"shapes are {shapes}, needed {needed}"
    if q.numel() == 0:
        return None
    exact = torch.nn.functional.silu(gate) * up
    past = torch.stack((gate, up, exact)).abs().amax(0) > torch.finfo(torch.bfloat16).max
    exact = exact.masked_fill(past, torch.inf)  # in FP32 and BF16 it is infinite, or NaN
    error = _error_of_v(gate, up, gate_magnitude, up_magnitude, sum_error, rounding)
    groups = torch.arange(q.shape[1]) // BLOCK
    largest, allowed = (_of_groups(t).nan_to_num(posinf=torch.inf) for t in (exact.abs(), error))
    finite = _of_groups((~exact.isfinite()).double()) == 0
    given = scale.detach().cpu().double()
    want = (largest / 448).clamp_min(SCALE_FLOOR)
    close = (given - want).abs() <= allowed / 448 + _F32 * want
    wrong = torch.where(finite, ~close, given.isfinite())
    if bool(wrong.any()):
        return f"scale: {_told(wrong, given, want)}"
    codes = q.detach().cpu().double()
    finite = finite[:, groups]
    scales = given[:, groups]
    close = (codes * scales - exact).abs() <= error + _half_step(exact.abs() + error, scales)
    wrong = torch.where(finite, ~close, ~codes.isnan())
    return f"q * scale: {_told(wrong, codes * scales, exact)}" if bool(wrong.any()) else None


def _half_step(size: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Half the spacing of E4M3 numbers times `scale`, at `size` and below."""
    ratio = size * (1 + _F32) / scale
    exponent = torch.frexp(ratio).exponent.clamp(-5, 9)  # -5 is that of the smallest normal
    return torch.exp2(exponent.double() - 5) * scale + _F32 * size


def _error_of_v(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_magnitude: torch.Tensor,
    up_magnitude: torch.Tensor,
    sum_error: float,
    rounding: float,
) -> torch.Tensor:
    """A bound of |v - silu(gate) up|."""
    silu = torch.nn.functional.silu(gate).abs()
    in_gate = sum_error * gate_magnitude + _F32 * gate.abs()
    in_up = sum_error * up_magnitude + _F32 * up.abs()
    sigmoid = torch.sigmoid(gate)
    slope = (sigmoid * (1 + gate * (1 - sigmoid))).abs()
    in_silu = in_gate * (slope + in_gate / 2)  # the second derivative is at most 1/2
    in_silu = in_silu + rounding * (silu + in_silu) + _F32 * silu + 2.0**-133
    in_product = in_silu * (up.abs() + in_up) + silu * in_up
    return in_product + rounding * (silu * up.abs() + in_product) + 2.0**-133


def _of_groups(values: torch.Tensor) -> torch.Tensor:
    """The largest of each 128 columns; NaN where there is one."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return padded.view(values.shape[0], -1, BLOCK).amax(2)


def _told(wrong: torch.Tensor, got: torch.Tensor, needed: torch.Tensor) -> str:
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} are too far from the exact result; first at "
        f"{list(index)}: got {float(got[index])!r}, exact {float(needed[index])!r}"
    )


def codes_that_differ(q: torch.Tensor, expected: torch.Tensor, sum_error: float) -> str | None:
    """Of 1000 codes and more, 99.5 % equal the reference's, 95 % on tensor cores of 14 bits.

    A sum that moves by 2^-20 of itself makes v another BF16 number in one case of a thousand, and
    that another code in one of ten; one on tensor cores that moves by 2^-12, in one case of ten.
    A maximum that moves changes the scale of 128 codes, a tenth of which then differ.
    """
    if q.numel() < 1000:
        return None
    same = q.detach().cpu().view(torch.uint8) == expected.view(torch.uint8)
    share, needed = float(same.double().mean()), 0.995 if sum_error < FP8_PROMOTED_SUM else 0.95
    if share >= needed:
        return None
    return f"{100 * share:.2f} % of the codes are the reference's, needed {100 * needed} %"


def _sizes() -> list[SwigluCase]:
    sizes = [
        *((m, 160, 320) for m in (1, 2, 15, 16, 17, 33, 64, 65, 129, 257)),
        *((20, n, 320) for n in (1, 2, 64, 127, 128, 129, 192, 256, 257, 576)),
        *((17, 144, k) for k in (1, 16, 127, 128, 129, 192, 256, 576, 1040)),
        *((7, 9, 577), (577, 7, 9), (9, 577, 727), (129, 259, 859)),
    ]
    return [
        SwigluCase(f"m={m} n={n} k={k}", m, n, k, quick=m == 33 or k == 577) for m, n, k in sizes
    ]


def _layouts() -> list[SwigluCase]:
    plain = ("offset", "columns", "padded", "transposed", "transposed columns", "strided")
    cases = []
    for view in (*plain, "windows"):
        quick = view == "columns"
        cases.append(SwigluCase(f"input {view}", k=320, input=view, quick=quick))
        cases.append(SwigluCase(f"weight {view}", k=320, weight=view, quick=quick))
    for view in ("transposed", "transposed padded", "columns", "offset", "strided", "windows"):
        cases.append(SwigluCase(f"scales {view}", input_scale=view, weight_scale=view))
        cases.append(SwigluCase(f"scales {view} m=70", m=70, input_scale=view))
    for view in ("contiguous", *plain):
        quick = view == "transposed"
        for m in (9, 70):
            name = f"outputs {view} m={m}"
            cases.append(SwigluCase(name, m=m, output=view, output_scale=view, quick=quick))
        cases.append(SwigluCase(f"output {view} alone", output=view))
        cases.append(SwigluCase(f"output_scale {view} alone", output_scale=view))
    names = ("input", "weight", "input_scale", "weight_scale", "output", "output_scale")
    for m, k in ((1, 300), (70, 300), (9, 32)):
        every = dict.fromkeys(names, "strided")
        name = f"every operand strided m={m} k={k}"
        cases.append(SwigluCase(name, m=m, k=k, **every))  # type: ignore[arg-type]
    return cases


def _values() -> list[SwigluCase]:
    cases = []
    for codes in ("full", "small", "largest", "subnormal", "zero", "nan"):
        quick = codes in ("full", "nan")
        cases.append(SwigluCase(f"codes {codes}", 17, 145, 520, codes=codes, quick=quick))
    for scales in ("signed", "zero", "nonfinite", "tiny", "huge", "wide"):
        quick = scales in ("nonfinite", "wide")
        cases.append(SwigluCase(f"scales {scales}", 17, 145, 520, scales=scales, quick=quick))
    return cases


def _empties() -> list[SwigluCase]:
    return [
        SwigluCase(f"empty m={m} n={n} k={k}", m, n, k, quick=True)
        for m, n, k in ((0, 7, 64), (9, 0, 64), (9, 7, 0), (0, 0, 0), (0, 7, 0), (9, 0, 0))
    ]


def swiglu_cases() -> list[SwigluCase]:
    """The edge cases of the specification: sizes, tails, views, values, empty problems."""
    return [*_sizes(), *_layouts(), *_values(), *_empties()]
