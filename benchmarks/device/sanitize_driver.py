"""Runs each family of kernels once on a small problem, for sanitize.sh to watch.

python benchmarks/device/sanitize_driver.py              # all kernels; exits 1 on a wrong result
python benchmarks/device/sanitize_driver.py --part 2/8   # every eighth launch, from the second on
python benchmarks/device/sanitize_driver.py --list       # names of launches; needs no GPU

Native kernels are told that the GPU has few multiprocessors: what goes on from tile to tile does so
in small problems, for the sanitizer makes a launch some hundred times slower.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

# every tensor its own allocation, so that reading past one is seen; read when torch starts
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

import farro
from farro.arch import arch_named, arch_of
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
    Config("small", 64, 64, 4, 2, resident=3),
    Config("small", 32, 64, 5, 2, early=True),
    Config("small", 32, 64, 4, 2, cluster=2),
    Config("small", 32, 64, 4, 2, row_cluster=2),
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
MULTIPROCESSORS = 8  # that native kernels are told of; a cluster of 8 still has them


class Launch(NamedTuple):
    """One problem on one kernel: `run` raises where the result is wrong."""

    name: str
    run: Callable[[], None]


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


def int8_gemm(run, config, m, n, k, group_size, dtype):
    operands, want = problem(m, n, k, group_size, dtype)
    out = torch.full(want.shape, float("nan"), dtype=want.dtype).cuda()
    inputs = [there(t) for t in operands]
    run(config, *inputs, out, group_size)
    torch.cuda.synchronize()
    assert_bit_equal(out.cpu(), want, str(config))


def native() -> Iterator[Launch]:
    for group_size in (256, 32):  # K beyond the ring
        for i, config in enumerate(NATIVE):
            sizes = (150 if config.policy == "large" else 20, 200, 1100, group_size, DTYPES[i % 3])
            run = partial(int8_gemm, sm90_launch.run, config, *sizes)
            yield Launch(f"int8_gemm {config} {sizes}", run)
    for config in NATIVE[1:3]:  # more tiles than CTAs, so that the ring goes on from tile to tile
        sizes = 600, 700, 300, 128, torch.bfloat16
        run = partial(int8_gemm, sm90_launch.run, config, *sizes)
        yield Launch(f"int8_gemm {config} {sizes}", run)


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


def native_fp8() -> Iterator[Launch]:
    """Of the second row and the staged ones more tiles than CTAs: rings go on from tile to tile,
    and results of one tile are on their way with the next's."""
    for turn, (config, kinds) in enumerate(FP8):
        sizes = (300 if config.policy == "large" else 20, 208 + 16 * (turn % 2), 1168)
        if turn == 1 or config.staged:
            sizes = (600, 592 if turn == 1 else 816, 912)
        for sums in kinds:
            run = partial(fp8_product, config, *sizes, sums, turn)
            yield Launch(f"fp8 {config} {sizes} sums {sums}", run)
    for turn, config in enumerate(SWIGLU):
        sizes = ((600, 400, 912), (150, 208, 1168), (20, 208, 1168), (20, 208, 1168))[turn]
        run = partial(fp8_swiglu_quantize, config, *sizes, turn)
        yield Launch(f"fp8_swiglu_quantize {config} {sizes}", run)


def nvfp4_product(config, turn):
    cap = 20 if config.inside else 300
    case = GroupCase("product", 5, 352, 1376, cap, turn % 2 == 0, turn % 3 != 0, values="exact")
    call = case.build("cuda", 7)
    out = call.arguments["out"]
    nvfp4.run(config, out, *call.operands)
    torch.cuda.synchronize()
    wrong = call.differs(0, out, call.expected[0])
    assert wrong is None, f"{config}: {wrong}"


def nvfp4_products() -> Iterator[Launch]:
    """Tails of M, K and tokens, experts without tokens, more tiles than CTAs."""
    for turn, config in enumerate(NVFP4):
        yield Launch(f"nvfp4_group_mm {config}", partial(nvfp4_product, config, turn))


def moe_layer(case, tile):
    call = case.build("cuda", 7)
    out = torch.full_like(call.expected[0], float("nan"), device="cuda")
    moe.run(moe.Config(tile, tile), *call.operands, out, case.group_size, call.interleaved)
    torch.cuda.synchronize()
    assert_bit_equal(out.cpu(), call.expected[0], f"{case} {tile}")


def moe_layers() -> Iterator[Launch]:
    """Tails of H, I, routes and groups, experts without routes, more tiles than CTAs."""
    for turn, (tile, group_size) in enumerate(MOE):
        layout = ("concatenated", "interleaved")[turn % 2]
        cases = [MoeCase("layer", 70, 3, 6, 2 * group_size + 32, 400, group_size, layout)]
        if turn in (1, 4):  # full tiles, and a plan by a cluster, of as many routes as that takes
            cases.append(MoeCase("many", 2100, 2, 5, 144, 80, group_size, layout))
        for case in cases:
            yield Launch(f"moe_ffn {case} {tile}", partial(moe_layer, case, tile))


