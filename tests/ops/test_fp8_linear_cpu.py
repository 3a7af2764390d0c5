"""fp8_linear on a CPU: its decoder, both kinds of product, blocks and scratch memory."""

from __future__ import annotations

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.dispatch import explain
from farro.ops.fp8_linear import cpu
from farro.ops.fp8_linear.cpu import Config
from farro.testing import assert_bit_equal, assert_close_to_exact, exact_linear, linear_cases

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def codes(generator, *shape) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(E4M3)


def permuted(values: torch.Tensor) -> torch.Tensor:
    return torch.cat((values[:, 0::2], values[:, 1::2]), dim=1)


@pytest.mark.parametrize("flush", (False, True), ids=("", "subnormals flushed"))
@pytest.mark.parametrize("dtype", (BF16, torch.float32))
def test_every_code_is_decoded_exactly(dtype, flush):
    every = torch.arange(256, dtype=torch.uint8).view(8, 32).view(E4M3)
    views = [every, every.T.contiguous().T, every[:, :29], every[:, 1:], every[:1], every[:7, :2]]
    torch.set_flush_denormal(flush)
    try:
        for view in views:
            rows, k = view.shape
            out = torch.full((rows, 48), 7.0, dtype=dtype)
            cpu._Decoder(torch.empty(3 * 32)).decode(view, out)  # two rows at a time
            want = permuted(torch.nn.functional.pad(view.to(dtype), (0, -k % 4)))
            assert_bit_equal(out * 256, torch.nn.functional.pad(want, (0, 48 - want.shape[1])))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("code", (0x7F, 0xFF))
def test_a_nan_code_is_seen_wherever_it_is(code):
    for place in range(16):
        codes = torch.full((1, 16), 0x80 if place % 2 else 0x7E, dtype=torch.uint8)
        codes[0, place] = code
        out = torch.empty(1, 16, dtype=BF16)
        cpu._Decoder(torch.empty(3 * 16)).decode(codes.view(E4M3), out)
        assert_bit_equal(out * 256, permuted(codes.view(E4M3).to(BF16)))
        assert out.isnan().sum() == 1


def test_products_are_probed_and_the_choice_is_told(monkeypatch):
    x, weight = torch.zeros(20, 64).to(E4M3), torch.zeros(32, 64).to(E4M3)

    def told():
        rows = explain(farro.fp8_linear_bf16, x, weight, backend="cpu").rows
        return next(row.config for row in rows if row.kernel == "fp8_linear.cpu")

    farro.dispatch.forget()
    monkeypatch.setattr(cpu, "has_matrix_units", lambda: True)
    if cpu.bf16_products_hold():
        assert told() == Config("bf16x2", 32)
    monkeypatch.setattr(cpu, "bf16_products_hold", lambda: False)
    assert told() == Config("fp32", 32)
    with pytest.raises(ValueError, match=r"BF16 products do not add up.*\(cpu_fp32_1\)"):
        farro.fp8_linear_bf16(x, weight, variant=1)
    farro.dispatch.forget()


def test_a_product_that_rounds_its_sums_is_found(monkeypatch):
    """As a processor without FP32 accumulation would have it."""
    multiply = cpu._multiply_twice

    def rounded(x, weight, part, total, add):
        multiply(x, weight, part, total, add)
        total.copy_(total.bfloat16())

    monkeypatch.setattr(cpu, "_multiply_twice", rounded)
    assert not cpu.bf16_products_hold.__wrapped__()
    monkeypatch.undo()
    if cpu.has_matrix_units():
        assert cpu.bf16_products_hold.__wrapped__()


def forced(config: Config, x, weight, alpha=1.0, bias=None, residual=None, epilogue="none"):
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=BF16)
    cpu.run(config, x, weight, alpha, bias, residual, out, epilogue, False)
    return out


