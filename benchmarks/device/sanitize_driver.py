"""Runs each family of kernels once on a small problem, for sanitize.sh to watch.

python benchmarks/device/sanitize_driver.py             # all kernels; exits 1 on a wrong result
python benchmarks/device/sanitize_driver.py --planted   # two kernels that are wrong on purpose
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
from pathlib import Path

# every tensor its own allocation, so that reading past one is seen; read when torch starts
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

import farro
from farro.arch import arch_of
from farro.catalogue import operator_named
from farro.dispatch import not_installed
from farro.ops.fp8_quantize import FUNCTIONS
from farro.ops.int8_gemm import sm90, triton
from farro.ops.int8_gemm.sm90 import Config
from farro.problem import Problem
from farro.testing import CASES, assert_bit_equal

NATIVE = (
    Config("large", 256, 128, 4),
    Config("large", 256, 112, 3),
    Config("large", 128, 96, 5),
    Config("small", 8, 64, 6, 1, ahead=True),
    Config("small", 32, 64, 5, 2, ahead=True),
    Config("small", 16, 64, 3, 1),
    Config("small", 64, 64, 4, 2),
)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)

PLANTED = """
__global__ void beyond(int* to) { to[threadIdx.x + 65] = 1; }
__global__ void unordered(int* to) {
  __shared__ int x[64];
  x[threadIdx.x] = threadIdx.x;
  to[threadIdx.x] = x[63 - threadIdx.x];
}
"""


def codes(rows, k):
    """A slice of wider rows, 16 bytes aligned, with K = k at its end."""
    whole = torch.randint(-128, 128, (rows, -(-k // 16) * 16 + 16), dtype=torch.int8)
    return whole[:, 16 : 16 + k]


def problem(m, n, k, group_size, dtype):
    """Operands on the CPU, and the reference's result."""
    groups = -(-k // group_size)
    a, b, bias = codes(m, k), codes(n, k).T, torch.randn(n).to(dtype)
    scales = torch.randn(m, groups), torch.randn(groups, n)
    want = farro.int8_gemm(
        *(a, b, *scales), group_size=group_size, output_dtype=dtype, bias=bias, backend="reference"
    )
    return (a, b, *scales, bias), want


def there(tensor):
    """On the GPU with the same strides: a copy of the whole storage."""
    if tensor.is_contiguous():
        return tensor.cuda()
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check(run, config, operands, want, group_size):
    out = torch.full(want.shape, float("nan"), dtype=want.dtype).cuda()
    inputs = [there(t) for t in operands]
    run(config, *inputs, out, group_size)
    torch.cuda.synchronize()
    assert_bit_equal(out.cpu(), want, str(config))
    return 1


def native():
    runs = 0
    for group_size in (256, 32):
        # K beyond the ring; then more tiles than SMs, so that the ring goes on from tile to tile
        for i, config in enumerate(NATIVE):
            m = 150 if config.policy == "large" else 20
            operands, want = problem(m, 200, 1100, group_size, DTYPES[i % 3])
            runs += check(sm90.run, config, operands, want, group_size)
    operands, want = problem(2000, 1300, 300, 128, torch.bfloat16)
    for config in NATIVE[1:3]:
        runs += check(sm90.run, config, operands, want, 128)
    return runs


def through_triton():
    runs = 0
    for m in (150, 8):
        operands, want = problem(m, 208, 560, 256, torch.bfloat16)
        names = ("a", "b", "scale_a", "scale_b", "bias", "out")
        tensors = dict(zip(names, (*operands, want)))
        arch = arch_of(torch.device("cuda", 0))
        asked = Problem.of("int8_gemm", tensors, {"group_size": 256}, arch)
        families = {c.family: c for c in reversed(triton.candidates(asked))}
        for config in families.values():
            runs += check(triton.run, config, operands, want, 256)
    x = torch.randn(33, 700)
    for dtype in (torch.float32, torch.bfloat16):
        want = farro.quantize_int8_groups(x.to(dtype), 256, backend="reference")
        got = farro.quantize_int8_groups(x.to(dtype).cuda(), 256, backend="triton")
        for result, needed in zip(got, want):
            assert_bit_equal(result.cpu(), needed, "quantize_int8_groups")
        runs += 1
    return runs + fp8_quantizers() + nvfp4_quantizers()


def fp8_quantizers():
    """A whole tensor in one launch and in two, rows in registers and in two passes, blocks."""
    runs = 0
    for shape in ((33, 700), (300, 700), (3, 20000)):
        x = torch.randn(shape).bfloat16()
        for kind, function in FUNCTIONS.items():
            want = function(x, backend="reference")
            for result, needed in zip(function(x.cuda(), backend="triton"), want):
                assert_bit_equal(result.cpu(), needed, f"quantize_fp8_{kind}")
            runs += 1
    return runs


def nvfp4_quantizers():
    """Used and unused rows, plans with ids outside every range, odd addresses."""
    runs = 0
    for operator in ("nvfp4_quantize", "nvfp4_scatter", "nvfp4_scatter_fp4", "nvfp4_dequantize"):
        kernel = next(k for k in operator_named(operator).kernels if k.backend == "triton")
        for case in (case for case in CASES[operator]() if case.quick):
            outcome = case.build("cuda", 7).check(kernel)
            assert outcome.status == "ok", f"{case.name}: {outcome.detail}"
            runs += 1
    return runs


def planted():
    from farro.cuda.launch import Launch, kernel_function

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "planted.cu"
        source.write_text(PLANTED)
        for name in ("beyond", "unordered"):
            out = torch.zeros(128, dtype=torch.int32).cuda()  # 512 bytes, which no allocator pads
            function = kernel_function(str(source), name, "sm_90a", 0, 0)
            address = (ctypes.c_void_p(out.data_ptr()),)
            Launch(0, function, (1, 1, 1), 64, 0, 1, address).on_current_stream()
            torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planted", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(7)
    if options.planted:
        planted()
        return
    lacking = not_installed("cuda") or arch_of(torch.device("cuda", 0)).lacks(frozenset({"wgmma"}))
    print(f"native kernels skipped: {lacking}" if lacking else f"{native()} native launches right")
    lacking = not_installed("triton")
    print(f"Triton skipped: {lacking}" if lacking else f"{through_triton()} Triton launches right")


if __name__ == "__main__":
    main()
