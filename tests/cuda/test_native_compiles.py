"""Every family of native kernels compiles with NVRTC alone, with the instructions it promises."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.cuda import jit
from farro.ops.int8_gemm import sm90

from ..ops.sm90_forced import GROUP_SIZES, shapes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compiled(config, group_size, dtype):
    """CUBIN, registers a thread, bytes of stack, and what the compiler said."""
    source, name = sm90.kernel_name(config, group_size, dtype)
    log = io.StringIO()
    program = jit.program(source, "sm_90a", ptxas_options=["-v"])
    code = program.compile("cubin", name_expressions=(name,), logs=log)
    told = log.getvalue()
    registers = re.search(r"Used (\d+) registers", told)
    stack = re.search(r"(\d+) bytes stack frame", told)
    assert registers and stack, told
    return bytes(code.code), int(registers[1]), int(stack[1]), told


def disassembled(cubin, tmp_path):
    """Lines of SASS; skips where no disassembler is at hand."""
    triton = pytest.importorskip("triton", reason="nvdisasm comes with Triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip(f"{tool} does not exist")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    told = subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", told.stdout, re.MULTILINE)


def check(config, group_size, dtype, tmp_path):
    cubin, registers, stack, told = compiled(config, group_size, dtype)
    what = f"{config} G{group_size} {dtype}"
    # C7510 and its like: wgmma is serialized, because accumulators are touched or cross a call
    assert "serialized" not in told and not re.search(r"C75\d\d", told), f"{what}: {told}"
    assert "setmaxnreg" not in told, f"{what}: {told}"
    lines = disassembled(cubin, tmp_path)
    if config.policy == "large":
        # setmaxnreg moves registers between warpgroups only if all 168 * 384 are taken at launch
        assert registers == 168, what
        assert stack <= 128, f"{what}: {stack} bytes of stack (the scale producer has 40 registers)"
    else:
        most = min(255, 65536 // (32 * config.warps) // 8 * 8)
        assert registers <= most and stack <= 16, f"{what}: {registers} registers, {stack} of stack"
        if config.ahead:  # some sums are held while others are added up
            assert any("WARPGROUP.DEPBAR.LE gsb0, 0x1" in line for line in lines), what
    columns = config.columns if config.policy == "large" else config.rows // config.consumers
    products = [i for i, line in enumerate(lines) if "IGMMA." in line]
    assert products and all(f"IGMMA.64x{columns}x32.S8.S8" in lines[i] for i in products), what
    waves = config.rows // 128 if config.policy == "large" else 1
    per_turn = max(group_size // 32, 4) if config.policy == "small" else waves * group_size // 32
    assert len(products) % per_turn == 0, f"{what}: {len(products)} products"
    inside = lines[products[0] : products[-1]]
    assert not [x for x in inside if re.search(r"\b(LDL|STL)\b", x)], f"{what}: spills in the loop"
    assert sum("UTMALDG.2D" in line for line in lines) >= 2, what
    assert any("FFMA" in line for line in lines) and any("I2FP" in line for line in lines), what
    flushing = r"\b(FFMA|FMUL|FADD)\b.*\.FTZ"  # (integer division has its own .FTZ)
    assert not any(re.search(flushing, line) for line in lines), f"{what}: flushes subnormals"


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


def test_the_shapes_are_all_there_are():
    for policy, counts in (("large", (6, 6, 6, 6)), ("small", (12, 15, 17, 17))):
        assert tuple(len(shapes(policy, g)) for g in GROUP_SIZES) == counts
    assert {c.ahead for c in shapes("small", 32)} == {False, True}
