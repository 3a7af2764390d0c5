"""e2m1, UE4M3 and blocks of 32 against rational arithmetic; the order of gate and up rows."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from farro.formats import nvfp4
from farro.formats.gate_up import interleave_gate_up_rows, split_gate_up
from farro.testing import assert_bit_equal

from ..ops.exact_nvfp4 import E2M1, UE4M3, e2m1_code, nearest, quantized_block


def all_bfloat16() -> torch.Tensor:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).float()


def next_even(distance: torch.Tensor) -> torch.Tensor:
    """Index of the least of each row; of two, the even one. Distances are exact in float64."""
    least = distance == distance.amin(1, keepdim=True)
    odd = torch.arange(distance.shape[1]) % 2
    return torch.where(least, odd, 2).argmin(1)


def near_midpoints(values: list[Fraction]) -> list[float]:
    """Midpoints of neighbours and the FP32 numbers on both sides of them."""
    found = []
    for low, high in itertools.pairwise(values):
        middle = torch.tensor(float((low + high) / 2))
        up = torch.nextafter(middle, torch.tensor(math.inf))
        down = torch.nextafter(middle, torch.tensor(0.0))
        found += [float(middle), float(up), float(down)]
    return found


def test_values_of_codes() -> None:
    values = nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    want = [float(v) for v in E2M1]
    assert values.tolist() == [*want, *(-v for v in want)]
    scales = nvfp4.decode_ue4m3(torch.arange(128, dtype=torch.uint8))
    assert scales[:127].tolist() == [float(v) for v in UE4M3]
    assert scales[127].isnan()


def test_e2m1_of_every_bfloat16_and_every_midpoint() -> None:
    x = all_bfloat16()
    candidates = torch.tensor([float(v) for v in E2M1], dtype=torch.float64)
    distance = (x.double().abs().nan_to_num(0.0, 1e3)[:, None].clamp_max(1e3) - candidates).abs()
    want = next_even(distance)
    want = torch.where((x < 0) & (want != 0), want + 8, want).to(torch.uint8)
    assert_bit_equal(nvfp4.encode_e2m1(x), want)
    middles = near_midpoints(E2M1) + [-v for v in near_midpoints(E2M1)] + [math.inf, -math.inf]
    got = nvfp4.encode_e2m1(torch.tensor(middles))
    assert got.tolist() == [e2m1_code(v) for v in middles]


def test_negative_zero_and_nan_are_code_zero() -> None:
    tiny = [-0.0, -0.25, -1e-45, math.nan, -math.nan]
    assert nvfp4.encode_e2m1(torch.tensor(tiny)).tolist() == [0] * len(tiny)
    packed = torch.arange(256, dtype=torch.uint8)
    clean = nvfp4.positive_zeros(packed).tolist()
    for byte, got in enumerate(clean):
        low, high = ((n if n != 8 else 0) for n in (byte & 15, byte >> 4))
        assert got == low | high << 4


def test_ue4m3_of_every_bfloat16_and_every_midpoint() -> None:
    x = all_bfloat16()
    candidates = torch.tensor([float(v) for v in UE4M3], dtype=torch.float64)
    bounded = x.double().nan_to_num(0.0, 448.0, 0.0).clamp(2**-9, 448)
    want = next_even((bounded[:, None] - candidates).abs())
    want = torch.where(x.isnan(), 0x7F, want).to(torch.uint8)
    assert_bit_equal(nvfp4.encode_ue4m3(x), want)
    middles = near_midpoints(UE4M3[1:])
    got = nvfp4.encode_ue4m3(torch.tensor(middles)).tolist()
    assert got == [nearest(Fraction(v), UE4M3) for v in middles]
    assert all(code <= 126 for code in got)


def test_packing_puts_lower_k_in_the_low_nibble(generator) -> None:
    codes = torch.randint(16, (3, 5, 64), generator=generator, dtype=torch.uint8)
    packed = nvfp4.pack_codes(codes)
    assert packed.shape == (3, 5, 32)
    assert torch.equal(packed & 15, codes[..., ::2]) and torch.equal(packed >> 4, codes[..., 1::2])
    assert torch.equal(nvfp4.unpack_codes(packed), codes)


def block_values(kind: str, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(6, 32, generator=generator)
    return {
        "normal": x,
        "small": x * 0.002,
        "tiny": x * 1e-37,
        "subnormal": x * 1e-43,
        "huge": x * 1e37,
        "zero": x * 0.0,
        "one": torch.zeros(6, 32).index_fill(1, torch.tensor([7]), 3.0),
        "halves": torch.randint(-24, 25, (6, 32), generator=generator) / 4,
        "nan": x.index_fill(0, torch.tensor([2]), math.nan),
        "inf": torch.where(torch.rand(6, 32, generator=generator) < 0.02, -math.inf, x),
    }[kind]


KINDS = ("normal", "small", "tiny", "subnormal", "huge", "zero", "one", "halves", "nan", "inf")


@pytest.mark.parametrize("gscale", [1.0, 2688.0 / 3.7, 1e-3, 2.0**118, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_in_rational_arithmetic(kind, gscale, generator) -> None:
    x = block_values(kind, generator)
    packed, scales = nvfp4.quantize_blocks(x, torch.tensor([gscale]))
    codes = nvfp4.unpack_codes(packed)
    factor = float(torch.tensor(gscale))
    for row in range(x.shape[0]):
        want_codes, want_scale = quantized_block(x[row].tolist(), factor)
        assert (codes[row].tolist(), int(scales[row])) == (want_codes, want_scale), row


def test_a_zero_block_has_the_scale_of_its_factor() -> None:
    x = torch.zeros(4, 32)
    gscale = torch.tensor([[1.0], [300.0], [1e-4], [5e5]])
    packed, scales = nvfp4.quantize_blocks(x, gscale)
    assert not packed.any()
    assert nvfp4.decode_ue4m3(scales).flatten().tolist() == [1.0, 288.0, 2**-9, 448.0]


def test_every_code_and_scale_is_exact() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(128, 32)
    scales = torch.arange(128, dtype=torch.uint8)[:, None]
    values = nvfp4.dequantize_blocks(nvfp4.pack_codes(codes), scales)
    for byte in range(127):
        want = [(-1 if c >= 8 else 1) * float(E2M1[c % 8] * UE4M3[byte]) for c in range(16)]
        assert values[byte, :16].tolist() == want
    assert values[127].isnan().all()


def test_codes_are_what_they_are_restored_from(generator) -> None:
    """Values on the grid come back, whatever the factor: quantizing again changes nothing."""
    codes = torch.randint(16, (40, 64), generator=generator, dtype=torch.uint8)
    codes[:, ::32] = 7  # the largest of each block
    scales = torch.randint(8, 0x70, (40, 2), generator=generator, dtype=torch.uint8)
    packed = nvfp4.positive_zeros(nvfp4.pack_codes(codes))
    x = nvfp4.dequantize_blocks(packed, scales)
    for power in (0, -3, 5):
        again = nvfp4.quantize_blocks(x * 2.0**-power, torch.tensor([2.0**power]))
        assert torch.equal(again[0], packed) and torch.equal(again[1], scales)


def test_the_automatic_factor_keeps_small_weights_out_of_subnormals(generator) -> None:
    w = torch.randn(3, 32, 64, generator=generator) * torch.tensor([1.0, 0.002, 0.0])[:, None, None]
    g = nvfp4.automatic_global(w)
    assert g[2] == 1
    for e in range(2):
        largest = float(w[e].abs().max())
        assert float(g[e]) == float(torch.tensor(2688.0) / torch.tensor(largest))
    assert nvfp4.automatic_global(torch.full((1, 1, 32), 1e-38)).tolist() == [2.0**118]
    assert nvfp4.automatic_global(w[:, :0]).tolist() == [1.0] * 3
    _, plain = nvfp4.quantize_blocks(w, torch.ones(3, 1, 1))
    _, spread = nvfp4.quantize_blocks(w, g[:, None, None])
    assert (plain[1] < 8).all()  # subnormals
    assert (spread[1] >= 8).all() and int(spread[1].max()) == 0x7E


def test_interleaved_rows() -> None:
    rows = interleave_gate_up_rows(32)
    assert rows.dtype == torch.int64
    assert rows[:24].tolist() == [*range(8), *range(32, 40), *range(8, 16)]
    assert sorted(rows.tolist()) == list(range(64))
    plain = torch.arange(128).view(2, 64)
    for interleaved, x in ((False, plain), (True, plain[:, rows])):
        gate, up = split_gate_up(x, interleaved)
        assert torch.equal(gate, plain[:, :32]) and torch.equal(up, plain[:, 32:])
    with pytest.raises(
        ValueError, match="interleave_gate_up_rows: n is 12; needed a multiple of 8"
    ):
        interleave_gate_up_rows(12)
    with pytest.raises(TypeError, match="interleave_gate_up_rows: n must be an int, got float"):
        interleave_gate_up_rows(16.0)  # type: ignore[arg-type]