def through_triton() -> Iterator[Launch]:
    gpu = torch.cuda.is_available()
    arch = arch_of(torch.device("cuda", 0)) if gpu else arch_named("sm_90")
    for m in (150, 8):
        sizes = m, 208, 560, 256, torch.bfloat16
        operands, want = problem(*sizes)
        names = ("a", "b", "scale_a", "scale_b", "bias", "out")
        asked = Problem.of(
            "int8_gemm", dict(zip(names, (*operands, want))), {"group_size": 256}, arch
        )
        families = {c.family: c for c in reversed(triton.candidates(asked))}
        for config in families.values():
            run = partial(int8_gemm, triton.run, config, *sizes)
            yield Launch(f"int8_gemm {config} {sizes}", run)
    for dtype in (torch.float32, torch.bfloat16):
        yield Launch(f"int8_quantize {dtype}", partial(int8_quantizer, dtype))
    # a whole tensor in one launch and in two, rows in registers and in two passes, blocks
    for shape in ((33, 700), (300, 700), (3, 20000)):
        for kind in FUNCTIONS:
            yield Launch(f"fp8_quantize {kind} {shape}", partial(fp8_quantizer, kind, shape))
    # used and unused rows, plans with ids outside every range, odd addresses
    for operator in ("nvfp4_quantize", "nvfp4_scatter", "nvfp4_scatter_fp4", "nvfp4_dequantize"):
        kernel = next(k for k in operator_named(operator).kernels if k.backend == "triton")
        for case in (case for case in CASES[operator]() if case.quick):
            yield Launch(f"{operator} {case.name}", partial(quick_case, case, kernel))


def int8_quantizer(dtype):
    x = torch.randn(33, 700).to(dtype)
    want = farro.quantize_int8_groups(x, 256, backend="reference")
    got = farro.quantize_int8_groups(x.cuda(), 256, backend="triton")
    for result, needed in zip(got, want):
        assert_bit_equal(result.cpu(), needed, "quantize_int8_groups")


def fp8_quantizer(kind, shape):
    x = torch.randn(shape).bfloat16()
    want = FUNCTIONS[kind](x, backend="reference")
    for result, needed in zip(FUNCTIONS[kind](x.cuda(), backend="triton"), want):
        assert_bit_equal(result.cpu(), needed, f"quantize_fp8_{kind}")


def quick_case(case, kernel):
    outcome = case.build("cuda", 7).check(kernel)
    assert outcome.status == "ok", f"{case.name}: {outcome.detail}"


@contextlib.contextmanager
def few_multiprocessors():
    """Within it torch tells of MULTIPROCESSORS, from which native kernels make their grids."""
    whole = torch.cuda.get_device_properties

    class Few:
        multi_processor_count = MULTIPROCESSORS

        def __init__(self, device):
            self.whole = whole(device)

        def __getattr__(self, name):
            return getattr(self.whole, name)

    torch.cuda.get_device_properties = Few
    try:
        yield
    finally:
        torch.cuda.get_device_properties = whole


def lacking(kind: str) -> str | None:
    """Why kernels of a kind do not run here, or None."""
    if kind == "Triton":
        return not_installed("triton")
    return not_installed("cuda") or arch_of(torch.device("cuda", 0)).lacks(frozenset({"wgmma"}))


def part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise ValueError(text)  # argparse tells it
    return int(number), int(parts)


def chosen(launches: list[Launch], number: int, parts: int) -> list[tuple[int, Launch]]:
    """One part, each launch with its place among all; neighbours, which are alike, are apart."""
    return list(enumerate(launches))[number - 1 :: parts]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N")
    options = parser.parse_args()
    families = {
        "native": [*native(), *native_fp8(), *nvfp4_products(), *moe_layers()],
        "Triton": [*through_triton()],
    }
    number, parts = options.part
    took = {}
    for kind, launches in families.items():
        mine = chosen(launches, number, parts)
        if options.list:
            print(*(f"{kind}: {launch.name}" for _, launch in mine), sep="\n")
            continue
        if why := lacking(kind):
            print(f"{kind} skipped: {why}")
            continue
        with few_multiprocessors() if kind == "native" else contextlib.nullcontext():
            for place, launch in mine:
                torch.manual_seed(7 + place)  # the same data in whichever part
                since = time.perf_counter()
                launch.run()
                took[launch.name] = time.perf_counter() - since
        print(f"{len(mine)} {kind} launches right")
    for name in sorted(took, key=took.get, reverse=True)[:3]:
        print(f"{took[name]:.1f} s: {name}")
    print(f"part {number}/{parts} ended")


if __name__ == "__main__":
    main()
