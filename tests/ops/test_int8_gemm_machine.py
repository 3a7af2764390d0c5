"""int8_gemm on other processors than this one, and how much memory it takes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import farro
from farro.ops.int8_gemm import cpu
from farro.ops.int8_gemm.cpu import addcmul_is_fused, int8_product_is_exact

X86 = platform.machine().lower() in ("x86_64", "amd64")

PEAK = r'''
import ctypes, sys, torch, farro

def peak(call):
    """KiB that the process grew beyond where it was, at its largest, during a call."""
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
    before = status("VmHWM")
    call()
    return status("VmHWM") - before

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1])

def operands(m, n, k, packed):
    a = torch.empty(m, k, dtype=torch.int8).random_(-128, 128)
    weight = torch.empty(n, k, dtype=torch.int8).random_(-128, 128)
    if packed:
        weight = farro.int8.pack_groups(weight, 256).transpose(1, 2)
    else:
        weight = weight.T
    scale_a, scale_b = torch.rand(m, -(-k // 256)), torch.rand(-(-k // 256), n)
    out = torch.full((m, n), 1.0, dtype=torch.bfloat16)
    return lambda: farro.int8_gemm(a, weight, scale_a, scale_b, out=out)

packed = sys.argv[1] == "packed"
operands(64, 64, 512, packed)()  # libraries, threads and probes are there before
kept = []
planted = peak(lambda: kept.append(torch.ones(32, 1024, 1024, dtype=torch.int8)))
call = operands(1024, 4096, 4096, packed)
print(planted, peak(call))
'''


@pytest.mark.parametrize("m", [1, 16, 128])
def test_buffers_are_kept_between_calls(m):
    """Handed back to the system, every call would fault their pages in anew."""
    a, weight = torch.ones(m, 512, dtype=torch.int8), torch.ones(2048, 512, dtype=torch.int8)
    b = farro.int8.pack_groups(weight, 256).transpose(1, 2)
    given = (a, b, torch.ones(m, 2), torch.ones(2, 2048))
    out = torch.empty(m, 2048, dtype=torch.bfloat16)
    farro.int8_gemm(*given, out=out, backend="cpu")  # the probes run once
    if not (int8_product_is_exact() and addcmul_is_fused()):
        pytest.skip("the exact ways around this processor's products take memory of their own")
    with torch.profiler.profile(profile_memory=True) as found:
        farro.int8_gemm(*given, out=out, backend="cpu")
    events = found.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert not any(size >= out.nbytes for size in sizes), sizes


def test_kept_buffers_serve_any_mode_and_each_thread():
    """Made under inference mode they would be of no use outside of it; two threads share none."""
    a, weight = torch.randint(-128, 128, (2, 16, 300), dtype=torch.int8)
    given = (a, weight.T, torch.rand(16, 2), torch.rand(2, 16))
    want = farro.int8_gemm(*given, output_dtype=torch.float32, backend="reference")

    def call(inference: bool) -> torch.Tensor:
        with torch.inference_mode(inference):
            return farro.int8_gemm(*given, output_dtype=torch.float32, backend="cpu")

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, [True, False] * 200))
    assert all(torch.equal(result, want) for result in results)


def test_a_call_in_the_middle_of_a_call(monkeypatch):
    """As a signal handler or a finalizer may make one: in the same thread, so never its buffers."""

    def operands(m):
        a = torch.randint(-128, 128, (m, 512), dtype=torch.int8)
        weight = torch.randint(-128, 128, (300, 512), dtype=torch.int8)
        return a, weight.T, torch.randn(m, 2), torch.randn(2, 300)

    def call(given, backend="cpu"):
        return farro.int8_gemm(*given, output_dtype=torch.float32, backend=backend)

    multiply_add, inner = cpu._multiply_add, []

    def interrupted(total, partial, scales):
        if not inner:
            inner.append(None)
            inner[0] = call(other)
        multiply_add(total, partial, scales)

    given, other = operands(16), operands(12)
    call(given)  # the thread keeps buffers from here on
    monkeypatch.setattr(cpu, "_multiply_add", interrupted)
    assert torch.equal(call(given), call(given, "reference"))
    assert torch.equal(inner[0], call(other, "reference"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("weight", ("strided", "packed"))
def test_peak_memory_beyond_the_output(weight):
    """M = 1024, N = K = 4096: at most 16 MiB, by the process's own high-water mark.

    A planted 32 MiB shows that the mark is read right; freed memory goes back to the system at
    once, so that none is reused unseen.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    script = [sys.executable, "-c", PEAK, weight]
    run = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    if "clear_refs" in run.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert run.returncode == 0, run.stderr
    planted, taken = (int(value) / 1024 for value in run.stdout.split())
    assert 31 < planted < 40
    assert 1 < taken <= 16, f"{taken:.1f} MiB"


def has_vnni() -> bool:
    """Whether this processor has the instructions for which torch takes oneDNN's INT8 product."""
    try:
        return "avx512_vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


MACHINES = {
    "no FMA instruction": ({"ATEN_CPU_CAPABILITY": "default"}, {"addcmul_fused"}),
    "no VNNI": ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"int8_product_exact"}),
    "neither": (
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        {"addcmul_fused", "int8_product_exact"},
    ),
}


@pytest.mark.skipif(not X86, reason="these variables pretend older x86-64 processors")
@pytest.mark.parametrize("variables, lost", MACHINES.values(), ids=MACHINES)
def test_older_processors(variables, lost):
    """The probes notice what torch lost there, and the bits stay those of the reference.

    Where it lost one thing only, for int8_gemm, which has a way around each of its own.
    """
    script = [sys.executable, "-m", "farro", "verify", "--quick", "--json", "--device", "cpu"]
    expected = {"int8_gemm.cpu", "int8_quantize.cpu"}
    if len(lost) == 1:
        script += ["--operator", "int8_gemm"]
        expected = {"int8_gemm.cpu"}
    run = subprocess.run(
        [*script, "--backend", "cpu"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    if not has_vnni():  # torch's own product, exact whatever oneDNN may use
        lost = lost - {"int8_product_exact"}
    assert not any(found["cpu"][probe] for probe in lost), found["cpu"]
    kernels = {kernel["kernel"]: kernel for kernel in found["kernels"]}
    assert expected <= set(kernels)
    for kernel in kernels.values():
        assert kernel["passed"] == kernel["cases"] > 5


@pytest.mark.skipif(not X86, reason="these variables pretend older x86-64 processors")
def test_without_the_probes_older_processors_would_give_other_bits():
    """The cases above can tell: with both probes answering yes, many of them fail."""
    script = (
        "import farro.ops.int8_gemm.cpu as cpu, sys\n"
        "cpu.int8_product_is_exact = cpu.addcmul_is_fused = lambda: True\n"
        "import farro.cli.environment as environment\n"
        "sys.argv = ['farro', 'verify', '--quick', '--json', '--operator', 'int8_gemm', "
        "'--backend', 'cpu', '--device', 'cpu']\n"
        "from farro.cli import main\n"
        "main()\n"
    )
    for variables, lost in list(MACHINES.values())[:2]:
        if lost == {"int8_product_exact"} and not has_vnni():
            continue
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 1, run.stdout + run.stderr
        assert json.loads(run.stdout)["kernels"][0]["failed"] >= 1
