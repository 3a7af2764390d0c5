"""benchmarks/device/sanitize.sh without a GPU: its processes and summaries, with stubs for both."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from farro.cuda import jit

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "device"
COPIES = ("stores", "small_copies", "bulk_copies", "tensor_copies")
HANDOFFS = (*(f"right_{name}" for name in COPIES), "hasty_stores")

DRIVER = """#!/bin/sh
case $1 in *racecheck_report.py) exec "$REAL_PYTHON" "$@" ;; esac
shift  # the driver's path
echo "$SEEN_TOOL $*" >>"$SEEN"
[ "$BREAKS" = "$SEEN_TOOL $2" ] && echo "AssertionError: wrong" && exit 1
[ -n "$SLOW" ] && [ -n "$SEEN_TOOL" ] && exec sleep "$SLOW"
[ "$1" != --part ] && for name; do echo "$name is right"; done && exit 0
echo "2 native launches right"
echo "3 Triton launches right"
echo "part $2 ended"
"""
TOOL = """#!/bin/sh
tool=$2
[ "$1 $3 $5" = "--tool --print-limit --error-exitcode" ] || exit 3
shift 6
[ "$tool $1" = "memcheck --report-api-errors" ] && shift 2
[ "$tool $1 $2" = "racecheck --num-cuda-barriers 128" ] && shift 2
SEEN_TOOL=$tool "$@" || exit $?
name=ERROR; what="errors"
[ $tool = racecheck ] && name=RACECHECK && what="hazards displayed (0 errors, 0 warnings)"
case "$*" in
  *beyond | *unordered) [ -n "$BLIND" ] || { echo "========= Invalid __global__ write"
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 9; } ;;
  *"planted.py $REPORTED"*)
    echo "========= Error: Race reported between Read access at to_hand+0x1" ;;
esac
if [ "$FAULT" = "$tool $4" ]; then
  echo "========= Error: Race reported between Write access at $KERNEL+0x12f0"
  echo "========= $name SUMMARY: 21 $what"
  exit 9
