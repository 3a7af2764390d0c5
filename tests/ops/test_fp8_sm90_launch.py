"""What the native FP8 products of SM90a hand to the driver, without a GPU, and when again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farro.cuda import jit
from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, GELU, RESIDUAL, Config, Kind
from farro.formats.fp8 import E4M3, blocks
from farro.ops.fp8_blockwise_linear import reference
from farro.ops.fp8_blockwise_linear import sm90 as blockwise
from farro.testing import assert_bit_equal

from .native_facts import compiles, fields_of, laid, matrix, offsets_of, pretend, sizes_of

LARGE, SMALL = Config("large", 256, 96, 4, raster=16), Config("small", 16, 64, 8, 2)
SCALED, PROMOTED, FAST = Kind(True), Kind(False), Kind(False, True)
BF16 = torch.bfloat16


@pytest.fixture
def driver(monkeypatch):
    pretend(monkeypatch, gemm)


def codes(rows, k, pitch=None):
    return matrix(rows, k, (pitch or k, 1), dtype=E4M3)


def prepared(config, kind, m, n, k, out, **more):
    x, weight = codes(m, k), codes(n, k)
    return gemm.prepare(config, kind, x, weight, out, **more), x, weight


strides = st.tuples(st.integers(0, 9), st.sampled_from([1, 1, 1, 2, 5]), st.booleans())


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 70)),
    layouts=st.tuples(strides, strides, strides),
    offsets=st.tuples(*[st.integers(0, 9)] * 3),
)
def test_vectors_only_where_memory_allows(driver, sizes, layouts, offsets):
    """Each address that a kernel would use as a vector is aligned, and its parts adjoin."""
    m, n, k = sizes[0], 16 * sizes[1], 16 * sizes[2]
    scale = laid(m, blocks(k), layouts[0], offsets[0])
    out, residual = (laid(m, n, layouts[i], offsets[i], BF16) for i in (1, 2))
    more = {"input_scale": scale, "weight_scale": matrix(blocks(n), blocks(k))}
    launch, *_ = prepared(LARGE, SCALED, m, n, k, out, residual=residual, **more)
    p = launch.parameters[-1]
    assert p.input_scale_vector in (0, 1, 2)
    if p.input_scale_vector == 1:  # whole fours of a row's blocks are read so
        for row in range(m):
            for b in range(0, blocks(k) - 3, 4):
                assert p.input_scale_block == 1
                assert (p.input_scale + 4 * (row * p.input_scale_row + b)) % 16 == 0
    if p.input_scale_vector == 2:  # and all fours of a block's rows
        assert m % 4 == 0 and p.input_scale_row == 1
        for b in range(blocks(k)):
            for row in range(0, m, 4):
                assert (p.input_scale + 4 * (row + b * p.input_scale_block)) % 16 == 0
    for name, tensor in (("out", out), ("residual", residual)):
        vector = getattr(p, f"{name}_vector")
        steps = getattr(p, f"{name}_row"), getattr(p, f"{name}_column")
        assert vector in (0, 1) and steps == tensor.stride()
        if vector:
            assert steps[1] == 1
            assert all((tensor.data_ptr() + 2 * row * steps[0]) % 16 == 0 for row in range(m))


def test_plain_operands_use_vectors(driver):
    """Otherwise the test above would pass with none."""
    m, n, k = 64, 128, 2048
    out = matrix(m, n, dtype=BF16)
    for scale, vector in (
        (matrix(m, 16), 1),
        (matrix(m, 16, (1, m)), 2),
        (matrix(m, 16, (1, 68)), 2),
        (matrix(m, 16, (17, 1)), 0),
        (matrix(m, 16, (1, 65)), 0),
        (matrix(m, 16, offset=1), 0),
    ):
        more = {"input_scale": scale, "weight_scale": matrix(1, 16)}
        p = prepared(LARGE, SCALED, m, n, k, out, residual=out, **more)[0].parameters[-1]
        assert (p.input_scale_vector, p.out_vector, p.residual_vector) == (vector, 1, 1)
    repeated = matrix(1, n, dtype=BF16).expand(m, n)  # a residual of one row
    p = prepared(LARGE, PROMOTED, m, n, k, out, residual=repeated)[0].parameters[-1]
    assert (p.residual_vector, p.residual_row) == (1, 0)


def test_parameters_and_maps(driver):
    m, n, k = 300, 208, 1040
    out, residual = matrix(m, n, (3, 1000), 0, BF16), matrix(m, n, (500, 2), 0, BF16)
    bias = matrix(n, 1, (3, 1))[:, 0]
    kind = Kind(False, False, BIAS | RESIDUAL)
    for config in (LARGE, SMALL):
        launch, x, weight = prepared(
            config, kind, m, n, k, out, alpha=0.5, bias=bias, residual=residual
        )
        *maps, p = launch.parameters
        tokens = (x.data_ptr(), m, k, k, config.rows, 128)
        rows = (weight.data_ptr(), n, k, k)
        if config is LARGE:
            assert maps == [tokens, ("groups", *rows, config.columns // 16, 128, 16), tokens]
        else:
            assert maps == [(*rows, config.columns, 128), tokens]
        assert (p.bias, p.residual, p.out) == tuple(t.data_ptr() for t in (bias, residual, out))
        assert not p.input_scale and not p.weight_scale and not p.alpha_at and p.alpha == 0.5
        assert (p.out_row, p.out_column, p.residual_row, p.residual_column) == (3, 1000, 500, 2)
        assert (p.m, p.n, p.k, p.bias_kind, p.bias_stride) == (m, n, k, 3, 3)
        assert launch.threads == 32 * config.warps and launch.cluster == config.cluster
        assert launch.shared == configs.shared_bytes(config, False)
        source, name = gemm.kernel_name(config, kind, n)
        assert launch.function == (source, name, "sm_90a", -1, launch.shared)
    assert launch.grid == (4 * 2, 19, 1)
    scales = {"input_scale": matrix(m, 9, (2, 700)), "weight_scale": matrix(2, 9, (1, 5))}
    launch, *_ = prepared(LARGE, SCALED, m, n, k, out, **scales)
    p = launch.parameters[-1]
    assert launch.grid == (2 * 3, 1, 1) and launch.cluster == 1 and p.raster == 16
    assert (p.input_scale, p.weight_scale) == tuple(t.data_ptr() for t in scales.values())
    assert (p.input_scale_row, p.input_scale_block) == (2, 700)
    assert (p.weight_scale_row, p.weight_scale_block) == (1, 5)
    assert not p.bias and p.bias_kind == 0 and not p.residual and p.alpha == 1.0
    wide, *_ = prepared(LARGE, PROMOTED, 8192, 4096, 64, matrix(8192, 4096, dtype=BF16))
    assert wide.grid == (132, 1, 1)
    assert wide.parameters[1][-3:] == (3, 128, 32)  # N % 32 == 0: groups of 32 columns
    narrow = Config("large", 256, 80, 4)
    odd, *_ = prepared(narrow, PROMOTED, 300, 4096, 64, matrix(300, 4096, dtype=BF16))
    assert odd.parameters[1][-3:] == (5, 128, 16)
    for launch, config, columns in ((wide, LARGE, 4096), (odd, narrow, 4096)):
        assert launch.function[:2] == gemm.kernel_name(config, PROMOTED, columns)


def test_weights_for_two_tiles_of_tokens(driver):
    """Each CTA of the cluster brings half of the 64 rows; the last tile of tokens may have none."""
    for m, clusters in ((32, 1), (33, 1), (64, 1), (65, 2)):
        config = Config("small", 32, 64, 8, multicast=2)
        out = matrix(m, 208, dtype=BF16)
        launch, x, weight = prepared(config, SCALED, m, 208, 256, out)
        weights, tokens, _ = launch.parameters
        assert weights == (weight.data_ptr(), 208, 256, 256, 32, 128)
        assert tokens == (x.data_ptr(), m, 256, 256, 32, 128)
        assert (launch.grid, launch.cluster, launch.threads) == ((4 * 2, clusters, 1), 2, 192)


def test_where_results_are_staged_for(driver):
    """A descriptor of the output where whole rows can be stored so, any other where not."""
    m, n, k = 300, 208, 256
    staged = Config("large", 128, 192, 3, staged=True)
    wide = matrix(m, n, (n + 16, 1), dtype=BF16)
    launch, *_ = prepared(staged, FAST, m, n, k, wide)
    assert launch.parameters[2] == ("results", wide.data_ptr(), m, n, 2 * (n + 16), 12, 16, 16)
    launch, *_ = prepared(staged, FAST, m, 224, k, matrix(m, 224, dtype=BF16))
    assert launch.parameters[2][3:] == (224, 2 * 224, 6, 16, 32)
    row = matrix(1, n, (3, 1), dtype=BF16)  # a single row has no leading stride to speak of
    launch, *_ = prepared(staged, FAST, 1, n, k, row)
    assert launch.parameters[2][2:5] == (1, n, 2 * n)
    for out in (matrix(m, n, (1, m), dtype=BF16), matrix(m, n, offset=1, dtype=BF16)):
        launch, *_ = prepared(staged, FAST, m, n, k, out)
        assert launch.parameters[2] == launch.parameters[0] and not launch.parameters[-1].out_vector


def test_alpha_on_the_device_and_off_it(driver):
    out = matrix(16, 64, dtype=BF16)
    there = torch.tensor([7.0, 3.0])[1:]
    p = prepared(SMALL, PROMOTED, 16, 64, 128, out, alpha=there)[0].parameters[-1]
    assert p.alpha_at == there.data_ptr()
    for number, kept in ((1 / 3, torch.tensor(1 / 3).item()), (1e300, math.inf), (-0.0, -0.0)):
        p = prepared(SMALL, PROMOTED, 16, 64, 128, out, alpha=number)[0].parameters[-1]
        assert not p.alpha_at and p.alpha == kept
        assert math.copysign(1, p.alpha) == math.copysign(1, kept)


def test_a_single_row_gets_a_pitch_that_the_copy_engine_takes(driver):
    x, weight = codes(1, 64, 7), codes(16, 64)
    launch = gemm.prepare(SMALL, PROMOTED, x, weight, matrix(1, 16, (5, 3), 0, BF16))
    assert launch.parameters[1][1:4] == (1, 64, 64)


def test_large_strides_reach_the_kernel_whole(driver):
    meta = torch.empty(1, device="meta")
    far = 2**33 + 16
    out = residual = meta.to(BF16).as_strided((9, 16), (far, 2**31))
    scales = [meta.as_strided((size, 1), (far, far + 1)) for size in (9, 1)]
    x, weight = (meta.to(E4M3).as_strided((size, 64), (far, 1)) for size in (9, 16))
    more = {"input_scale": scales[0], "weight_scale": scales[1], "residual": residual}
    launch = gemm.prepare(LARGE, SCALED, x, weight, out, **more)
    p = launch.parameters[-1]
    assert (p.out_row, p.out_column, p.residual_row, p.residual_column) == (far, 2**31) * 2
    assert (p.input_scale_row, p.input_scale_block) == (far, far + 1)
    assert (p.weight_scale_row, p.weight_scale_block) == (far, far + 1)
    assert launch.parameters[0][3] == launch.parameters[1][4] == far


# --- the cache of prepared launches --------------------------------------------------------------


def test_a_launch_for_each_set_of_addresses(driver, monkeypatch):
    launches = {}
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(gemm.Prepared, "_launches", launches)
    monkeypatch.setattr(gemm.Prepared, "_limit", 100)
    x, weight = codes(4, 128), codes(16, 128)
    scales = matrix(4, 1), matrix(1, 1)
    outs = torch.empty(120, 4, 16, dtype=BF16)
    bound = blockwise.bind(SMALL)
    for out in outs:
        for _ in range(2):
            bound(x, weight, *scales, None, out, False)
        newest = next(reversed(launches.values()))
        assert newest.fired == 2 and newest.parameters[-1].out == out.data_ptr()
    assert len(launches) == 100  # bounded: the oldest left
    bound(x, weight, *scales, None, outs[0], False)
    newest = next(reversed(launches.values()))
    assert newest.fired == 1 and newest.parameters[-1].out == outs[0].data_ptr()
    # another problem with the same addresses has a launch of its own, within the same bound
    blockwise.bind(LARGE)(x, weight, *scales, None, outs[0], False)
    assert next(reversed(launches.values())).fired == 1 and len(launches) == 100
    # every operand counts
    before = set(launches)
    others = [t.clone() for t in (x, weight, *scales)]
    for i, other in enumerate(others):
        operands = [x, weight, *scales]
        operands[i] = other
        bound(*operands, None, outs[-1], False)
    bound(x, weight, *scales, torch.zeros(16), outs[-1], False)
    assert len(set(launches) - before) == 5


def test_what_is_no_tensor_counts_by_value(driver, monkeypatch):
    """alpha as a number; and a device is part of the key, whose addresses may repeat."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(gemm.Prepared, "_launches", {})
    made, tensor = [], torch.zeros(3)

    def run(to, device, *rest):
        def prepare():
            made.append(gemm.Launch())
            return made[-1]

        to.run(torch.device(device), (tensor, *rest), prepare)

    first, second = gemm.Prepared(), gemm.Prepared()
    for turn in range(2):
        run(first, "cuda:0", 1.0, None)
        run(first, "cuda:0", 0.5, None)
        run(first, "cuda:1", 0.5, None)
        run(first, "cuda:0", 0.5, torch.zeros(1)) if turn == 0 else None
        run(second, "cuda:0", 0.5, None)
        run(first, "cuda:0", 0.0, None)
        run(first, "cuda:0", -0.0, None)
    assert [launch.fired for launch in made] == [2, 2, 2, 1, 2, 2, 2]


