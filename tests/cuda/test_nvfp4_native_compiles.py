"""The native NVFP4 kernels compile with NVRTC alone, to the instructions they promise."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.ops.nvfp4_group_mm import sm90
from farro.ops.nvfp4_group_mm.sm90_configs import Config

from ..ops.test_nvfp4_group_mm_sm90 import shapes
from .sass import compiled, disassembled, flushes, some_held

SPREAD = (
    (Config(4, 8, 2, 9, True), False),
    (Config(2, 16, 2, 3, True, ctas=2), True),
    (Config(1, 16, 2, 9, True, split=4), False),
    (Config(4, 32, 2, 3, True), True),
    (Config(4, 64, 2, 3, True), False),
    (Config(4, 64, 2, 5, False), False),
    (Config(3, 128, 1, 4, False), True),
    (Config(4, 128, 1, 6, False), False),
    (Config(3, 192, 1, 9, False), False),
    (Config(2, 256, 1, 6, False), False),
    (Config(2, 256, 1, 6, False, pair=2), False),
)
GATED = (
    (Config(4, 8, 2, 8, True), False),
    (Config(1, 16, 2, 7, True, split=4), True),
    (Config(4, 64, 2, 5, False), False),
    (Config(3, 128, 1, 4, False), True),
    (Config(2, 256, 1, 4, False), False),
    (Config(2, 256, 1, 4, False, pair=2), False),
)


def check(config, bf16, tmp_path, gated=False):
    what = f"{config} {'BF16' if bf16 else 'FP16'}{' gated' if gated else ''}"
    kernel = compiled(*sm90.kernel_name(config, bf16, gated))
    lines = disassembled(kernel.cubin, tmp_path)
    assert "serialized" not in kernel.told and "setmaxnreg" not in kernel.told, kernel.told
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    widest = f"HGMMA.SP.64x{config.tokens}x32.F32{'.BF16' if bf16 else ''} "
    assert any(widest in lines[i] for i in products), what
    assert all("HGMMA.SP" in lines[i] for i in products) and len(products) % 4 == 0, what
    # the quantizer may lack a few registers, between tiles
    assert kernel.stack <= (64 if gated else 0), f"{what}: {kernel.stack} bytes of stack"
    inside = lines[products[0] : products[-1]]
    assert not [x for x in inside if re.search(r"\b(LDL|STL)\b", x)], what
    launched = min(65536 // (128 * (config.consumers + 1) * config.ctas) // 8 * 8, 240)
    if config.tokens < 64:
        assert kernel.registers <= launched, what
    else:  # setmaxnreg moves registers only if all are taken at launch
        assert kernel.registers == launched, what
    assert some_held(lines) == (config.units[1] == 1), what
    assert any("UBLKCP" in line for line in lines), f"{what}: no bulk copies"
    assert any("UTMALDG.2D" in line for line in lines), what
    unpacked = sum("E4M3.UNPACK" in line for line in lines)
    assert unpacked >= (8 if bf16 or config.tokens >= 128 else 40), what
    # a division's way around subnormals has FADD.FTZ
    assert not flushes([x for x in lines if not (gated and "FADD.FTZ" in x)]), what
    clusters = config.split * config.pair > 1
    assert any("UCGABAR_ARV" in line for line in lines) == clusters, what
    assert not any(re.search(r"\b(DADD|DMUL|DFMA)\b", line) for line in lines), what


@pytest.mark.parametrize(("config", "bf16"), SPREAD, ids=str)
def test_each_kind_of_tile(config, bf16, tmp_path):
    check(config, bf16, tmp_path)


@pytest.mark.parametrize(("config", "bf16"), GATED, ids=str)
def test_each_kind_of_gated_tile(config, bf16, tmp_path):
    check(config, bf16, tmp_path, gated=True)


def test_expansion(tmp_path):
    for bf16 in (False, True):
        kernel = compiled(*sm90.expand_name(bf16))
        lines = disassembled(kernel.cubin, tmp_path)
        assert kernel.registers <= 64 and kernel.stack == 0
        assert any("STG.E.128" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bf16", (False, True))
def test_every_tile(bf16, tmp_path):
    for config in shapes(bf16):
        check(config, bf16, tmp_path)
