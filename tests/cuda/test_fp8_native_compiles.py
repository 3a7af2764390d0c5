"""The native FP8 kernels compile with NVRTC alone, to the instructions they promise."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, GELU, RESIDUAL, Config
from farro.ops.fp8_swiglu_quantize import sm90 as swiglu

from ..ops.fp8_sm90_forced import EPILOGUES, KINDS, but_its_ring, shapes
from .sass import check_products, compiled, disassembled, flushes, some_held

LARGE_REGISTERS = 168  # at launch: setmaxnreg moves registers only if all 168 * 384 are taken
SWIGLU = [
    *(swiglu.Config("large", rows, swiglu._deepest(rows)) for rows in (64, 128)),
    *(swiglu.Config("small", *sizes) for sizes in ((8, 12, 4), (16, 8, 1), (32, 8, 2), (64, 6, 2))),
    *(swiglu.Config("medium", *sizes) for sizes in ((128, 6, 2), (64, 8, 1))),
]
SLOW = SWIGLU[:1] + SWIGLU[3:5]  # of these others are like them


def check(config, kind, tmp_path, n=32):
    what = f"{config} {kind} N={n}"
    kernel = compiled(*gemm.kernel_name(config, kind, n))
    lines = disassembled(kernel.cubin, tmp_path)
    large = config.policy == "large"
    columns, waves = config.rows, 1
    if large:
        columns, waves = config.columns, config.rows // 128
    unit = 2 if large and not kind.scaled and not kind.fast else 1  # blocks between promotions
    check_products(kernel, lines, f"QGMMA.64x{columns}x32.F32.E4M3.E4M3", 4 * unit * waves, what)
    registers, stack = kernel.registers, kernel.stack
    if large:
        assert registers == LARGE_REGISTERS, f"{what}: {registers} registers"
        assert stack == 0, f"{what}: {stack} bytes of stack"
    else:  # as the choice of tiles that are resident together counts them
        most = configs.small_registers(config, kind)
        assert registers <= most and stack == 0, f"{what}: {registers} registers, {stack}"
    if kind.fast or not (large or not config.ahead):
        assert some_held(lines), f"{what}: nothing multiplies while sums are added"
    boxes = [sum(f"UTMALDG.{d}" in line for line in lines) for d in ("2D", "5D")]
    assert boxes == ([1, 1] if large else [2, 0]), f"{what}: {boxes}"
    adds = [any(word in line for line in lines) for word in ("FFMA", "LDGSTS")]
    assert all(adds) or not kind.scaled, f"{what}: no scales"
    stores = sum("UTMASTG.3D" in line for line in lines)
    assert (stores > 0) == config.staged, f"{what}: {stores} stores by TMA"
    assert not flushes(lines), what
    across = any("UCGABAR_ARV" in line for line in lines)
    assert across == (config.ctas > 1), what


def check_swiglu(config, tmp_path):
    kernel = compiled(*swiglu.kernel_name(config))
    lines = disassembled(kernel.cubin, tmp_path)
    large, rows = config.policy == "large", config.rows
    columns, per_turn = (128, 8) if large else (rows if config.policy == "small" else 128, 4)
    check_products(kernel, lines, f"QGMMA.64x{columns}x32.F32.E4M3.E4M3", per_turn, str(config))
    registers, stack = kernel.registers, kernel.stack
    if large:  # a single warpgroup that multiplies takes what it needs
        assert registers == LARGE_REGISTERS if rows == 128 else registers <= 255, config
        assert stack <= 64, f"{config}: {stack} bytes of stack"
    elif config.policy == "medium":
        assert registers <= 168 and stack == 0, f"{config}: {registers} registers, {stack}"
    else:
        assert some_held(lines), f"{config}: nothing multiplies while sums are added"
        most = max(64, 40 + rows // 2 * 3)
        assert registers <= most and stack == 0, f"{config}: {registers} registers, {stack}"
    boxes = [sum(f"UTMALDG.{d}" in line for line in lines) for d in ("2D", "5D")]
    assert boxes == ([1, 2] if large else [3, 0]), f"{config}: {boxes}"
    # (IEEE division has a subroutine that flushes what it has scaled before)
    codes = sum("F2FP.SATFINITE.E4M3" in line for line in lines)  # two each, of a thread's results
    assert codes == (64 // 2 if large else 4), f"{config}: {codes} conversions to E4M3"


# Each tile and cluster once, with an epilogue: those of QUICK in every run, and all of all slowly
SPREAD = [
    ("scaled", Config("large", 256, 112, 4), BIAS | GELU),
    ("scaled", Config("large", 256, 128, 4), 0),
    ("scaled", Config("large", 128, 144, 6), BIAS),
    ("scaled", Config("large", 128, 160, 6), GELU),
    ("scaled", Config("large", 128, 192, 5), 0),
    ("scaled", Config("small", 16, 64, 8, 2), GELU),
    ("scaled", Config("small", 128, 64, 6), BIAS),
    ("promoted", Config("large", 256, 64, 5), BIAS | RESIDUAL),
    ("promoted", Config("large", 256, 80, 4), 0),
    ("promoted", Config("large", 128, 96, 6), BIAS),
    ("promoted", Config("large", 128, 112, 3), BIAS | GELU),
    ("promoted", Config("large", 128, 192, 5), RESIDUAL),
    ("promoted", Config("small", 8, 64, 12, 8), BIAS | GELU),
    ("promoted", Config("small", 64, 64, 8, 4), RESIDUAL),
    ("fast", Config("large", 256, 96, 3), BIAS | RESIDUAL),
    ("fast", Config("large", 128, 256, 4), BIAS | RESIDUAL),
    ("fast", Config("large", 128, 64, 8), BIAS | GELU),
    ("fast", Config("large", 128, 80, 5), RESIDUAL),
    ("fast", Config("large", 128, 256, 3, staged=True), 0),
    ("fast", Config("large", 128, 128, 7), BIAS),
    ("fast", Config("small", 32, 64, 8), BIAS | RESIDUAL),
    ("scaled", Config("small", 64, 64, 3, ahead=False), 0),
    ("scaled", Config("small", 32, 64, 8, multicast=2), 0),
    ("scaled", Config("large", 128, 176, 5), 0),
    ("fast", Config("large", 128, 208, 4), BIAS),
    ("fast", Config("large", 128, 224, 4), BIAS | GELU),
    ("fast", Config("large", 128, 240, 3, staged=True), RESIDUAL),
]
QUICK = (1, 2, 5, 8, 13, 18, 20, 21, 22)


@pytest.mark.parametrize(
    "turn",
    [pytest.param(i, marks=[] if i in QUICK else [pytest.mark.slow]) for i in range(len(SPREAD))],
)
def test_each_kind_and_tile(turn, tmp_path):
    name, config, epilogue = SPREAD[turn]
    check(config, dataclasses.replace(KINDS[name], epilogue=epilogue), tmp_path, 16 * (turn + 1))


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else [], id=str(c)) for c in SWIGLU],
)
def test_swiglu(config, tmp_path):
    check_swiglu(config, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ("large", "small"))
@pytest.mark.parametrize("name", KINDS)
def test_every_tile_and_epilogue(name, policy, tmp_path):
    for config in shapes(KINDS[name]):
        for epilogue in EPILOGUES[name]:
            if config.policy == policy:
                for n in (16, 32) if policy == "large" and config.columns % 32 == 0 else (16,):
                    of_epilogue = dataclasses.replace(KINDS[name], epilogue=epilogue)
                    check(config, of_epilogue, tmp_path, n)


def test_the_shapes_are_all_there_are():
    counts = {name: len(shapes(kind)) for name, kind in KINDS.items()}
    assert counts == {"scaled": 14 + 24, "promoted": 14 + 24, "fast": 18 + 5 + 20}
    every = [c for kind in KINDS.values() for c in shapes(kind)]
    checked = [c for _, c, _ in SPREAD]
    assert {c.tile for c in checked} == {c.tile for c in every}
    assert {c.cluster for c in checked} == {c.cluster for c in every}
    for name in ("staged", "ahead", "multicast"):
        assert {getattr(c, name) for c in checked} == {getattr(c, name) for c in every}
    for kind in KINDS.values():  # every legal tile is among them
        tiles = {but_its_ring(c) for c in configs.configs(kind, 1)}
        assert tiles == {but_its_ring(c) for c in shapes(kind)}