def test_nothing_to_sum_is_the_reference(driver, monkeypatch):
    monkeypatch.setattr(gemm, "prepare", None)  # nothing may be launched
    x, weight = torch.empty(3, 0, dtype=E4M3), torch.empty(16, 0, dtype=E4M3)
    scales = torch.empty(3, 0), torch.empty(1, 0)
    bias = torch.randn(16)
    bias[:3] = torch.tensor([-0.0, float("nan"), 3.00001])
    for config in (SMALL, LARGE):
        for added in (None, bias, bias.bfloat16()):
            for gelu in (False, True):
                out = torch.full((3, 32), float("nan"), dtype=BF16)[:, ::2]
                want = torch.empty(3, 16, dtype=BF16)
                reference.run(None, x, weight, *scales, added, want, gelu)
                blockwise.bind(config)(x, weight, *scales, added, out, gelu)
                assert_bit_equal(out, want)
                if added is None:
                    assert not out.any()


def test_nothing_to_write_needs_no_kernel(monkeypatch):
    monkeypatch.setattr(gemm, "prepare", None)
    before = dict(gemm.Prepared._launches)
    for m, n in ((0, 16), (4, 0)):
        x, weight = torch.empty(m, 128, dtype=E4M3), torch.empty(n, 128, dtype=E4M3)
        scales = torch.empty(m, 1), torch.empty(blocks(n), 1)
        blockwise.run(SMALL, x, weight, *scales, None, torch.empty(m, n, dtype=BF16), False)
    assert before == gemm.Prepared._launches


