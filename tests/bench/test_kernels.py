"""The benchmark's own Triton kernels, in Triton's interpreter and through its compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import torch
from farro.bench import peers
from farro.bench.case import Options
from farro.bench.plain_kernel import plain_gemm
from farro.bench.read_kernel import read_blocks, read_boxes
from farro.ops.int8_gemm import reference
from farro.formats.int8_group import quantize
from triton.tools.tensor_descriptor import TensorDescriptor

m, n, k, group = 21, 37, 100, 32
(a, sa), (b, sb) = (quantize(torch.randn(r, k), group) for r in (m, n))
sb = sb.T.contiguous()
out, want = torch.full((m, n), float("nan")), torch.empty(m, n)
plain_gemm[(2, 3)](a, b, sa, sb, out, m, n, k, sa.shape[1], GROUP=group, BM=16, BN=16)
reference.run(None, a, b.T, sa, sb, None, want, group)
torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)

from farro.bench import adapter, quantized_layer_peers

sizes = {"m": 9, "n": 64, "k": 96, "e": 3, "all": 6, "topk": 2}
case = adapter("moe_ffn").build(sizes, Options(torch.device("cpu"), 64))
given = case.peers.__self__
dense = lambda: (given.gate_up.bf16(), given.down.bf16())
codes = (given.codes, given.scale)
codes += (given.gate_up.codes, given.gate_up.scale, given.down.codes, given.down.scale)
x = torch.empty(9, 96, dtype=torch.bfloat16)
layer = quantized_layer_peers.Layer(x, given.ids, given.weights, dense, "key", codes)
result = quantized_layer_peers._plain_layer(64, layer, (16, 32, 4, 2))()
assert (result.double() - case.truth()).norm() < 0.03 * case.truth().norm()

for count in (5 * 128 + 7, 100, 1024):
    source = torch.randint(-1000, 1000, (count,), dtype=torch.int32)
    sums = torch.full((3,), -1, dtype=torch.int32)
    read_blocks[(3,)](source, sums, count, BLOCK=128)
    blocks = torch.nn.functional.pad(source, (0, -count % 128)).view(-1, 128).tolist()
    for program in range(3):
        total = [0] * 128
        for block in blocks[program::3]:
            total = [x ^ y for x, y in zip(total, block)]
        assert sums[program] == sum(total), (count, program)

source = torch.randint(-1000, 1000, (128, 64), dtype=torch.int32)
view = TensorDescriptor(source, [128, 64], [64, 1], [16, 64])
sums = torch.full((3,), -1, dtype=torch.int32)
read_boxes[(3,)](view, sums, 128, ROWS=16, WIDTH=64, STAGES=2)
for program in range(3):
    total = torch.zeros(16, 64, dtype=torch.int32)
    for box in source.view(8, 16, 64)[program::3]:
        total = total ^ box
    assert sums[program] == total.sum()
print("ok")
"""


def test_kernels_compute_what_they_say_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "ok"


def compiled(kernel, signature, constants, capability, warps):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = list(signature)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*"
        or name == "count"  # the harness reads whole multiples of 64 KiB
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


@pytest.mark.parametrize("capability", [80, 90])
def test_blocks_are_read_by_16_byte_loads(capability):
    from farro.bench.read_kernel import read_blocks

    signature = {"source": "*i32", "sums": "*i32", "count": "i32", "BLOCK": "constexpr"}
    ptx = compiled(read_blocks, signature, {"BLOCK": 8192}, capability, 8).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    assert len(loads) >= 16 and all(".v4.b32" in line for line in loads)


def test_boxes_are_copied_ahead_by_the_bulk_engine():
    from farro.bench.read_kernel import read_boxes

    signature = {"source": "tensordesc<i32[32,64]>", "sums": "*i32", "rows": "i32"}
    constants = {"ROWS": 32, "WIDTH": 64, "STAGES": 4}
    signature |= {name: "constexpr" for name in constants}
    kernel = compiled(read_boxes, signature, constants, 90, 4)
    assert kernel.asm["ptx"].count("cp.async.bulk.tensor") >= 3  # a prologue fills the stages
    assert kernel.metadata.shared >= 3 * 32 * 64 * 4


@pytest.mark.parametrize("capability", [80, 90])
def test_the_plain_kernel_multiplies_on_tensor_cores(capability):
    from farro.bench.plain_kernel import plain_gemm

    pointers = {"a": "*i8", "b": "*i8", "scale_a": "*fp32", "scale_b": "*fp32", "out": "*bf16"}
    constants = {"GROUP": 128, "BM": 64, "BN": 128}
    signature = pointers | {name: "i32" for name in ("m", "n", "k", "groups")}
    signature |= {name: "constexpr" for name in constants}
    ptx = compiled(plain_gemm, signature, constants, capability, 4).asm["ptx"]
    assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx
