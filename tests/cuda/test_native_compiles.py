"""The native INT8 kernels compile with NVRTC alone, to the instructions they promise."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.ops.int8_gemm import sm90, sm90_launch

from ..ops.sm90_forced import GROUP_SIZES, SOME, shapes
from .sass import check_products, compiled, disassembled, flushes, some_held

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(config, group_size, dtype, tmp_path):
    what = f"{config} G{group_size} {dtype}"
    kernel = compiled(*sm90_launch.kernel_name(config, group_size, dtype))
    lines = disassembled(kernel.cubin, tmp_path)
    columns = config.columns if config.policy == "large" else config.rows // config.consumers
    waves = config.rows // 128 if config.policy == "large" else 1
    per_turn = max(group_size // 32, 4) if config.policy == "small" else waves * group_size // 32
    check_products(kernel, lines, f"IGMMA.64x{columns}x32.S8.S8", per_turn, what)
    registers, stack = kernel.registers, kernel.stack
    if config.policy == "large":
        # setmaxnreg moves registers between warpgroups only if all 168 * 384 are taken at launch
        assert registers == 168, what
        assert stack <= 128, f"{what}: {stack} bytes of stack (the scale producer has 40 registers)"
    else:
        most = sm90._register_limit(config)
        assert registers <= most and stack <= 64, f"{what}: {registers} registers, {stack} of stack"
        assert some_held(lines) or not config.ahead, what
    assert sum("UTMALDG.2D" in line for line in lines) >= 2, what
    assert not flushes(lines), what
    assert any("FFMA" in line for line in lines) and any("I2FP" in line for line in lines), what


def spread(policy, group_size):
    """A configuration for each output type, so that all types and groups together see all."""
    every = shapes(policy, group_size)
    turn = GROUP_SIZES.index(group_size)
    return [(every[(3 * turn + i) * 4 % len(every)], dtype) for i, dtype in enumerate(DTYPES)]


@pytest.mark.parametrize("policy", ("large", "small"))
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_each_group_size_policy_and_output_type(group_size, policy, tmp_path):
    for config, dtype in spread(policy, group_size):
        check(config, group_size, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("policy", ("large", "small"))
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_tile(group_size, policy, dtype, tmp_path):
    for config in shapes(policy, group_size):
        check(config, group_size, dtype, tmp_path)


def test_what_gpu_tests_force_is_legal():
    """A fixture that compiled anything else would fail all tests of its module."""
    assert all(sm90.is_legal(config, g) for config in SOME for g in GROUP_SIZES)


def test_the_shapes_are_all_there_are():
    for policy, counts in (("large", (6, 6, 6, 6)), ("small", (82, 63, 36, 36))):
        assert tuple(len(shapes(policy, g)) for g in GROUP_SIZES) == counts
    for group_size in GROUP_SIZES:
        every = shapes("small", group_size)
        spreads = {(c.cluster, c.row_cluster, c.resident) for c in every}
        assert spreads == {(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3)}
        orders = {(c.ahead, c.early, c.chunk) for c in every}
        assert len(orders) == 3 * {32: 3, 64: 2}.get(group_size, 1)