fi
echo "========= $name SUMMARY: 0 $what"
"""


@pytest.fixture
def sanitize(tmp_path):
    for name, text in (("python-stub", DRIVER), ("bin/compute-sanitizer", TOOL)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(**variables):
        seen = tmp_path / "seen"
        seen.write_text("")
        names = ("FAULT", "BREAKS", "BLIND", "SEEN_TOOL", "SLOW", "SANITIZE_BUDGET_S")
        given = {
            **os.environ,
            **dict.fromkeys(names, ""),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "python-stub"),
            "SEEN": str(seen),
            "REAL_PYTHON": sys.executable,
            "REPORTED": "hasty",
            "KERNEL": "gemm",
            "SANITIZE_JOBS": "4",
            **variables,
        }
        script = [str(FOLDER / "sanitize.sh"), str(tmp_path / "logs")]
        done = subprocess.run(script, env=given, capture_output=True, text=True, timeout=60)
        return done, sorted(line.strip() for line in seen.read_text().splitlines())

    return run


def test_every_tool_sees_every_part(sanitize):
    done, seen = sanitize()
    assert (done.returncode, done.stderr) == (0, "")
    tools = [f"{t} --part {i}/2" for t in ("memcheck", "racecheck", "synccheck") for i in (1, 2)]
    planted = ["memcheck beyond", "racecheck unordered", "racecheck hasty_stores"]
    planted.append(f"racecheck {' '.join(HANDOFFS[:-1])}")
    assert seen == sorted([f"--part {i}/4" for i in range(1, 5)] + tools + planted)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plain      8 native launches right; 12 Triton launches right; ")
    ended = "2 of 2 parts of the driver ended"
    assert lines[1:9] == [
        f"memcheck  exit 0; ERROR SUMMARY: 0 errors; {ended}",
        "racecheck  exit 0; RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings); "
        + ended,
        f"synccheck  exit 0; ERROR SUMMARY: 0 errors; {ended}",
        "handoffs   reported of right ones: none; of hasty ones: to_hand 1: it follows mbarriers",
        "racecheck  0 reports of kernels with rings of mbarriers: none",
        "racecheck  0 reports of other kernels: none",
        "planted-memcheck found",
        "planted-racecheck found",
    ]


def test_a_fault_of_one_part_is_the_tool_s(sanitize):
    done, _ = sanitize(FAULT="racecheck 2/3", SANITIZE_PARTS="3")
    assert done.returncode == 1
    assert "racecheck  exit 9; RACECHECK SUMMARY: 21 hazards displayed" in done.stdout
    assert "racecheck  1 reports of other kernels: gemm 1\n" in done.stdout
    assert "memcheck  exit 0" in done.stdout and "synccheck  exit 0" in done.stdout
    done, _ = sanitize(FAULT="synccheck 2/3", SANITIZE_PARTS="3")
    assert done.returncode == 1
    assert "1 ========= Error: Race reported between Write access at gemm\n" in done.stdout


@pytest.mark.parametrize("reported, counts", [("hasty", True), ("right", False), ("none", False)])
def test_reports_on_rings_count_where_handoffs_are_told_apart(reported, counts, sanitize):
    """Of a kernel without a ring they count in any case."""
    done, _ = sanitize(FAULT="racecheck 2/2", KERNEL="fp8_small", REPORTED=reported)
    assert done.returncode == counts
    assert "1 reports of kernels with rings of mbarriers: fp8_small 1\n" in done.stdout
    assert ("tells nothing" in done.stdout) is not counts
    done, _ = sanitize(FAULT="racecheck 2/2", KERNEL="moe_plan", REPORTED=reported)
    assert done.returncode == 1
    assert "racecheck  1 reports of other kernels: moe_plan 1\n" in done.stdout


def test_a_budget_ends_it(sanitize):
    done, _ = sanitize(SLOW="30", SANITIZE_BUDGET_S="4")
    assert done.returncode == 1
    assert "of 2 parts of the driver ended" in done.stdout
    assert "2 of 2 parts of the driver ended" not in done.stdout


def test_kernels_with_rings():
    names = runpy.run_path(str(FOLDER / "racecheck_report.py"))["ring_kernels"]()
    assert {"int8_gemm_small", "fp8_large", "nvfp4_gated", "moe_down", "_gemm_ring"} <= names
    assert not {"moe_plan", "moe_sum", "nvfp4_expand", "_gemm_pointers"} & names


@pytest.mark.parametrize("name", ("beyond", "unordered", *HANDOFFS))
def test_planted_kernels_compile(name):
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
    cubin, lowered = jit.cubin(str(FOLDER / "planted.cu"), name, "sm_90a")
    assert cubin and lowered == name


@pytest.mark.gpu
def test_right_handoffs_are_right():
    command = [sys.executable, str(FOLDER / "planted.py"), *HANDOFFS[:-1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} is right" for name in HANDOFFS[:-1]]


def test_a_wrong_result_of_the_plain_run_ends_it(sanitize):
    done, seen = sanitize(BREAKS=" 3/4")
    assert done.returncode == 1
    assert "plain      FAILED" in done.stdout and "AssertionError: wrong" in done.stdout
    assert len(seen) == 4  # no tool ran


def test_a_part_that_breaks_under_a_tool_is_told(sanitize):
    done, _ = sanitize(BREAKS="memcheck 1/2")
    assert done.returncode == 1
    assert "memcheck  exit 1; ERROR SUMMARY: 0 errors; 1 of 2 parts" in done.stdout


def test_a_tool_that_sees_nothing_is_told(sanitize):
    done, _ = sanitize(BLIND="1")
    assert done.returncode == 1
    assert "planted-memcheck NOT FOUND" in done.stdout
    assert "planted-racecheck NOT FOUND" in done.stdout


def test_wrong_numbers_are_refused(sanitize):
    done, seen = sanitize(SANITIZE_JOBS="many")
    assert (done.returncode, seen) == (2, [])
    assert "SANITIZE_JOBS is 'many'" in done.stderr


def test_parts_of_the_driver_are_all_its_launches():
    """In a process of its own, for the driver chooses torch's allocator when it is imported."""
    code = (
        "import sanitize_driver as d\n"
        "native = [*d.native(), *d.native_fp8(), *d.nvfp4_products(), *d.moe_layers()]\n"
        "for launches in (native, list(d.through_triton())):\n"
        "    assert len({launch.name for launch in launches}) == len(launches) > 40\n"
        "    for parts in (1, 3, 500):\n"
        "        split = [d.chosen(launches, i + 1, parts) for i in range(parts)]\n"
        "        assert sorted(x[0] for s in split for x in s) == list(range(len(launches)))\n"
        "        assert all(launches[at] is launch for s in split for at, launch in s)\n"
        "assert d.part('2/8') == (2, 8)\n"
        "for wrong in ('0/8', '9/8', '3', 'a/b'):\n"
        "    try: d.part(wrong)\n"
        "    except ValueError: continue\n"
        "    raise AssertionError(wrong)\n"
        "import torch\n"
        "whole = type('Properties', (), {'multi_processor_count': 132, 'name': 'x'})\n"
        "torch.cuda.get_device_properties = lambda device: whole\n"
        "with d.few_multiprocessors():\n"
        "    few = torch.cuda.get_device_properties(0)\n"
        "    assert (few.multi_processor_count, few.name) == (d.MULTIPROCESSORS, 'x')\n"
        "assert torch.cuda.get_device_properties(0).multi_processor_count == 132\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
