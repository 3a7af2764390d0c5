"""What the native SM90 int8_gemm hands to the driver, without a GPU, and when it does so again."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farro.ops.int8_gemm import KERNELS, sm90, sm90_launch
from farro.ops.int8_gemm.sm90 import Config
from farro.testing import assert_bit_equal

LARGE, SMALL = Config("large", 256, 112, 4, raster=16), Config("small", 16, 64, 8, 2, ahead=True)


@pytest.fixture
def driver(monkeypatch):
    """Stands in for the driver: descriptors are their arguments, launches remember theirs."""

    class Launch:
        def __init__(self, *arguments):
            names = ("device", "function", "grid", "threads", "shared", "cluster", "parameters")
            self.__dict__.update(zip(names, arguments))
            self.fired = 0

        def on_current_stream(self):
            self.fired += 1

    monkeypatch.setattr(sm90_launch, "Launch", Launch)
    monkeypatch.setattr(sm90_launch, "kernel_function", lambda *what: what)
    monkeypatch.setattr(sm90_launch.tensor_map, "encode", lambda *what: what)
    count = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: count)


def buffer(count, dtype, offset=0):
    """`count` elements that begin `offset` elements past a 16-byte boundary."""
    size = dtype.itemsize
    whole = torch.empty((count + offset) * size + 16, dtype=torch.uint8)
    start = -whole.data_ptr() % 16 + offset * size
    return whole[start : start + count * size].view(dtype)


def matrix(rows, columns, strides, offset, dtype=torch.float32):
    count = (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1 if rows * columns else 1
    return buffer(count, dtype, offset).as_strided((rows, columns), strides)


def prepared(config, m, n, k, group_size, scale_a, scale_b, out, bias=None):
    a = matrix(m, k, (-(-k // 16) * 16, 1), 0, torch.int8)
    b = matrix(n, k, (-(-k // 16) * 16, 1), 0, torch.int8).T
    return sm90_launch._prepare(config, a, b, scale_a, scale_b, bias, out, group_size), a, b


strides = st.tuples(st.integers(0, 9), st.sampled_from([1, 1, 1, 2, 5]), st.booleans())


def laid(rows, columns, how, offset, dtype=torch.float32):
    gap, step, turned = how
    if turned:
        return matrix(rows, columns, (step, step * rows + gap), offset, dtype)
    return matrix(rows, columns, (step * columns + gap, step), offset, dtype)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 700)),
    group_size=st.sampled_from([32, 64, 128, 256]),
    layouts=st.tuples(strides, strides, strides),
    offsets=st.tuples(*[st.integers(0, 5)] * 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_vectors_only_where_memory_allows(driver, sizes, group_size, layouts, offsets, dtype):
    """Each address that a kernel would use as a vector is aligned, and its parts adjoin."""
    m, n, k = sizes
    groups = -(-k // group_size)
    scale_a = laid(m, groups, layouts[0], offsets[0])
    scale_b = laid(groups, n, layouts[1], offsets[1])
    out = laid(m, n, layouts[2], offsets[2], dtype)
    p = prepared(LARGE, m, n, k, group_size, scale_a, scale_b, out)[0].parameters[-1]
    assert p.scale_a_vector in (1, 2, 4) and p.scale_b_vector in (1, 4) and p.vector in (0, 1)
    if groups > 1 and p.scale_a_vector > 1:  # whole vectors of groups are read so, or half of four
        assert p.scale_a_group == 1
        for row in range(m):
            for width in {2, p.scale_a_vector}:
                for g in range(0, groups - width + 1, width):
                    assert (p.scale_a + 4 * (row * p.scale_a_row + g)) % (4 * width) == 0
    if p.scale_b_vector > 1:
        assert n % 4 == 0 and p.scale_b_column == 1
        for g in range(groups):
            assert all(
                (p.scale_b + 4 * (g * p.scale_b_group + c)) % 16 == 0 for c in range(0, n, 4)
            )
    if p.vector:
        assert p.out_column == 1
        for row in range(m):
            assert (p.out + row * p.out_row * out.element_size()) % 16 == 0


def test_plain_operands_use_vectors(driver):
    """Otherwise the test above would pass with none."""
    scale_a, scale_b = matrix(64, 16, (16, 1), 0), matrix(16, 64, (64, 1), 0)
    out = matrix(64, 64, (64, 1), 0, torch.bfloat16)
    p = prepared(LARGE, 64, 64, 4096, 256, scale_a, scale_b, out)[0].parameters[-1]
    assert (p.scale_a_vector, p.scale_b_vector, p.vector) == (4, 4, 1)
    p = prepared(LARGE, 64, 64, 1408, 256, matrix(64, 6, (6, 1), 0), scale_b[:6], out)[0]
    assert p.parameters[-1].scale_a_vector == 2


def test_parameters_and_maps(driver):
    m, n, k = 300, 200, 1001
    scale_a, scale_b = matrix(m, 4, (9, 2), 0), matrix(4, n, (1, 4), 0)
    out, bias = matrix(m, n, (3, 1000), 0, torch.float16), matrix(1, n, (0, 3), 0)[0].half()
    for config in (LARGE, SMALL):
        launch, a, b = prepared(config, m, n, k, 256, scale_a, scale_b, out, bias)
        *maps, p = launch.parameters
        activations = (a.data_ptr(), m, k, 1008, sm90_launch.tile_rows(config, m), 128)
        weights = (b.data_ptr(), n, k, 1008, config.columns, 128)
        expected = [activations, weights] if config is LARGE else [weights, activations]
        assert maps == expected
        pointers = (scale_a.data_ptr(), scale_b.data_ptr(), bias.data_ptr(), out.data_ptr())
        assert (p.scale_a, p.scale_b, p.bias, p.out) == pointers
        assert (p.scale_a_row, p.scale_a_group, p.scale_b_group, p.scale_b_column) == (9, 2, 1, 4)
        assert (p.out_row, p.out_column, p.bias_stride) == (3, 1000, bias.stride(0))
        assert (p.m, p.n, p.k, p.bias_kind) == (m, n, k, 2)
        assert launch.cluster == 1 and launch.threads == 32 * config.warps
        assert launch.shared == sm90.shared_bytes(config, 256)
    assert launch.grid == (4, 19, 1)
    launch, *_ = prepared(LARGE, m, n, k, 256, scale_a, scale_b, out)
    assert launch.grid == (2 * 2, 1, 1) and launch.parameters[-1].bias_kind == 0
    assert not launch.parameters[-1].bias and launch.parameters[-1].raster == 16


def test_a_single_row_gets_a_pitch_that_the_copy_engine_takes(driver):
    a, b = matrix(1, 100, (7, 1), 0, torch.int8), matrix(1, 100, (3, 1), 0, torch.int8).T
    scale = matrix(1, 1, (1, 1), 0)
    launch = sm90_launch._prepare(SMALL, a, b, scale, scale, None, matrix(1, 1, (5, 3), 0), 256)
    for _, rows, columns, pitch, *_ in launch.parameters[:2]:
        assert (rows, columns, pitch) == (1, 100, 112)


def test_large_strides_reach_the_kernel_whole(driver):
    meta = torch.empty(1, device="meta")
    far = 2**33 + 16
    out = meta.as_strided((9, 4), (far, 2**31))
    scale_a, scale_b = meta.as_strided((9, 1), (far, 1)), meta.as_strided((1, 4), (1, far))
    a, b = meta.char().as_strided((9, 64), (far, 1)), meta.char().as_strided((64, 4), (1, far))
    launch = sm90_launch._prepare(LARGE, a, b, scale_a, scale_b, None, out, 64)
    p = launch.parameters[-1]
    assert (p.out_row, p.out_column, p.scale_a_row, p.scale_b_column) == (far, 2**31, far, far)
    assert [m[3] for m in launch.parameters[:2]] == [far, far]


# --- the cache of prepared launches --------------------------------------------------------------


def test_a_launch_for_each_set_of_addresses(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(sm90_launch, "_LAUNCHES", {})
    monkeypatch.setattr(sm90_launch, "_LAUNCH_LIMIT", 100)
    a, b = matrix(4, 64, (64, 1), 0, torch.int8), matrix(8, 64, (64, 1), 0, torch.int8).T
    scale_a, scale_b = matrix(4, 1, (1, 1), 0), matrix(1, 8, (8, 1), 0)
    outs = torch.empty(120, 4, 8)
    bound = sm90_launch.bind(SMALL)
    for out in outs:
        for _ in range(2):
            bound(a, b, scale_a, scale_b, None, out, 256)
        newest = next(reversed(sm90_launch._LAUNCHES.values()))
        assert newest.fired == 2 and newest.parameters[-1].out == out.data_ptr()
    assert len(sm90_launch._LAUNCHES) == 100  # bounded: the oldest left
    bound(a, b, scale_a, scale_b, None, outs[0], 256)
    newest = next(reversed(sm90_launch._LAUNCHES.values()))
    assert newest.fired == 1 and newest.parameters[-1].out == outs[0].data_ptr()
    assert len(sm90_launch._LAUNCHES) == 100
    # another problem with the same addresses has a launch of its own, within the same bound
    sm90_launch.bind(LARGE)(a, b, scale_a, scale_b, None, outs[0], 256)
    assert (
        next(reversed(sm90_launch._LAUNCHES.values())).fired == 1
        and len(sm90_launch._LAUNCHES) == 100
    )
    # every operand counts
    others = [t.clone() for t in (a, scale_a, scale_b)]
    before = set(sm90_launch._LAUNCHES)
    bound(others[0], b, scale_a, scale_b, None, outs[-1], 256)
    bound(a, b, others[1], scale_b, None, outs[-1], 256)
    bound(a, b, scale_a, others[2], None, outs[-1], 256)
    bound(a, b, scale_a, scale_b, torch.zeros(8), outs[-1], 256)
    assert len(set(sm90_launch._LAUNCHES) - before) == 4


def test_nothing_to_sum_needs_no_kernel():
    """K = 0 gives +0 or the bias; +0 + -0 is +0, as the reference's sum is."""
    bound = sm90_launch.bind(SMALL)
    a, b = torch.empty(3, 0, dtype=torch.int8), torch.empty(0, 5, dtype=torch.int8)
    scales = torch.empty(3, 0), torch.empty(0, 5)
    bias = torch.tensor([1.0, -0.0, 0.0, float("nan"), 3.00001])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for added in (None, bias, bias.half(), bias.bfloat16()):
            out = torch.full((3, 10), float("nan"), dtype=dtype)[:, ::2]
            want = torch.empty(3, 5, dtype=dtype)
            KERNELS[-1].function()(None, a, b, *scales, added, want, 256)
            bound(a, b, *scales, added, out, 256)
            assert_bit_equal(out, want, f"{dtype} {None if added is None else added.dtype}")


def test_nothing_to_write_needs_no_kernel():
    bound = sm90_launch.bind(SMALL)
    before = dict(sm90_launch._LAUNCHES)
    a, b = torch.empty(0, 64, dtype=torch.int8), torch.empty(64, 5, dtype=torch.int8)
    bound(a, b, torch.empty(0, 1), torch.empty(1, 5), None, torch.empty(0, 5), 256)
    assert before == sm90_launch._LAUNCHES
