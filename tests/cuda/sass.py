"""Compiling one native kernel and reading its machine code, without a GPU."""

from __future__ import annotations

import io
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from farro.cuda import jit


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    registers: int  # of a thread, at launch
    stack: int  # bytes
    told: str  # what the compiler said


def compiled(source: str, name: str) -> Compiled:
    log = io.StringIO()
    program = jit.program(source, "sm_90a", ptxas_options=["-v"])
    code = program.compile("cubin", name_expressions=(name,), logs=log)
    told = log.getvalue()
    registers = re.search(r"Used (\d+) registers", told)
    stack = re.search(r"(\d+) bytes stack frame", told)
    assert registers and stack, told
    return Compiled(bytes(code.code), int(registers[1]), int(stack[1]), told)


def disassembled(cubin: bytes, tmp_path: Path) -> list[str]:
    """Lines of SASS; skips where no disassembler is at hand."""
    triton = pytest.importorskip("triton", reason="nvdisasm comes with Triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip(f"{tool} does not exist")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    told = subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", told.stdout, re.MULTILINE)


def check_products(kernel: Compiled, lines: list[str], instruction: str, per_turn: int, what: str):
    """Tensor-core instructions of one shape, whole turns of them, in flight with nothing spilled.

    `instruction` is such as QGMMA.64x128x32.F32.E4M3.E4M3, and a turn has `per_turn` of them.
    """
    # C7510 and its like: wgmma is serialized, because accumulators are touched or cross a call
    told = kernel.told
    assert "serialized" not in told and not re.search(r"C75\d\d", told), f"{what}: {told}"
    assert "setmaxnreg" not in told, f"{what}: {told}"
    products = [i for i, line in enumerate(lines) if re.search(r"\b[IQ]GMMA\.", line)]
    assert products and all(f"{instruction} " in lines[i] for i in products), what
    assert len(products) % per_turn == 0, f"{what}: {len(products)} products"
    inside = lines[products[0] : products[-1]]
    assert not [x for x in inside if re.search(r"\b(LDL|STL)\b", x)], f"{what}: spills in the loop"


def flushes(lines: list[str]) -> bool:
    """Whether subnormal numbers become zero; integer division has an .FTZ of its own."""
    return any(re.search(r"\b(FFMA|FMUL|FADD)\b.*\.FTZ", line) for line in lines)


def some_held(lines: list[str]) -> bool:
    """Whether some sums are held while others are read."""
    return any(re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x[1-9]", line) for line in lines)
