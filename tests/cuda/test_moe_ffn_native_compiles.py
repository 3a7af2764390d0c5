"""The native kernels of moe_ffn compile with NVRTC alone, to the instructions they promise."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.formats.int8_group import GROUP_SIZES
from farro.ops.moe_ffn import sm90_configs, sm90_launches
from farro.ops.moe_ffn.sm90_configs import Tile

from .sass import check_products, compiled, disassembled, flushes

SPREAD = (  # gate/up or down; the slow sweep has all
    (Tile(8, 1, 1, 5, 4), 256, True),
    (Tile(16, 2, 1, 5, 2), 128, False),
    (Tile(32, 4, 1, 5), 64, True),
    (Tile(64, 2, 2, 4), 32, False),
    (Tile(128, 2, 2, 4), 128, True),
    (Tile(128, 2, 2, 4, gathered=True), 256, True),
    (Tile(128, 2, 2, 4), 256, False),
)


def check(tile, gated, group_size, tmp_path):
    what = f"{tile} {'gate/up' if gated else 'down'} G{group_size}"
    assert sm90_configs.refuses_tile(tile, gated, group_size, 128) is None, what
    kernel = compiled(*sm90_launches.kernel_name(tile, gated, group_size))
    lines = disassembled(kernel.cubin, tmp_path)
    widths = {max(8, tile.routes // n) for n in (1, 2, 4)}
    products = [i for i, line in enumerate(lines) if "IGMMA" in line]
    found = {n for n in widths if any(f"IGMMA.64x{n}x32.S8.S8 " in lines[i] for i in products)}
    assert found == widths, what
    first = min(products)
    kept = [line for line in lines if "IGMMA" not in line or f".64x{tile.routes}x" in line]
    widest = f"IGMMA.64x{tile.routes}x32.S8.S8"
    check_products(
        kernel, [x if "STL" not in x else "" for x in kept], widest, group_size // 32, what
    )
    # where warpgroups exchange registers, those that copy may spill; those that multiply may not
    exchanged = sm90_configs.exchanges(tile)
    assert kernel.stack <= (128 if exchanged else 16), f"{what}: {kernel.stack} bytes of stack"
    inside = lines[first : max(products)]
    spilt = sum("STL" in line or "LDL" in line for line in inside)
    assert spilt <= 2, f"{what}: {spilt} spills among the products"
    launched = min(65536 // (tile.threads * tile.ctas) // 8 * 8, 240)
    if exchanged:  # setmaxnreg moves registers only if all are taken at launch
        assert kernel.registers == launched, what
    else:
        assert kernel.registers <= launched, what
    assert any(f"UTMALDG.{5 if gated else 3}D" in line for line in lines), what
    gathers = gated and not tile.gathered
    assert any("LDGSTS.E.BYPASS.128" in line for line in lines) == gathers, what
    sends = not gated and tile.routes == 128 and tile.waves == 2
    assert any("UTMASTG.2D" in line for line in lines) == sends, what
    assert any("UCGABAR_ARV" in line for line in lines) == (
        sm90_configs.cluster_of(tile, gated, group_size) > 1
    ), what
    # __frcp_rn and __fdiv_rn negate with flushes, what is no subnormal
    assert not flushes([x for x in lines if not (gated and "FADD.FTZ" in x)]), what
    assert any("ACQBULK" in line for line in lines), f"{what}: never waits for the kernel before"


@pytest.mark.parametrize(("tile", "group_size", "gated"), SPREAD, ids=str)
def test_each_kind_of_tile(tile, group_size, gated, tmp_path):
    check(tile, gated, group_size, tmp_path)


def test_routing_and_sum(tmp_path):
    for dtype, cluster in ((torch.int32, 8), (torch.int64, 1)):
        kernel = compiled(*sm90_launches.plan_name(dtype, cluster))
        assert kernel.registers <= 64 and kernel.stack == 0
    for dtype, vector in ((torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 1)):
        kernel = compiled(*sm90_launches.sum_name(dtype, vector))
        lines = disassembled(kernel.cubin, tmp_path)
        assert kernel.stack == 0
        assert not any("FFMA" in line for line in lines), "products are rounded, then added"
        assert any("LDG.E.128" in line for line in lines) == (vector == 8)
    for name in (sm90_launches.sum_many_name(torch.bfloat16), sm90_launches.GATHER):
        kernel = compiled(*name)
        lines = disassembled(kernel.cubin, tmp_path)
        assert kernel.stack == 0 and any("STG.E.128" in line for line in lines)
        assert sum("LDG.E" in line and ".128" in line for line in lines) >= 4, "in flight together"
        assert not any("FFMA" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_tile(group_size, tmp_path):
    for gated in (True, False):
        for tile in sm90_configs.tiles(gated, group_size, 128):
            check(tile, gated, group_size, tmp_path)