# --- agreement with the .cu files ----------------------------------------------------------------


def source_of(policy):
    return jit._PACKAGE / "cuda" / "fp8" / f"{policy}.cu"


@pytest.mark.parametrize("policy", ("large", "small"))
def test_parameters_lie_as_the_kernel_reads_them(policy, tmp_path):
    header = (jit.INCLUDE / "fp8_problem.cuh").read_text()
    assert fields_of("Problem", header) == sizes_of(gemm._Parameters)
    constants = f"static_assert(kDepth == {configs.DEPTH});"
    bits = f"static_assert(kBias == {BIAS} && kResidual == {RESIDUAL} && kGelu == {GELU});"
    text = [f'#include "{source_of(policy)}"', offsets_of("Problem", gemm._Parameters)]
    compiles("\n".join([*text, constants, bits]), tmp_path)


LARGE_FACTS = """
static_assert(L::bytes == %d && L::full %% 8 == 0);
static_assert(L::out %% 1024 == 0 && L::scales - L::out == %d);
static_assert(L::b %% 1024 == 0 && L::b_bytes %% 1024 == 0);
static_assert(L::scales %% 16 == 0 && L::scale_floats %% 4 == 0, "16-byte copies of scales");
static_assert(kScaleStages == %d && kScaleBlocks == %d);
"""
SMALL_FACTS = """
static_assert(L::bytes == %d && L::full %% 8 == 0 && L::empty - L::full == L::bytes - L::empty);
static_assert(L::tokens %% 1024 == 0 && L::token_bytes %% 1024 == 0, "swizzle atoms");
static_assert(L::scales %% 8 == 0 && L::scale_floats %% 2 == 0 && L::pitch %% 4 == 0, "vectors");
"""


