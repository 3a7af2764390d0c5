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
from farro.cuda.fp8.configs import Config as Fp8Config
from farro.dispatch import not_installed
from farro.formats.fp8 import E4M3
from farro.ops.fp8_blockwise_linear import sm90 as fp8_blockwise
from farro.ops.fp8_linear import sm90 as fp8_linear
from farro.ops.fp8_quantize import FUNCTIONS
from farro.ops.fp8_swiglu_quantize import sm90 as fp8_swiglu
from farro.ops.int8_gemm import sm90_launch, triton
from farro.ops.int8_gemm.sm90 import Config
from farro.ops.moe_ffn import sm90 as moe
from farro.ops.nvfp4_group_mm import sm90 as nvfp4
from farro.problem import Problem
from farro.testing import CASES, MoeCase, assert_bit_equal
from farro.testing.nvfp4_group_mm import GroupCase

NATIVE = (
    Config("large", 256, 128, 4),
    Config("large", 256, 112, 4),
    Config("large", 128, 96, 5),
    Config("small", 8, 64, 6, 1, ahead=True),
    Config("small", 32, 64, 5, 2, ahead=True),
    Config("small", 16, 64, 3, 1),
    Config("small", 64, 64, 4, 2),
    Config("small", 32, 64, 4, 2, cluster=2),
    Config("small", 8, 64, 6, 1, ahead=True, cluster=2),
)
FP8 = (  # with their sums: promoted, fast or scaled
    (Fp8Config("large", 256, 96, 3), (False, True, None)),
    (Fp8Config("large", 128, 144, 5), (False, True, None)),
    (Fp8Config("large", 128, 192, 5), (False, None)),
    (Fp8Config("large", 128, 256, 3), (True,)),
    (Fp8Config("large", 128, 192, 3, staged=True), (True,)),
    (Fp8Config("large", 128, 256, 3, staged=True), (True,)),
    (Fp8Config("small", 8, 64, 4, 8), (False, True, None)),
    (Fp8Config("small", 32, 64, 4), (False, None)),
    (Fp8Config("small", 64, 64, 3, 2), (True, None)),
    (Fp8Config("small", 32, 64, 4, multicast=2), (None,)),
    (Fp8Config("small", 64, 64, 3, ahead=False), (None,)),
)
SWIGLU = (
    fp8_swiglu.Config("large", 64, 3),
    fp8_swiglu.Config("large", 128, 4),
    fp8_swiglu.Config("small", 8, 4, 4),
    fp8_swiglu.Config("small", 64, 3),
)
NVFP4 = (
    nvfp4.Config(4, 8, 2, 5, True),
    nvfp4.Config(2, 16, 2, 3, True, ctas=2),
    nvfp4.Config(1, 8, 2, 3, True, split=4),
    nvfp4.Config(2, 32, 2, 3, True, split=2),
    nvfp4.Config(4, 64, 2, 4, False),
    nvfp4.Config(3, 128, 1, 4, False),
    nvfp4.Config(2, 256, 1, 3, False),
    nvfp4.Config(4, 64, 2, 3, True),
)
MOE = (  # with a group size each; clusters of 8, 2 and 1
    (moe.Tile(8, 1, 1, 5, 4), 256),
    (moe.Tile(16, 2, 1, 5, 2), 128),
    (moe.Tile(32, 4, 1, 5), 64),
    (moe.Tile(64, 2, 2, 4), 32),
    (moe.Tile(128, 2, 2, 4), 128),
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
            runs += check(sm90_launch.run, config, operands, want, group_size)
    operands, want = problem(2000, 1300, 300, 128, torch.bfloat16)
    for config in NATIVE[1:3]:
        runs += check(sm90_launch.run, config, operands, want, 128)
    return runs


def fp8_codes(rows, k):
    """As codes(), small numbers, whose sums are exact on tensor cores too."""
    whole = (torch.randint(-4, 5, (rows, k + 16)) / 2).to(E4M3)
    return whole[:, 16:]


def powers(rows, columns, turned):
    """Scales that keep sums exact, row-major or column-major."""
    scales = torch.exp2(torch.randint(-2, 3, (rows, columns)).float() - 3)
    return scales.T.contiguous().T if turned else scales


def fp8_product(config, m, n, k, sums, turn):
    """One launch with bias, half of them with a residual in place, compared bit for bit."""
    x, weight, bias = fp8_codes(m, k), fp8_codes(n, k), torch.randint(-9, 10, (n,)).float()
    if sums is None:
        blocks = -(-k // 128)
        operands = (x, weight, powers(m, blocks, turn % 2), powers(-(-n // 128), blocks, False))
        want = farro.fp8_blockwise_linear_bf16(*operands, bias=bias, backend="reference")
        out = torch.full_like(want, float("nan")).cuda()
        fp8_blockwise.run(config, *map(there, operands), bias.cuda(), out, False)
    else:
        alpha, residual = torch.tensor([0.25]), torch.randint(-9, 10, (m, n)).bfloat16()
        out = residual.cuda()
        want = farro.fp8_linear_bias_residual_bf16(
            x, weight, bias, residual, alpha, fast_accum=sums, backend="reference"
        )
        operands = (*map(there, (x, weight, alpha, bias)), out, out)
        fp8_linear.run(config, *operands, "bias_residual", sums)
    torch.cuda.synchronize()
    assert_bit_equal(out.cpu() + 0.0, want + 0.0, f"{config}, fast sums: {sums}")
    return 1


def fp8_swiglu_quantize(config, m, n, k, turn):
    blocks = -(-k // 128)
    operands = (
        *(fp8_codes(m, k), fp8_codes(2 * n, k)),
        *(powers(m, blocks, turn % 2) / 64, powers(2 * -(-n // 128), blocks, False)),
    )
    want, want_scale = farro.fp8_blockwise_swiglu_quantize_fp8(*operands, backend="reference")
    q = torch.full((m, n), float("nan")).to(E4M3).cuda()
    scale = torch.full((want_scale.shape[1], m), float("nan")).cuda().T
    fp8_swiglu.run(config, *map(there, operands), q, scale)
    torch.cuda.synchronize()
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=0.02, atol=0)
    same = (q.cpu().view(torch.uint8) == want.view(torch.uint8)).double().mean()
    assert same > 0.98, f"{config}: {same:.3f} of the codes are the reference's"
    return 1


def native_fp8():
    runs = 0
    for turn, (config, kinds) in enumerate(FP8):
        m = 300 if config.policy == "large" else 20
        for sums in kinds:
            runs += fp8_product(config, m, 208 + 16 * (turn % 2), 1168, sums, turn)
    for turn, config in enumerate(SWIGLU):
        m = 150 if config.policy == "large" else 20
        runs += fp8_swiglu_quantize(config, m, 208, 1168, turn)
    # more tiles than SMs, so that the rings go on from tile to tile
    for sums in (False, True, None):
        runs += fp8_product(FP8[1][0], 2000, 1296, 400, sums, 1)
    for config, _ in FP8[4:6]:  # and results of one tile on their way with the next's
        runs += fp8_product(config, 2000, 1824, 400, True, 1)
    return runs + fp8_swiglu_quantize(SWIGLU[0], 2000, 1296, 400, 1)


def nvfp4_products():
    """Tails of M, K and tokens, experts without tokens, more tiles than SMs."""
    runs = 0
    for turn, config in enumerate(NVFP4):
        sizes = [(5, 352, 1376, 20 if config.inside else 300)]
        if turn in (0, 6):
            sizes.append((9, 2080, 288, 20 if config.inside else 520))
        for e, m, k, cap in sizes:
            case = GroupCase("product", e, m, k, cap, turn % 2 == 0, turn % 3 != 0, values="exact")
            call = case.build("cuda", 7)
            out = call.arguments["out"]
            nvfp4.run(config, out, *call.operands)
            torch.cuda.synchronize()
            wrong = call.differs(0, out, call.expected[0])
            assert wrong is None, f"{config}: {wrong}"
            runs += 1
    return runs


def moe_layers():
    """Tails of H, I, routes and groups, experts without routes; then more tiles than SMs."""
    runs = 0
    for turn, (tile, group_size) in enumerate(MOE):
        layout = ("concatenated", "interleaved")[turn % 2]
        cases = [MoeCase("layer", 70, 3, 6, 2 * group_size + 32, 400, group_size, layout)]
        if turn in (1, 4):  # a plan by a cluster too
            cases.append(MoeCase("large", 2100, 2, 5, 1040, 784, group_size, layout))
        for case in cases:
            call = case.build("cuda", 7)
            out = torch.full_like(call.expected[0], float("nan"), device="cuda")
            moe.run(moe.Config(tile, tile), *call.operands, out, group_size, call.interleaved)
            torch.cuda.synchronize()
            assert_bit_equal(out.cpu(), call.expected[0], f"{case} {tile}")
            runs += 1
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
    if lacking:
        print(f"native kernels skipped: {lacking}")
    else:
        runs = native() + native_fp8() + nvfp4_products() + moe_layers()
        print(f"{runs} native launches right")
    lacking = not_installed("triton")
    print(f"Triton skipped: {lacking}" if lacking else f"{through_triton()} Triton launches right")


if __name__ == "__main__":
    main()
