"""fp8_linear against independent arithmetic: every back end, epilogue, form of alpha and residual.

Codes are decoded here from their bits, and summed as rational numbers or in float64.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import farro
from farro import dispatch
from farro.catalogue import operator_named
from farro.testing import assert_bit_equal, assert_close_to_exact, poisoned_memory

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
EPILOGUES = ("none", "residual", "bias", "bias_residual", "bias_gelu")
HERE = [
    kernel.backend
    for kernel in operator_named("fp8_linear").kernels
    if "cpu" in kernel.needs or not kernel.needs
]
backends = pytest.mark.parametrize("backend", HERE)


def value_of(code: int) -> Fraction | None:
    """An E4M3 code by the definition of the format; None is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    size = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -size if sign else size


VALUES = torch.tensor([math.nan if (v := value_of(c)) is None else float(v) for c in range(256)])


def decode(codes: torch.Tensor) -> torch.Tensor:
    return VALUES.double()[codes.view(torch.uint8).cpu().int()]


def codes(generator, *shape) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(E4M3)


def call(epilogue: str, x, weight, alpha, bias, residual, **options) -> torch.Tensor:
    """The public function of an epilogue; bias_residual on a copy."""
    function = {
        "none": farro.fp8_linear_bf16,
        "residual": farro.fp8_linear_residual_bf16,
        "bias": farro.fp8_linear_bias_bf16,
        "bias_residual": farro.fp8_linear_bias_residual_bf16,
        "bias_gelu": farro.fp8_linear_bias_gelu_bf16,
    }[epilogue]
    given = {"bias": bias} if "bias" in epilogue else {}
    if "residual" in epilogue:
        given["residual"] = residual.clone() if epilogue == "bias_residual" else residual
    result = function(x, weight, alpha=alpha, **given, **options)
    assert epilogue != "bias_residual" or result is given["residual"]
    return result


def exact(epilogue: str, x, weight, alpha: float, bias, residual):
    """The float64 result and the magnitude of its terms."""
    a, b = decode(x), decode(weight)
    total, size = alpha * (a @ b.T), abs(alpha) * (a.abs() @ b.abs().T)
    terms = [bias] * ("bias" in epilogue) + [residual] * ("residual" in epilogue)
    for term in terms:
        total, size = total + term.double(), size + term.double().abs()
    if epilogue == "bias_gelu":
        total = torch.nn.functional.gelu(total, approximate="tanh")
    return total, size * 1.2


@backends
def test_every_pair_of_codes(backend):
    """All 65,536 products, NaN too: K = 1, so that the sum is the product, and BF16 holds it."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).unsqueeze(1)
    out = farro.fp8_linear_bf16(every, every, backend=backend)
    want = VALUES.double().unsqueeze(1) * VALUES.double()
    assert_bit_equal(out + 0.0, want.to(BF16) + 0.0)  # the sign of zero is the sum's


def test_the_reference_sums_exactly(generator):
    """Against rational numbers: one rounding to FP32, then one to BF16."""
    bits = torch.randint(0, 254, (2, 3, 700), generator=generator).to(torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0
    x, weight = bits.view(E4M3)
    out = farro.fp8_linear_bf16(x, weight, backend="reference")
    for i in range(3):
        for j in range(3):
            pairs = zip(bits[0, i].tolist(), bits[1, j].tolist())
            total = sum(value_of(p) * value_of(q) for p, q in pairs)
            assert out[i, j] == torch.tensor(float(total), dtype=torch.float32).to(BF16)


@backends
@pytest.mark.parametrize("form", ("number", "0-D", "1-D"))
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue, form, backend, generator):
    for m, n, k, dtype in ((1, 40, 96, BF16), (19, 33, 300, torch.float32), (130, 17, 64, BF16)):
        x, weight = codes(generator, m, k), codes(generator, n, k)
        bias = torch.randn(n, generator=generator).to(dtype)
        residual = torch.randn(m, n, generator=generator).to(BF16)
        number = float(torch.randn((), generator=generator))
        alpha = {"number": number, "0-D": torch.tensor(number), "1-D": torch.tensor([number])}
        with poisoned_memory():
            out = call(epilogue, x, weight, alpha[form], bias, residual, backend=backend)
        assert out.dtype is BF16 and out.is_contiguous()
        want, size = exact(epilogue, x, weight, number, bias, residual)
        assert_close_to_exact(out, want, size, sum_error=2.0**-15, what=f"{m}x{n}x{k}")


def test_the_order_of_the_epilogue():
    """(alpha * sum + bias) + residual in FP32, where other orders give other numbers."""
    x = weight = torch.ones(1, 1).to(E4M3)
    bias, residual = torch.tensor([2.0**26]), torch.tensor([[-(2.0**26)]]).to(BF16)
    out = farro.fp8_linear_bias_residual_bf16(x, weight, bias, residual, alpha=1.0)
    assert out.item() == 0.0  # 1 is lost in 2^26, as it is added first
    out = farro.fp8_linear_bias_bf16(x, weight, torch.tensor([2.0**-9]), alpha=1.0)
    assert out.item() == 1.0
    rounded = farro.fp8_linear_bias_bf16(x, weight, torch.tensor([2.0**-8 + 2.0**-20]))
    assert rounded.item() == 1 + 2.0**-7  # one rounding: BF16(bias) first would end at 1


@backends
@pytest.mark.parametrize("shape", ("N", "1N"))
def test_a_residual_of_one_row_is_added_to_every_row(shape, backend, generator):
    x, weight = codes(generator, 9, 48), codes(generator, 24, 48)
    row = torch.randn(24, generator=generator).to(BF16)
    given = row if shape == "N" else row.unsqueeze(0)
    before = given.clone()
    out = farro.fp8_linear_residual_bf16(x, weight, given, 0.5, backend=backend)
    whole = row.expand(9, 24).contiguous()
    assert_bit_equal(out, farro.fp8_linear_residual_bf16(x, weight, whole, 0.5, backend=backend))
    assert_bit_equal(given, before)
    one = farro.fp8_linear_residual_bf16(x[:1], weight, given, 0.5, backend=backend)
    assert one.shape == (1, 24)


@backends
def test_the_residual_is_written_in_place_in_any_layout(backend, generator):
    x, weight, bias = codes(generator, 9, 48), codes(generator, 24, 48), torch.ones(24)
    wide = torch.randn(9, 3 * 24, generator=generator).to(BF16)
    for view in (lambda t: t[:, 24:48], lambda t: t[:, ::3], lambda t: t.view(27, 24)[::3]):
        buffer = wide.clone()
        residual = view(buffer)
        want, size = exact("bias_residual", x, weight, 0.25, bias, residual)
        result = farro.fp8_linear_bias_residual_bf16(
            x, weight, bias, residual, 0.25, backend=backend
        )
        assert result is residual
        assert_close_to_exact(residual, want, size, sum_error=2.0**-15)
        view(buffer).copy_(view(wide))
        assert_bit_equal(buffer, wide)  # nothing beside the view has changed


def test_autograd_learns_that_the_residual_was_written(generator):
    x, weight, bias = codes(generator, 3, 16), codes(generator, 4, 16), torch.ones(4)
    residual = torch.ones(3, 4, dtype=BF16)
    product = (torch.ones(3, 4, dtype=BF16, requires_grad=True) * residual).sum()
    farro.fp8_linear_bias_residual_bf16(x, weight, bias, residual)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    leaf = torch.ones(3, 4, dtype=BF16, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        farro.fp8_linear_bias_residual_bf16(x, weight, bias, leaf)
    result = farro.fp8_linear_bias_residual_bf16(x, weight, bias, leaf * 2)
    assert_bit_equal(
        result.detach(), farro.fp8_linear_bias_residual_bf16(x, weight, bias, leaf.detach() * 2)
    )
    with pytest.raises(RuntimeError, match=r"farro\.fp8_linear.*inference"):
        result.sum().backward()


@backends
def test_fast_accumulation_and_long_sums(backend, generator):
    for k in (512, 2048, 5000):
        x, weight = codes(generator, 20, k), codes(generator, 30, k)
        want, size = exact("none", x, weight, 0.01, None, None)
        for fast, bound in ((False, 4e-3), (True, 1.5e-2)):
            out = farro.fp8_linear_bf16(x, weight, 0.01, fast_accum=fast, backend=backend)
            assert_close_to_exact(out, want, size, 2.0**-15, frobenius=bound)


@backends
def test_nan_stays_in_its_row_and_column(backend, generator):
    """Whole rows of it too: a unit that reads past the end of a row meets its neighbour there."""
    for k in (8, 100, 150, 300):
        x, weight = codes(generator, 33, k), codes(generator, 40, k)
        clean = farro.fp8_linear_bf16(x, weight, backend=backend)
        for row, column in ((5, k - 1), (20, 0), (31, slice(None))):
            x.view(torch.uint8)[row, column] = 0xFF
            clean[row] = math.nan
        for row, column in ((7, 0), (8, slice(None)), (39, k - 1)):
            weight.view(torch.uint8)[row, column] = 0x7F
            clean[:, row] = math.nan
        assert_bit_equal(farro.fp8_linear_bf16(x, weight, backend=backend), clean, f"k={k}")


@backends
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_sum_over_nothing_is_zero_and_the_epilogue_applies(epilogue, backend, generator):
    x, weight = torch.empty(5, 0).to(E4M3), torch.empty(7, 0).to(E4M3)
    bias, residual = torch.randn(7, generator=generator), torch.ones(5, 7, dtype=BF16)
    with poisoned_memory():
        out = call(epilogue, x, weight, 3.0, bias, residual, backend=backend)
    want, size = exact(epilogue, x, weight, 3.0, bias, residual)
    assert_close_to_exact(out, want, size)


def test_alpha_in_a_tensor_is_read_when_the_kernel_runs(generator):
    x, weight = codes(generator, 4, 32), codes(generator, 8, 32)
    alpha = torch.tensor(1.0)
    first = farro.fp8_linear_bf16(x, weight, alpha)
    alpha.fill_(-2.0)
    assert_bit_equal(farro.fp8_linear_bf16(x, weight, alpha), first * -2)
    assert_bit_equal(farro.fp8_linear_bf16(x, weight, -2), first * -2)
    third = torch.tensor([1 / 3])
    assert_bit_equal(
        farro.fp8_linear_bf16(x, weight, third), farro.fp8_linear_bf16(x, weight, 1 / 3)
    )


@pytest.mark.parametrize("name", ("input", "weight", "bias", "alpha"))
def test_outputs_that_share_memory_with_an_input_are_refused(name, generator):
    memory = torch.zeros(4096, dtype=torch.uint8)
    place = memory[:512]
    given = {
        "input": codes(generator, 4, 32),
        "weight": codes(generator, 16, 32),
        "bias": torch.zeros(16),
        "alpha": torch.ones(1),
    }
    size = given[name].numel() * given[name].element_size()
    given[name] = place[:size].view(given[name].dtype).view(given[name].shape)
    out = place[:128].view(BF16).view(4, 16)
    for function, written in (
        (farro.fp8_linear_bias_bf16, "out"),
        (farro.fp8_linear_bias_gelu_bf16, "out"),
        (farro.fp8_linear_bias_residual_bf16, "residual"),
    ):
        with pytest.raises(ValueError, match=rf"{written} shares memory with {name}"):
            function(**given, **{written: out})
    assert not memory.any()


def test_a_tile_is_pinned_by_number_and_named():
    """Each legal variant runs on its own kernel and gives its name; the rest are refused."""
    name = farro.select_fp8_linear_tile(8, 32, 64)
    x, weight = torch.zeros(8, 64).to(E4M3), torch.zeros(32, 64).to(E4M3)
    with pytest.raises(ValueError, match=r"variant is 1000; there is no such tile") as raised:
        farro.select_fp8_linear_tile(8, 32, 64, 1000)
    listed = str(raised.value).partition("0 (the dispatcher chooses), ")[2].split("), ")
    legal = {int(item.split(" (")[0]): item.split(" (")[1].rstrip(")") for item in listed}
    assert len(set(legal.values())) == len(legal) >= len(HERE)
    assert legal[max(legal)] == "reference"
    if not torch.cuda.is_available():
        assert name.startswith(HERE[0])
    for variant, tile in legal.items():
        assert farro.select_fp8_linear_tile(8, 32, 64, variant) == tile
        told = dispatch.explain(farro.fp8_linear_bf16, x, weight, variant=variant)
        config = next(row.config for row in told.rows if row.kernel == told.chosen)
        assert getattr(config, "name", "reference") == tile
        passed = [row.verdict for row in told.rows if row.kernel != told.chosen]
        pins = f"variant {variant} pins {tile} of {told.chosen}"
        assert all(v == pins or v.startswith("needs ") for v in passed)
        if not torch.cuda.is_available():
            residual = torch.ones(32, dtype=BF16)
            out = farro.fp8_linear_residual_bf16(x, weight, residual, variant=variant)
            assert (out == 1).all()
    for backend in HERE[:-1]:  # the last tile is the reference
        with pytest.raises(ValueError, match=f"backend='{backend}' was asked for"):
            farro.fp8_linear_bf16(x, weight, variant=max(legal), backend=backend)


@pytest.mark.parametrize("size", (-1, 2.0, True, None))
def test_select_takes_sizes(size):
    error = ValueError if size == -1 else TypeError
    for place in range(3):
        sizes = [8, 16, 32]
        sizes[place] = size
        with pytest.raises(error, match=f"select_fp8_linear_tile: {'mnk'[place]} "):
            farro.select_fp8_linear_tile(*sizes)
    with pytest.raises(TypeError, match="variant must be an int"):
        farro.select_fp8_linear_tile(8, 16, 32, 1.0)
    assert isinstance(farro.select_fp8_linear_tile(0, 0, 0), str)
