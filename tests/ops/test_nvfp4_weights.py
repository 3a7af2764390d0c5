"""Weights of the NVFP4 family against rational arithmetic, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import farro
from farro import nvfp4
from farro.formats.nvfp4 import decode_e2m1, decode_ue4m3, pack_codes, unpack_codes
from farro.formats.paired_sparsity import PATTERNS
from farro.ops.nvfp4_weights import reference
from farro.testing import CASES, assert_bit_equal

from .exact_arithmetic import product, rounded
from .exact_nvfp4 import E2M1, UE4M3, quantized_block


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def pruned(generator: torch.Generator, *shape: int, scale: float = 0.02) -> torch.Tensor:
    return nvfp4.prune_paired_4of8(torch.randn(shape, generator=generator) * scale)


@pytest.mark.parametrize("scale", ["auto", None, 37.5, "tensor"], ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_quantize_in_rational_arithmetic(dtype, scale, generator) -> None:
    w = torch.randn(3, 2, 64, generator=generator, dtype=torch.float64)
    w = (w * torch.tensor([0.002, 0.0, 30.0])[:, None, None]).to(dtype)
    given = torch.tensor([3.0, 0.25, 2e5]) if scale == "tensor" else scale
    packed, scales, alpha = nvfp4.quantize_weight(w, given)
    codes = unpack_codes(packed)
    for e in range(3):
        wide = w[e].float()  # float64 is rounded first
        largest = float(wide.abs().max())
        automatic = rounded(Fraction(2688) / Fraction(largest)) if largest else 1.0
        g = {"auto": automatic, None: 1.0, 37.5: 37.5, "tensor": [3.0, 0.25, 2e5][e]}[scale]
        assert float(alpha[e]) == rounded(1 / Fraction(g))
        for row in range(2):
            for block in range(2):
                values = wide[row, 32 * block : 32 * block + 32].tolist()
                want = quantized_block(values, g)
                got = codes[e, row, 32 * block : 32 * block + 32].tolist()
                assert (got, int(scales[e, row, block])) == want


def test_small_weights_keep_their_scales(generator) -> None:
    """Standard deviation 0.002: without a global factor every scale falls among subnormals."""
    w = torch.randn(1, 64, 256, generator=generator) * 0.002

    def error(global_scale) -> float:
        packed, scales, alpha = nvfp4.quantize_weight(w, global_scale)
        return float((nvfp4.dequantize_weight(packed, scales, alpha) - w).norm() / w.norm())

    assert error("auto") < 0.11 < 0.13 < error(None)
    lost = nvfp4.quantize_weight(w, None)[1] == 1  # max|w| / 6 is below half the smallest scale
    assert lost.float().mean() > 0.9
    assert (nvfp4.quantize_weight(w)[1] >= 8).all()


def test_tiny_and_huge_weights(generator) -> None:
    w = torch.randn(2, 4, 64, generator=generator) * torch.tensor([1e-37, 1e37])[:, None, None]
    packed, scales, alpha = nvfp4.quantize_weight(w)
    assert alpha.isfinite().all() and (alpha > 0).all()
    restored = nvfp4.dequantize_weight(packed, scales, alpha)
    for e, bound in ((0, 0.3), (1, 0.12)):  # the factor of tiny ones is bounded
        assert (restored[e] - w[e]).double().norm() < bound * w[e].double().norm()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300], ids=str)
def test_values_that_are_not_finite_are_refused(value, device, generator) -> None:
    w = torch.randn(3, 5, 96, generator=generator, dtype=torch.float64).to(device)
    w[2, 3, 70] = value
    with pytest.raises(
        ValueError, match=r"quantize_weight: w .*expert 2, row 3, group 2 \(k 64 to"
    ):
        nvfp4.quantize_weight(w)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_factors_that_are_not_positive_are_refused(value, device, generator) -> None:
    w = torch.randn(3, 5, 96, generator=generator).to(device)
    factors = torch.tensor([1.0, value, 1.0], device=device)
    with pytest.raises(
        ValueError, match=r"quantize_weight: global_scale of expert 1 is .*positive"
    ):
        nvfp4.quantize_weight(w, factors)
    with pytest.raises(ValueError, match="quantize_weight: global_scale of expert 0 is inf"):
        nvfp4.quantize_weight(w, 1e300)


def test_dequantize_is_exact_but_for_alpha(generator) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(1, 127, 32)
    packed, scales = pack_codes(codes), torch.arange(127, dtype=torch.uint8).view(1, 127, 1)
    plain = nvfp4.dequantize_weight(packed, scales)
    alpha = torch.rand(1, generator=generator) + 0.01
    scaled = nvfp4.dequantize_weight(packed, scales, alpha)
    for byte in range(127):
        for code in range(16):
            exact = float(E2M1[code % 8] * UE4M3[byte]) * (-1 if code >= 8 else 1)
            assert float(plain[0, byte, code]) == exact
            assert float(scaled[0, byte, code]) == product(exact, float(alpha))


@pytest.mark.parametrize("m, k", [(64, 128), (32, 32), (96, 352), (224, 96)])
def test_compress_and_back(m, k, device, generator) -> None:
    w = pruned(generator, 3, m, k)
    w[1] = 0
    w[2, :, :8] = 0
    packed, scales, alpha = nvfp4.quantize_weight(w.to(device))
    parts = nvfp4.compress(packed, scales, k)
    assert sum(part.numel() for part in parts) <= 0.36 * w.numel()
    again, own = nvfp4.decompress(*parts, k)
    assert_bit_equal(again, packed)
    assert_bit_equal(own, scales)
    restored = nvfp4.dequantize_weight(again, own, alpha).cpu()
    assert ((restored != 0) <= (w != 0)).all()  # nothing appears where nothing was
    assert (restored - w).norm() < 0.12 * w.norm()


def test_negative_zeros_count_as_zeros(generator) -> None:
    packed = torch.full((1, 32, 16), 0x88, dtype=torch.uint8)  # -0 everywhere
    packed[0, 5, 3], packed[0, 5, 1], packed[0, 6, 0] = 0x83, 0x2A, 0x38
    scales = torch.full((1, 32, 1), 0x38, dtype=torch.uint8)
    again, _ = nvfp4.decompress(*nvfp4.compress(packed, scales, 32), 32)
    want = torch.zeros(1, 32, 16, dtype=torch.uint8)
    want[0, 5, 3], want[0, 5, 1], want[0, 6, 0] = 0x03, 0x2A, 0x30
    assert_bit_equal(again, want)


def test_empty_groups_have_valid_metadata() -> None:
    packed = torch.zeros(2, 96, 80, dtype=torch.uint8)
    scales = torch.full((2, 96, 5), 0x38, dtype=torch.uint8)
    a_comp, e_meta, sfa = nvfp4.compress(packed, scales, 160)
    assert not a_comp.any() and (e_meta == 0x44).all() and (sfa == 0x38).all()


def test_three_pairs_are_refused_by_name(device, generator) -> None:
    packed, scales, _ = nvfp4.quantize_weight(pruned(generator, 3, 64, 96).to(device))
    packed[2, 40, 20:24] = 0x11
    with pytest.raises(
        ValueError, match=r"compress: more than two .*expert 2, row 40, group 5 \(k"
    ):
        nvfp4.compress(packed, scales, 96)
    packed[2, 40, 20:24] = torch.tensor([0x88, 0x11, 0x80, 0x08], dtype=torch.uint8)
    nvfp4.compress(packed, scales, 96)  # -0 is no third


def test_scales_with_a_sign_are_refused_by_name(device, generator) -> None:
    packed, scales, _ = nvfp4.quantize_weight(pruned(generator, 3, 64, 96).to(device))
    scales[1, 63, 2] = 0xB8
    with pytest.raises(
        ValueError, match=r"w_blockscale .*0xb8.*expert 1, row 63, group 2 \(k 64 to"
    ):
        nvfp4.compress(packed, scales, 96)
    scales[1, 63, 2] = 0x7F  # NaN is UE4M3
    again = nvfp4.decompress(*nvfp4.compress(packed, scales, 96), 96)
    assert_bit_equal(again[1], scales)


def test_one_scale_per_16_is_refused_with_the_way_out(generator) -> None:
    packed = torch.zeros(1, 32, 32, dtype=torch.uint8)
    by_16 = torch.zeros(1, 32, 4, dtype=torch.uint8)
    for call in (
        lambda: nvfp4.compress(packed, by_16, 64),
        lambda: nvfp4.dequantize_weight(packed, by_16),
    ):
        with pytest.raises(
            ValueError, match=r"one scale per 16 K.*original weights.*requantize_gr"
        ):
            call()


def test_metadata_that_is_no_pattern_is_refused_by_name(device, generator) -> None:
    packed, scales, _ = nvfp4.quantize_weight(pruned(generator, 2, 96, 160).to(device))
    a_comp, e_meta, sfa = nvfp4.compress(packed, scales, 160)
    e_meta[1, 0, 0] = 0x4F  # the first byte of a tile: groups 0 and 1 of row 0
    with pytest.raises(
        ValueError, match=r"e_meta holds 1 nibbles .*0xf, is of expert 1, row 0, gro"
    ):
        nvfp4.decompress(a_comp, e_meta, sfa, 160)


@pytest.mark.parametrize("prune", (True, False))
def test_requantize_reports_its_loss(prune, generator) -> None:
    """From a dense checkpoint of one E4M3 scale per 16: all steps in float64, by other means."""
    codes = torch.randint(16, (3, 5, 64), generator=generator, dtype=torch.uint8)
    by_16 = torch.randint(0x20, 0x7F, (3, 5, 4), generator=generator, dtype=torch.uint8)
    codes[1] = 0
    alpha = torch.rand(3, generator=generator) + 0.01
    w = decode_e2m1(codes) * decode_ue4m3(by_16).repeat_interleave(16, -1) * alpha[:, None, None]
    packed, scales, own, loss = nvfp4.requantize_group16(
        pack_codes(codes), by_16, alpha, prune=prune
    )
    want = nvfp4.quantize_weight(nvfp4.prune_paired_4of8(w) if prune else w)
    for result, expected in zip((packed, scales, own), want):
        assert_bit_equal(result, expected)
    restored = nvfp4.dequantize_weight(packed, scales, own).double()
    for e in (0, 2):
        error = (restored[e] - w[e]).norm() / w[e].double().norm()
        assert math.isclose(float(loss[e]), float(error), rel_tol=1e-5)  # it is rounded to FP32
        assert (0.2 if prune else 0.01) < float(loss[e]) < 0.6
    assert float(loss[1]) == 0
    if prune:
        nvfp4.compress(packed[:, :0], scales[:, :0], 64)
        assert (packed.view(3, 5, 8, 4) != 0).sum(-1).max() <= 2


def test_requantize_refuses_scales_and_factors_by_name() -> None:
    packed, by_16 = (
        torch.zeros(2, 3, 32, dtype=torch.uint8),
        torch.zeros(2, 3, 4, dtype=torch.uint8),
    )
    by_16[1, 2, 3] = 0x7F
    with pytest.raises(
        ValueError, match=r"w_blockscale .*0x7f.*expert 1, row 2, group 3 \(k 48 to"
    ):
        nvfp4.requantize_group16(packed, by_16, None)
    with pytest.raises(ValueError, match="alpha of expert 1 is nan"):
        nvfp4.requantize_group16(packed, by_16 * 0, torch.tensor([1.0, math.nan]))


def test_experts_are_taken_some_at_a_time(monkeypatch, generator) -> None:
    w = pruned(generator, 7, 32, 64)
    packed, scales, alpha = nvfp4.quantize_weight(w)
    parts = nvfp4.compress(packed, scales, 64)
    monkeypatch.setattr(reference, "_ELEMENTS", {"cpu": 32 * 64 * 3})
    for result, expected in zip(nvfp4.quantize_weight(w), (packed, scales, alpha)):
        assert_bit_equal(result, expected)
    for result, expected in zip(nvfp4.compress(packed, scales, 64), parts):
        assert_bit_equal(result, expected)
    packed[6, 31, 28:] = 0x11
    with pytest.raises(ValueError, match="expert 6, row 31, group 7"):
        nvfp4.compress(packed, scales, 64)


def test_large_experts_are_taken_some_rows_at_a_time(monkeypatch, generator) -> None:
    w = pruned(generator, 2, 224, 96)
    packed, scales, alpha = nvfp4.quantize_weight(w)
    parts = nvfp4.compress(packed, scales, 96)
    want = (nvfp4.dequantize_weight(packed, scales, alpha), *nvfp4.decompress(*parts, 96))
    monkeypatch.setattr(reference, "_ELEMENTS", {"cpu": 64 * 96})
    assert_bit_equal(nvfp4.prune_paired_4of8(w), w)
    for result, expected in zip(nvfp4.quantize_weight(w), (packed, scales, alpha)):
        assert_bit_equal(result, expected)
    for result, expected in zip(nvfp4.compress(packed, scales, 96), parts):
        assert_bit_equal(result, expected)
    got = (nvfp4.dequantize_weight(packed, scales, alpha), *nvfp4.decompress(*parts, 96))
    for result, expected in zip(got, want):
        assert_bit_equal(result, expected)
    packed[1, 200, 4:8] = 0x11
    with pytest.raises(ValueError, match=r"expert 1, row 200, group 1 \(k 8 to 15\)"):
        nvfp4.compress(packed, scales, 96)


def test_no_other_back_end_pretends(generator) -> None:
    w = pruned(generator, 1, 32, 64)
    for backend in ("cpu", "triton", "cuda"):
        with pytest.raises(farro.UnsupportedError, match="backend='reference'"):
            nvfp4.quantize_weight(w, backend=backend)


def test_every_pattern_survives(generator) -> None:
    """Every pattern in every 8-group of a step, with every code in both halves of a byte."""
    groups = torch.arange(96 * 20).view(1, 96, 20)
    nibbles = torch.tensor(PATTERNS)[(groups + groups // 20) % 6]
    packed = torch.zeros(1, 96, 20, 4, dtype=torch.uint8)
    values = (torch.arange(96 * 20 * 2) % 256).to(torch.uint8).view(1, 96, 20, 2)
    packed.scatter_(-1, torch.stack((nibbles & 3, nibbles >> 2), -1), values)
    packed = packed.view(1, 96, 80)
    scales = torch.arange(96 * 5).view(1, 96, 5).remainder(127).to(torch.uint8)
    again, own = nvfp4.decompress(*nvfp4.compress(packed, scales, 160), 160)
    codes = unpack_codes(packed)
    assert_bit_equal(unpack_codes(again), torch.where(codes == 8, 0, codes).to(torch.uint8))
    assert_bit_equal(own, scales)


@pytest.mark.gpu
def test_the_same_bytes_on_a_gpu(generator) -> None:
    """Made on a CPU, run on a GPU: every function, with every case of farro.testing."""
    for case in CASES["nvfp4_weights"]():
        call = case.build("cuda", seed_of(generator))
        for result, expected in zip(call.through("reference"), call.expected):
            assert_bit_equal(result, expected, case.name)
