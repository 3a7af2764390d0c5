"""Calls of the native SM90 int8_gemm on a GPU: graphs, streams, addresses that come back, size."""

from __future__ import annotations

import pytest
import torch

import farro
from farro.ops.int8_gemm import sm90_launch

from .sm90_forced import (
    BF16,
    FP32,
    GROUP_SIZES,
    KERNEL,
    LARGE,
    NARROW,
    PAIRED,
    SMALL,
    SOME,
    compile_all,
    expected,
    forced,
    operands,
    padded,
    same,
    skip_without_it,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled():
    skip_without_it()
    compile_all(
        [sm90_launch.kernel_name(c, g, d) for c in SOME for g in GROUP_SIZES for d in (FP32, BF16)]
    )


def native(inputs, group_size, **keywords):
    a, b, scale_a, scale_b, bias = inputs
    return farro.int8_gemm(
        *(a, b, scale_a, scale_b), group_size=group_size, bias=bias, backend="cuda", **keywords
    )


def fresh(inputs, generator):
    """Other values in the same memory."""
    a, b, scale_a, scale_b, _ = inputs
    for codes in (a, b):
        new = torch.randint(-128, 128, codes.shape, generator=generator, dtype=torch.int8)
        codes.copy_(new)
    for scale in (scale_a, scale_b):
        scale.copy_(torch.randn(scale.shape, generator=generator))


@pytest.mark.parametrize("m", (1, 60, 700))
def test_graphs_see_new_values(m, generator):
    inputs = operands(m, 520, 1000, 128, generator)
    out = torch.empty(m, 520, device="cuda")
    for dtype in (FP32, BF16):
        native(inputs, 128, output_dtype=dtype)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, 128, output_dtype=FP32, out=out)
        own = native(inputs, 128, output_dtype=BF16)
    for _ in range(3):
        fresh(inputs, generator)
        for result in (out, own):
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        same(out, expected(inputs, 128), f"graph M={m}")
        same(own, expected(inputs, 128, BF16), f"graph M={m}, its own output")


def test_capture_of_addresses_never_seen(generator):
    """A launch may be prepared under capture, once its kernel is compiled."""
    native(operands(60, 520, 1000, 256, generator), 256, output_dtype=FP32)
    inputs = operands(60, 520, 1000, 256, generator)
    out = torch.full((60, 520), float("nan"), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, 256, output_dtype=FP32, out=out)
    assert out.isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    same(out, expected(inputs, 256), "captured first")


def test_capture_of_a_kernel_never_compiled(generator, monkeypatch):
    from farro.cuda import jit, launch

    monkeypatch.setattr(sm90_launch, "kernel_function", launch.kernel_function.__wrapped__)
    monkeypatch.setattr(jit, "load", jit.load.__wrapped__)
    inputs = operands(33, 200, 300, 64, generator)
    out = torch.zeros(33, 200, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=r"farro\.warmup"):
        KERNEL.function()(SMALL, *inputs, out, 64)
    same(forced(SMALL, inputs, 64), expected(inputs, 64), "after a refused capture")