@pytest.mark.parametrize("config", cpu.variants.values(), ids=cpu.variants)
def test_each_configuration(config, generator):
    """Rows and columns that leave tails in every block; K of one step, and of several."""
    if config.product == "bf16x2" and not cpu.bf16_products_hold():
        pytest.skip("BF16 products do not add up in FP32 on this CPU")
    for m, n, k in ((1, 70, 257), (37, 130, 96), (300, 65, 1000)):
        x, weight = codes(generator, m, k), codes(generator, n, k)
        bias = torch.randn(n, generator=generator)
        residual = torch.randn(m, n, generator=generator).to(BF16)
        given = {"input": x, "weight": weight, "alpha": 0.5, "bias": bias, "residual": residual}
        out = forced(config, x, weight, 0.5, bias, residual, "bias_residual")
        exact, magnitude = exact_linear(given, "bias_residual")
        assert_close_to_exact(out, exact, magnitude, 2.0**-15, what=f"{m}x{n}x{k}")


@pytest.mark.parametrize("config", cpu.variants.values(), ids=cpu.variants)
def test_a_row_of_nan_stays_alone(config):
    """A unit that reads past the end of a row meets its neighbour there."""
    if config.product == "bf16x2" and not cpu.bf16_products_hold():
        pytest.skip("BF16 products do not add up in FP32 on this CPU")
    for k in (8, 100, 150, 300):
        x, weight = (torch.ones(size, k).to(E4M3) for size in (40, 50))
        x.view(torch.uint8)[8] = 0x7F
        weight.view(torch.uint8)[17] = 0xFF
        want = torch.full((40, 50), float(k)).to(BF16)
        want[8], want[:, 17] = float("nan"), float("nan")
        assert_bit_equal(forced(config, x, weight), want, f"k={k}")


@pytest.mark.parametrize("product", cpu.PRODUCTS)
def test_blocks_of_every_kind(product, generator, monkeypatch):
    """Small limits, so that a small problem has several blocks of rows, of columns and of K."""
    if product == "bf16x2" and not cpu.bf16_products_hold():
        pytest.skip("BF16 products do not add up in FP32 on this CPU")
    for name, limit in (("_DEPTH", 100), ("_WEIGHTS", 6400), ("_ACTIVATIONS", 32 * 330)):
        monkeypatch.setattr(cpu, name, limit)
    x, weight = codes(generator, 90, 330), codes(generator, 150, 330)
    x.view(torch.uint8)[50, 329] = 0x7F
    assert cpu._block(Config(product, 16), 90, 150, 330) == (32, 64)
    out = forced(Config(product, 16), x, weight)
    exact, magnitude = exact_linear({"input": x, "weight": weight, "alpha": 1.0}, "none")
    assert_close_to_exact(out, exact, magnitude, 2.0**-15)
    assert out[50].isnan().all()


def test_scratch_memory_is_bounded():
    """Whatever the problem, decoded operands and sums stay within some dozens of MiB."""
    arch = arch_named("cpu")
    for m, n, k in ((1, 10**6, 64), (8192, 8192, 16384), (1, 16, 3 * 10**6), (10**6, 64, 64)):
        meta = [torch.empty(size, k, dtype=E4M3, device="meta") for size in (m, n)]
        told = explain(farro.fp8_linear_bf16, *meta, arch=arch, backend="cpu")
        config = next(row.config for row in told.rows if row.kernel == told.chosen)
        rows, columns = cpu._block(config, m, n, k)
        depth = min(k, cpu._DEPTH)
        wide = 2 if config.product == "bf16x2" else 4
        needed = 4 * rows * columns + wide * (columns * depth + rows * k) + columns * depth
        assert needed < 80 << 20, (m, n, k, config, needed)


def test_cases_in_fp32():
    """The edge cases of farro verify on CPUs without matrix units."""
    for case in linear_cases()[::3]:
        call = case.build(seed=7)
        given = call.arguments
        alpha, epilogue = given["alpha"], str(call.problem.param("epilogue"))
        if 0 in (case.m, case.n) or case.rows != "MN":
            continue
        out = forced(
            Config("fp32", 32),
            *(given["input"], given["weight"], alpha, given.get("bias"), given.get("residual")),
            epilogue,
        )
        assert call.differs(0, out, call.expected[0]) is None, case.name