@pytest.mark.parametrize("policy", ("large", "small"))
def test_shared_memory_adds_up(policy, tmp_path):
    facts = set()
    for kind in (SCALED, PROMOTED, FAST):
        scaled = str(kind.scaled).lower()
        for c in configs.configs(kind, 1):
            size = configs.shared_bytes(c, kind.scaled) - 1024
            if c.policy == policy == "large":
                layout = (
                    f"Shared<{c.rows}, {c.columns}, {c.stages}, {scaled}, {str(c.staged).lower()}>"
                )
                results = c.rows * c.columns * 2 * c.staged
                sizes = (size, results, configs.SCALE_STAGES, configs.SCALE_BLOCKS)
                told = LARGE_FACTS % sizes
                facts.add(f"using L = {layout};" + told)
            elif c.policy == policy:
                layout = f"Layout<{c.rows}, {c.stages}, {scaled}>"
                facts.add(f"using L = {layout};" + SMALL_FACTS % size)
    assert len(facts) >= 40
    inside = (f"namespace layout{i} {{ {fact} }}" for i, fact in enumerate(sorted(facts)))
    compiles(f'#include "{source_of(policy)}"\n' + "\n".join(inside), tmp_path)


def test_facts_that_are_wrong_do_not_compile(tmp_path):
    with pytest.raises(Exception, match="static assert"):
        include = f'#include "{source_of("large")}"\n'
        compiles(include + "static_assert(sizeof(Problem) == 8);", tmp_path)