def test_side_streams(generator):
    """Each launch waits for what its own stream did before, and for nothing else."""
    for config in SOME:
        for turn in range(4):
            inputs = operands(200, 256, 1024, 256, generator)
            spare = operands(200, 256, 1024, 256, generator)
            want = expected(spare, 256)
            torch.cuda.synchronize()
            stream = torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()
            out = torch.full((200, 256), float("nan"), device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                for to, given in zip(inputs[:4], spare[:4]):
                    to.copy_(given)
                KERNEL.function()(config, *inputs, out, 256)
            stream.synchronize()
            same(out, want, f"{config} turn {turn}")


def test_memory_that_comes_back_with_another_shape(generator):
    """torch gives freed memory out again: an address alone says nothing about what lies there."""
    problems = [(40, 256, 512), (20, 256, 1024), (40, 128, 1024), (300, 512, 256), (40, 256, 512)]
    met = {}
    repeated = 0
    for turn in range(40):
        m, n, k = problems[turn % len(problems)]
        group_size = GROUP_SIZES[turn % 3]
        # one block of memory for all problems, as the allocator would give it again and again
        inputs = operands(m, n, k, group_size, generator)
        out = native(inputs, group_size, output_dtype=FP32)
        for tensor in (*inputs[:4], out):
            seen = met.setdefault(tensor.data_ptr(), set())
            seen.add((tuple(tensor.shape), tensor.stride()))
            repeated += len(seen) > 1
        same(out, expected(inputs, group_size), f"turn {turn}: {m}x{n}x{k} G{group_size}")
        del inputs, out, tensor
    assert repeated > 10, "the allocator gave no memory again; the test tells nothing"


def test_one_address_for_every_shape(generator):
    """The same, made certain: all operands of all problems begin at the same five addresses."""
    codes = [torch.empty(2**20, dtype=torch.int8, device="cuda") for _ in range(2)]
    floats = [torch.empty(2**18, device="cuda") for _ in range(3)]
    for turn in range(3):
        for m, n, k in (
            (40, 256, 512),
            (20, 256, 1024),
            (512, 128, 1024),
            (17, 77, 208),
            (1, 9, 16),
        ):
            for group_size in GROUP_SIZES:
                made = operands(m, n, k, group_size, generator)
                a = codes[0][: m * k].view(m, k).copy_(made[0])
                b = codes[1][: n * k].view(n, k).copy_(made[1].T).T
                groups = made[2].shape[1]
                scale_a = floats[0][: m * groups].view(m, groups).copy_(made[2])
                scale_b = floats[1][: n * groups].view(groups, n).copy_(made[3])
                out = floats[2][: m * n].view(m, n).fill_(float("nan"))
                inputs = (a, b, scale_a, scale_b, None)
                native(inputs, group_size, output_dtype=FP32, out=out)
                same(out, expected(inputs, group_size), f"{turn}: {m}x{n}x{k} G{group_size}")


def test_thousands_of_addresses(generator):
    """More than the caches of launches and of descriptors hold."""
    pieces, m, n, k = 4500, 4, 64, 64
    a = padded(pieces * m, k, generator)
    weight = padded(n, k, generator)
    scale_a = torch.randn(pieces * m, 1, generator=generator).cuda()
    scale_b = torch.randn(1, n, generator=generator).cuda()
    want = expected((a, weight.T, scale_a, scale_b, None), 64)
    out = torch.full((pieces * m, n), float("nan"), device="cuda")
    for turn in range(2):
        for i in range(pieces):
            rows = slice(i * m, i * m + m)
            inputs = (a[rows], weight.T, scale_a[rows], scale_b, None)
            native(inputs, 64, output_dtype=FP32, out=out[rows])
        same(out, want, f"turn {turn}")
        out.fill_(float("nan"))


def test_threads(generator):
    """Launches from several threads, each with its stream; the caches are shared."""
    from concurrent.futures import ThreadPoolExecutor

    problems = [operands(m, 256, 512, 256, generator) for m in (5, 30, 130, 300)]
    wants = [expected(inputs, 256) for inputs in problems]
    torch.cuda.synchronize()
    device = torch.cuda.current_device()  # this thread's: the others begin with the first GPU

    def work(which):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for _ in range(100):
                out = native(problems[which], 256, output_dtype=FP32)
        stream.synchronize()
        return out

    with ThreadPoolExecutor(4) as pool:
        for which, out in enumerate(pool.map(work, range(4))):
            same(out, wants[which], f"thread {which}")


def test_outputs_past_four_billion_elements(generator):
    """Element offsets pass 2^31 and 2^32 (rows times columns)."""
    m, n, k = 32769 * 2, 65536, 64
    need = m * n * 2 + m * k + n * k
    if torch.cuda.mem_get_info()[0] < need + 2**30:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    seed = int(torch.randint(2**31, (1,), generator=generator))
    random = torch.Generator("cuda").manual_seed(seed)
    a = torch.randint(-128, 128, (m, k), generator=random, device="cuda", dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), generator=random, device="cuda", dtype=torch.int8)
    scale_a = torch.rand(m, 1, generator=random, device="cuda")
    scale_b = torch.rand(1, n, generator=random, device="cuda")
    out = torch.full((m, n), float("nan"), dtype=BF16, device="cuda")
    rows = torch.tensor([0, 255, 256, 32767, 32768, 32769, 65535, 65536, m - 1], device="cuda")
    few = (a[rows].contiguous(), weight.T, scale_a[rows].contiguous(), scale_b, None)
    want = expected(few, 64, BF16)
    for config in (LARGE, PAIRED):
        out.fill_(float("nan"))
        KERNEL.function()(config, a, weight.T, scale_a, scale_b, None, out, 64)
        same(out[rows], want, config)
        assert not out[-1000:].isnan().any() and not out[:1000].isnan().any()


def test_strides_past_two_billion(generator):
    """Leading strides of every operand beyond 2^31 elements."""
    far = 2**31 + 16
    if torch.cuda.mem_get_info()[0] < 6 * far:
        pytest.skip("needs 13 GiB of GPU memory")
    inputs = operands(2, 2, 500, 64, generator)
    want = expected(inputs, 64)
    groups = inputs[2].shape[1]
    memory = torch.empty(far + 1024, dtype=torch.int8, device="cuda")
    a = memory.as_strided((2, 500), (far, 1)).copy_(inputs[0])
    for config in (NARROW, SMALL):
        same(forced(config, (a, *inputs[1:]), 64), want, f"{config} a")
    b = memory.as_strided((2, 500), (far, 1)).copy_(inputs[1].T).T
    for config in (NARROW, SMALL):
        same(forced(config, (inputs[0], b, *inputs[2:]), 64), want, f"{config} b")
    del a, b, memory
    floats = torch.empty(far + 1024, device="cuda")
    for turned in (False, True):
        scale_a = floats.as_strided((2, groups), (far, 1)).copy_(inputs[2])
        for config in (NARROW, SMALL):
            given = (*inputs[:2], scale_a, inputs[3], None)
            same(forced(config, given, 64), want, f"{config} scale_a")
        scale_b = floats.as_strided((groups, 2), (1, far)).copy_(inputs[3])
        for config in (NARROW, SMALL):
            given = (*inputs[:3], scale_b, None)
            same(forced(config, given, 64), want, f"{config} scale_b")
        out = floats.as_strided((2, 2), (1, far) if turned else (far, 1))
        for config in (NARROW, SMALL):
            same(forced(config, inputs, 64, out=out), want, f"{config} out turned {turned}")
