"""The INT8 kernels of Triton past 2^31 elements, on a GPU: the last rows against the reference's.

Scenario 1: offsets that wrap, silently, in outputs, operands, scales and quantized rows.
"""

from __future__ import annotations

import pytest
import torch

import farro
from farro.ops.int8_gemm import reference, triton, triton_configs
from farro.ops.int8_gemm.triton import Config
from farro.problem import Problem
from farro.testing import assert_bit_equal

pytestmark = pytest.mark.gpu
FAR = 2**31 + 16  # a stride that the copy engine takes
BF16 = torch.bfloat16
SIDES = [(family, swap) for family in triton_configs.FAMILIES for swap in (False, True)]


def room(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory")


@pytest.fixture(autouse=True)
def memory_goes_back():
    """Each test takes gigabytes, in blocks of its own sizes."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def on_the_gpu(generator):
    seed = int(torch.randint(2**31, (1,), generator=generator))
    return torch.Generator("cuda").manual_seed(seed)


def small_tile(family, swap):
    """One of each family, for groups of 64, that compiles quickly."""
    if family == "ring":
        return Config("ring", swap, 128, 64, 64, 8, 8, 4)
    return Config(family, swap, 128, 64, 64, 8, 4, 2)


def on(tensors, group_size):
    names = ("a", "b", "scale_a", "scale_b", "bias", "out")
    return Problem.of("int8_gemm", dict(zip(names, tensors)), {"group_size": group_size})


def legal(config, problem):
    """Skip where the device or this Triton lacks the family; nothing else may refuse it."""
    lacks = {
        "pointers": False,
        "descriptors": "tma" not in problem.arch.features,
        "specialized": "wgmma" not in problem.arch.features
        or not triton_configs.triton_specializes(),
        "ring": "wgmma" not in problem.arch.features,
    }[config.family]
    reason = triton.refuses(config, problem)
    if lacks:
        assert reason is not None
        pytest.skip(reason)
    assert reason is None


def codes(rows, k, generator):
    return torch.randint(-128, 128, (rows, k), generator=generator, device="cuda", dtype=torch.int8)


@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("m", (32769, 65537))
@pytest.mark.parametrize("family, swap", SIDES)
def test_scenario_01_products_past_two_billion_elements(family, swap, m, turned, on_the_gpu):
    """Element offsets of the result pass 2^31, and 2^32 with the larger m."""
    n, k = 65536, 16
    room(12)
    a, weight = codes(m, k, on_the_gpu), codes(n, k, on_the_gpu)
    scale_a = torch.rand(m, 1, generator=on_the_gpu, device="cuda")
    scale_b = torch.rand(1, n, generator=on_the_gpu, device="cuda")
    out = torch.empty((n, m) if turned else (m, n), dtype=BF16, device="cuda").fill_(float("nan"))
    out = out.T if turned else out
    config = small_tile(family, swap)
    legal(config, on((a, weight.T, scale_a, scale_b, None, out), 64))
    triton.run(config, a, weight.T, scale_a, scale_b, None, out, 64)
    rows = torch.tensor([0, 1, 127, 128, 32766, 32767, 32768, m - 2, m - 1], device="cuda")
    few = (a[rows].contiguous(), weight.T, scale_a[rows].contiguous(), scale_b, None)
    want = torch.empty(len(rows), n, dtype=BF16, device="cuda")
    reference.run(None, *few, want, 64)
    assert_bit_equal(out[rows], want)
    for part in (out[:1000], out[-1000:], out[:, -1000:]):
        assert not part.isnan().any()


def test_scenario_01_the_choice_of_a_call(on_the_gpu):
    """As above, in the configuration that a call takes by itself."""
    m, n, k = 32769, 65536, 16
    room(12)
    a, weight = codes(m, k, on_the_gpu), codes(n, k, on_the_gpu)
    scale_a = torch.rand(m, 1, generator=on_the_gpu, device="cuda")
    scale_b = torch.rand(1, n, generator=on_the_gpu, device="cuda")
    out = torch.empty(m, n, dtype=BF16, device="cuda").fill_(float("nan"))
    keywords = {"group_size": 256, "output_dtype": BF16}
    farro.int8_gemm(a, weight.T, scale_a, scale_b, backend="triton", out=out, **keywords)
    last = a[-9:].contiguous(), weight.T, scale_a[-9:].contiguous(), scale_b
    assert_bit_equal(out[-9:], farro.int8_gemm(*last, backend="reference", **keywords))
    assert not out[:1000].isnan().any()


def far_operand(operand, made, groups):
    """The arguments with one of them in memory of its own, its leading stride above 2^31."""
    a, b, scale_a, scale_b, bias, out = made
    kind = torch.int8 if operand in ("a", "b") else torch.float32
    memory = torch.empty(FAR + 1024, dtype=kind, device=a.device)
    k = a.shape[1]
    if operand == "a":
        a = memory.as_strided((2, k), (FAR, 1)).copy_(a)
    elif operand == "b":
        b = memory.as_strided((2, k), (FAR, 1)).copy_(b.T).T
    elif operand == "scale_a":
        scale_a = memory.as_strided((2, groups), (FAR, 1)).copy_(scale_a)
    elif operand == "scale_a by groups":
        scale_a = memory.as_strided((2, 2), (1, FAR)).copy_(scale_a)
    elif operand == "scale_b":
        scale_b = memory.as_strided((groups, 2), (1, FAR)).copy_(scale_b)
    elif operand == "scale_b by groups":
        scale_b = memory.as_strided((2, 2), (FAR, 1)).copy_(scale_b)
    elif operand == "bias":
        bias = memory.as_strided((2,), (FAR,)).copy_(bias)
    else:
        strides = (1, FAR) if operand == "out turned" else (FAR, 1)
        out = memory.as_strided((2, 2), strides).fill_(float("nan"))
    return a, b, scale_a, scale_b, bias, out


FAR_OPERANDS = ("a", "b", "scale_a", "scale_b", "bias", "out", "out turned")
BY_GROUPS = ("scale_a by groups", "scale_b by groups")


OPERANDS = FAR_OPERANDS + BY_GROUPS
EVERY_OPERAND = [(*side, operand) for side in SIDES for operand in OPERANDS]
# each operand on two sides, each side with two operands or more
USUAL = [c for c in EVERY_OPERAND if (SIDES.index(c[:2]) + OPERANDS.index(c[2])) % 4 == 0]


@pytest.mark.parametrize(
    "family, swap, operand",
    [c if c in USUAL else pytest.param(*c, marks=pytest.mark.slow) for c in EVERY_OPERAND],
)
def test_scenario_01_products_of_strides_past_two_billion(family, swap, operand, generator):
    room(12)
    k = 100 if operand in BY_GROUPS else 500
    groups = -(-k // 64)
    made = (
        torch.randint(-128, 128, (2, k), generator=generator, dtype=torch.int8),
        torch.randint(-128, 128, (2, k), generator=generator, dtype=torch.int8).T,
        torch.randn(2, groups, generator=generator),
        torch.randn(groups, 2, generator=generator),
        torch.randn(2, generator=generator),
    )
    a, b, *rest = (tensor.cuda() for tensor in made)
    if family != "pointers":  # rows of 500 bytes are none that a descriptor takes
        a, b = padded(a), padded(b.T).T
    out = torch.full((2, 2), float("nan"), device="cuda")
    want = torch.empty(2, 2, device="cuda")
    reference.run(None, a, b, *rest, want, 64)
    tensors = far_operand(operand, (a, b, *rest, out), groups)
    config = small_tile(family, swap)
    legal(config, on(tensors, 64))
    triton.run(config, *tensors, 64)
    assert_bit_equal(tensors[-1].clone(), want)


def padded(matrix):
    """The same rows, 16-byte aligned."""
    wide = torch.zeros(matrix.shape[0], -(-matrix.shape[1] // 16) * 16, dtype=matrix.dtype)
    return wide.to(matrix.device)[:, : matrix.shape[1]].copy_(matrix)


@pytest.mark.parametrize("operand", ("a", "b"))
@pytest.mark.parametrize("swap", (False, True))
def test_scenario_01_products_whose_steps_of_k_are_past_two_billion(swap, operand, generator):
    """Only pointers read such an operand."""
    room(12)
    a = torch.randint(-128, 128, (2, 4), generator=generator, dtype=torch.int8).cuda()
    b = torch.randint(-128, 128, (4, 2), generator=generator, dtype=torch.int8).cuda()
    scale_a = torch.randn(2, 1, generator=generator).cuda()
    scale_b = torch.randn(1, 2, generator=generator).cuda()
    out = torch.full((2, 2), float("nan"), device="cuda")
    want = torch.empty(2, 2, device="cuda")
    reference.run(None, a, b, scale_a, scale_b, None, want, 64)
    memory = torch.empty(3 * FAR + 1024, dtype=torch.int8, device="cuda")
    if operand == "a":
        a = memory.as_strided((2, 4), (1, FAR)).copy_(a)
    else:
        b = memory.as_strided((4, 2), (FAR, 1)).copy_(b)
    config = small_tile("pointers", swap)
    legal(config, on((a, b, scale_a, scale_b, None, out), 64))
    triton.run(config, a, b, scale_a, scale_b, None, out, 64)
    assert_bit_equal(out, want)


# --- the quantizer -------------------------------------------------------------------------------


def numbers(rows, k, generator):
    return torch.empty(rows, k, dtype=BF16, device="cuda").normal_(generator=generator)


def quantized(x, group_size):
    return farro.quantize_int8_groups(x, group_size, backend="triton")


def same_rows(result, x, rows, group_size):
    few = x[torch.tensor(rows, device="cuda")].contiguous()
    want = farro.quantize_int8_groups(few, group_size, backend="reference")
    for got, right in zip(result, want):
        assert_bit_equal(got[torch.tensor(rows, device="cuda")], right)


@pytest.mark.parametrize("group_size", (32, 256))
@pytest.mark.parametrize("layout", ("contiguous", "columns", "transposed", "two strides"))
def test_scenario_01_rows_past_two_billion_elements(layout, group_size, on_the_gpu):
    room(24)
    m, k = 65538, 32800  # element 2^31 is 66 rows before the end; 256 does not divide a row
    if layout == "contiguous":
        x = numbers(m, k, on_the_gpu)
    elif layout == "columns":
        x = numbers(m, 2 * k, on_the_gpu)[:, ::2]
    elif layout == "transposed":
        x = numbers(k, m, on_the_gpu).T
    else:
        x = numbers(m // 2 * 3, k, on_the_gpu).view(m // 2, 3, k)[:, 1:]
    q, scale = quantized(x, group_size)
    found = q.view(m, k), scale.view(m, -1)
    rows = [0, 1, m // 2 - 1, m // 2, m - 70, m - 67, m - 66, m - 65, m - 2, m - 1]
    same_rows(found, x.reshape(m, k), rows, group_size)


@pytest.mark.parametrize("strides", ((FAR, 1), (1, FAR)))
def test_scenario_01_rows_of_strides_past_two_billion(strides, generator):
    room(12)
    x = torch.randn((2, 2), generator=generator).to("cuda", BF16)
    far = torch.empty(FAR + 1024, dtype=BF16, device="cuda").as_strided((2, 2), strides).copy_(x)
    same_rows(quantized(far, 32), x, [0, 1], 32)


@pytest.mark.parametrize("group_size", (32, 64, 256))
@pytest.mark.parametrize("k", (2**30, 2**30 + 40, 2**31 - 65537))
def test_scenario_01_a_row_of_more_groups_than_a_grid_is_wide(k, group_size, on_the_gpu):
    room(12)
    x = numbers(1, k, on_the_gpu)
    q, scale = quantized(x, group_size)
    for group in (0, k // group_size // 2, k // group_size - 1000):
        end = k if group > k // group_size // 2 else (group + 500) * group_size
        start = group * group_size
        few = x[:, start:end].contiguous()
        want_q, want_scale = farro.quantize_int8_groups(few, group_size, backend="reference")
        assert_bit_equal(q[:, start:end].contiguous(), want_q)
        assert_bit_equal(scale[:, group : group + want_scale.shape[1]].contiguous(), want_scale)
