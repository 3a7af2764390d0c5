"""The native SwiGLU + quantize of SM90a without a GPU: choices, launches, agreement with sources.

Its results are in test_fp8_swiglu_sm90_gpu.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import farro
from farro import tuning
from farro.arch import arch_named
from farro.cuda import jit
from farro.cuda.fp8 import configs, gemm
from farro.formats.fp8 import E4M3, blocks
from farro.ops.fp8_swiglu_quantize import sm90
from farro.ops.fp8_swiglu_quantize.sm90 import Config
from farro.problem import Problem, TensorSpec

from .native_facts import compiles, fields_of, matrix, offsets_of, pretend, sizes_of

FP32 = torch.float32
H200 = "nvidia_h200"
LARGE, SMALL = Config("large", 128, 4, raster=16), Config("small", 16, 8, 2)
MEDIUM = Config("medium", 128, 6, 2)
SIZES = (16, 32, 64, 80, 128, 144, 1008, 2048, 7168, 18432)
ROWS = (1, 2, 8, 9, 16, 33, 64, 65, 128, 129, 1000, 8192, 32769)
sizes = st.one_of(st.sampled_from(SIZES), st.integers(1, 2**14).map(lambda x: 16 * x))
rows = st.one_of(st.sampled_from(ROWS), st.integers(1, 200), st.integers(1, 2**24))


def spec(shape, dtype=E4M3, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def problem_of(m, n, k, device="", **tensors):
    given = {
        "input": spec((m, k)),
        "gate_up_weight": spec((2 * n, k)),
        "input_scale": spec((m, blocks(k)), FP32),
        "gate_up_weight_scale": spec((2 * blocks(n), blocks(k)), FP32),
        "output": spec((m, n)),
        "output_scale": spec((m, blocks(n)), FP32),
        **tensors,
    }
    arch = dataclasses.replace(arch_named("sm_90"), device=device)
    return Problem("fp8_swiglu_quantize", arch, tuple(given.items()))


def legal():
    """Every configuration with a raster of 8."""
    found = [
        *(Config("large", r, stages) for r in sm90._ROWS["large"] for stages in range(3, 9)),
        *(
            Config(policy, r, stages, split)
            for policy in ("medium", "small")
            for r in sm90._ROWS[policy]
            for stages in (3, 4, 6, 8, 12, 16)
            for split in sm90._SPLITS
        ),
    ]
    return [c for c in found if sm90.refuses(c) is None]


@settings(max_examples=200, deadline=None)
@given(m=rows, n=sizes, k=sizes, device=st.sampled_from(["", H200]))
def test_every_choice_is_legal(m, n, k, device):
    problem = problem_of(m, n, k, device)
    for chosen in (sm90.config(problem), *sm90.candidates(problem)):
        assert sm90.refuses(chosen, m) is None, chosen
        assert Config(**chosen.as_dict()) == chosen
        assert sm90.shared_bytes(chosen) <= configs.SHARED_LIMIT
    wanted = sm90.candidates(problem)
    assert 2 <= len(set(wanted)) == len(wanted) <= 80


def test_the_choice_without_a_table():
    for m in range(1, 65):
        for n, k in ((16, 16), (512, 7168), (2048, 7168), (18432, 7168)):
            chosen = sm90.config(problem_of(m, n, k))
            assert chosen.policy == "small" and chosen.rows == max(8, 2 ** (m - 1).bit_length())
            assert chosen.split == 1 or blocks(k) >= 2 * chosen.split
    assert sm90.config(problem_of(1, 256, 7168)).split == 4
    assert sm90.config(problem_of(1, 18432, 7168)).split == 1
    assert sm90.config(problem_of(65, 512, 7168)).policy == "large"


def test_illegal_configurations():
    assert all(sm90.refuses(c) is None for c in (LARGE, MEDIUM, SMALL))
    for base, change in (
        *((LARGE, c) for c in ({"rows": 256}, {"rows": 8}, {"stages": 2}, {"stages": 5})),
        *((LARGE, c) for c in ({"raster": 0}, {"raster": 65}, {"split": 2}, {"policy": "huge"})),
        *((LARGE, c) for c in ({"rows": 128.0}, {"stages": "4"}, {"raster": None})),
        *((LARGE, c) for c in ({"rest": 3}, {"rest": 4}, {"rest": True}, {"rest": None})),
        *((MEDIUM, c) for c in ({"rows": 32}, {"stages": 7}, {"split": 8}, {"rest": 1})),
        *((SMALL, c) for c in ({"rows": 128}, {"rows": 24}, {"stages": 17}, {"stages": 2})),
        *((SMALL, c) for c in ({"split": 3}, {"split": 8}, {"split": True}, {"split": 0})),
    ):
        assert isinstance(sm90.refuses(dataclasses.replace(base, **change)), str), change
    tall = 65535 * 16
    assert sm90.refuses(SMALL, tall) is None and "tiles" in sm90.refuses(SMALL, tall + 1)
    assert sm90.refuses(LARGE, tall + 1) is None


def test_the_tuned_table_is_asked_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    best, other = Config("large", 64, 5, raster=16), Config("small", 8, 12, 4)
    near = {"backend": "cuda", "n": 2048, "k": 7168, "m": 1000}
    table = [
        {**near, "m": 1024, "config": best.as_dict()},
        {**near, "m": 4, "config": other.as_dict()},
        {**near, "config": {**best.as_dict(), "rows": 256}},
        {**near, "config": {**best.as_dict(), "stages": 9}},
        {**near, "config": {**best.as_dict(), "policy": ["large"]}},
        {**near, "config": {"rows": 128, "stages": 4}},
        {**near, "m": 5, "config": {**other.as_dict(), "cluster": 2}},
    ]
    path = tuning.user_path("fp8_swiglu_quantize", "some_gpu")
    tuning.write(path, "fp8_swiglu_quantize", "some_gpu", table, None)
    assert sm90.config(problem_of(1000, 2048, 7168, "some_gpu")) == best
    assert sm90.config(problem_of(5, 2048, 7168, "some_gpu")) == other
    tuning.write(path, "fp8_swiglu_quantize", "some_gpu", table[1:2], None)
    tall = sm90.config(problem_of(2**20, 2048, 7168, "some_gpu"))
    assert tall.policy == "large"  # the small kernel's grid has no room for so many rows


# --- what it runs --------------------------------------------------------------------------------


def test_why_not():
    for good in (
        {},
        {"input": spec((9, 1040), stride=(1056, 1))},
        {"output": spec((9, 96), stride=(100, 1), align=4)},
        {"output_scale": spec((9, 1), FP32, stride=(1, 9), align=4)},
    ):
        problem = problem_of(9, 96, 1040, **good)
        assert sm90.why_not(problem) is None and sm90.must_run(problem), good
    for bad, reason in (
        ({"input": spec((9, 1040), align=8)}, "input's address is aligned to 8 bytes"),
        (
            {"gate_up_weight": spec((192, 1040), stride=(1041, 1))},
            "gate_up_weight's leading stride",
        ),
        (
            {"gate_up_weight": spec((192, 1040), stride=(1, 192))},
            "gate_up_weight must be row-major",
        ),
        ({"output": spec((9, 96), stride=(1, 9))}, "output must be row-major"),
        ({"output": spec((9, 96), stride=(98, 1))}, "multiples of 4"),
        ({"output": spec((9, 96), align=2)}, "multiples of 4"),
    ):
        problem = problem_of(9, 96, 1040, **bad)
        assert reason in sm90.why_not(problem) and not sm90.must_run(problem), bad
    for n, k in ((100, 1040), (8, 1040), (96, 1000)):
        assert sm90.why_not(problem_of(9, n, k)) == f"N = {n} and K = {k} must be multiples of 16"
        assert not sm90.must_run(problem_of(9, n, k))


@pytest.mark.parametrize("sizes", [(0, 16, 64), (9, 0, 64), (9, 16, 0), (0, 0, 0)])
def test_empty_problems_run(sizes):
    m, n, k = sizes
    odd = problem_of(m, n, k, input=spec((m, k), stride=(1, 1), align=1))
    assert sm90.why_not(odd) is None


@settings(max_examples=300, deadline=None)
@given(
    size=st.tuples(rows, st.integers(1, 400), st.integers(1, 400)),
    whole=st.booleans(),
    pitches=st.tuples(st.integers(-20, 80), st.integers(0, 9)),
    along=st.sampled_from([1, 1, 1, 2]),
    align=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_it_never_refuses_what_it_must_run(size, whole, pitches, along, align):
    m, n, k = (size[0], 16 * size[1], 16 * size[2]) if whole else size
    x = spec((m, k), stride=(k + pitches[0], along))
    output = spec((m, n), stride=(n + pitches[1], 1), align=align)
    problem = problem_of(m, n, k, input=x, output=output)
    if sm90.must_run(problem):
        assert sm90.why_not(problem) is None
    lies = m == 1 or (pitches[0] >= 0 and (k + pitches[0]) % 16 == 0)
    words = align >= 4 and (m == 1 or (n + pitches[1]) % 4 == 0)
    wanted = n % 16 == 0 and k % 16 == 0 and along == 1 and lies and words
    assert sm90.must_run(problem) == wanted


# --- launches ------------------------------------------------------------------------------------


def given_of(m, n, k, output=None, output_scale=None):
    output = matrix(m, n, dtype=E4M3) if output is None else output
    output_scale = matrix(m, blocks(n)) if output_scale is None else output_scale
    x, weight = matrix(m, k, dtype=E4M3), matrix(2 * n, k, dtype=E4M3)
    scales = matrix(m, blocks(k), (2, 700)), matrix(2 * blocks(n), blocks(k), (1, 9))
    return x, weight, *scales, output, output_scale


def test_parameters_and_maps(monkeypatch):
    pretend(monkeypatch, sm90)
    m, n, k = 300, 208, 1040
    output, scale = matrix(m, n, (212, 1), dtype=E4M3), matrix(m, 2, (1, m))
    for config in (LARGE, Config("large", 64, 5), MEDIUM, SMALL, Config("small", 64, 6)):
        tensors = given_of(m, n, k, output, scale)
        launch = sm90.prepare(config, *tensors)
        first, second, p, o = launch.parameters
        tokens = (tensors[0].data_ptr(), m, k, k, config.rows, 128)
        weight = (tensors[1].data_ptr(), 2 * n, k, k)
        if config.policy == "large":
            assert (first, second) == (tokens, ("groups", *weight, 8, 128))
            assert launch.grid == (-(-m // config.rows) * 2, 1, 1) and launch.cluster == 1
            assert launch.threads == 128 + 2 * config.rows
        elif config.policy == "medium":
            assert (first, second) == (tokens, (*weight, 64, 128))
            assert launch.grid == (3 * 2 * 4, 1, 1) and launch.cluster == 4
            assert launch.threads == 320
        else:
            assert (first, second) == ((*weight, 64, 128), tokens)
            assert launch.cluster == 2 * config.split <= 8
            assert launch.grid == (2 * launch.cluster, -(-m // config.rows), 1)
            assert launch.threads == 320
        assert (p.input_scale, p.weight_scale) == tuple(t.data_ptr() for t in tensors[2:4])
        assert (p.input_scale_row, p.input_scale_block) == (2, 700)
        assert (p.weight_scale_row, p.weight_scale_block) == (1, 9)
        assert (p.m, p.k, p.raster) == (m, k, config.raster)
        assert (o.codes, o.scale) == (output.data_ptr(), scale.data_ptr())
        assert (o.codes_row, o.scale_row, o.scale_block, o.columns) == (212, 1, m, n)
        assert (o.first_tile, o.tiles) == (0, 2)
        assert launch.shared == sm90.shared_bytes(config)
        assert launch.function == (*sm90.kernel_name(config), "sm_90a", -1, launch.shared)
    many = sm90.prepare(LARGE, *given_of(4096, 2048, 16))
    assert many.grid == (132, 1, 1)


@pytest.mark.parametrize("n,whole", [(18432, 132), (12288, 66), (8448, 66), (2048, 0)])
def test_columns_beyond_whole_rounds_go_to_medium_tiles(n, whole, monkeypatch):
    pretend(monkeypatch, sm90)
    config = Config("large", 128, 4, rest=2)
    found = sm90.prepare(config, *given_of(256, n, 16))
    launches = getattr(found, "_launches", (found,))
    assert len(launches) == 1 + (0 < whole < n // 128)
    at = 0
    for launch in launches:
        o = launch.parameters[-1]
        large = at < whole
        assert (o.columns, o.first_tile, o.tiles) == (n, at, whole if large else n // 128 - at)
        assert launch.grid[0] == (132 if large else o.tiles * 2 * launch.cluster)
        assert launch.cluster == (1 if large else 4) and launch.overlaps == (at > 0)
        at += o.tiles
    assert at == n // 128


def test_kernels_are_named():
    folder = "ops/fp8_swiglu_quantize"
    assert sm90.kernel_name(LARGE) == (f"{folder}/sm90_large.cu", "fp8_swiglu<2, 4>")
    medium = f"{folder}/sm90_medium.cu", "fp8_swiglu_medium<2, 6, 2>"
    assert sm90.kernel_name(MEDIUM) == medium
    assert sm90.kernel_name(SMALL) == (f"{folder}/sm90_small.cu", "fp8_swiglu_small<16, 8, 2>")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(bad=st.integers(0, 5))
def test_every_address_counts(monkeypatch, bad):
    pretend(monkeypatch, sm90)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(gemm.Prepared, "_launches", {})
    tensors = list(given_of(5, 32, 64))
    bound = sm90.bind(SMALL)
    bound(*tensors)
    bound(*tensors)
    tensors[bad] = tensors[bad].clone()
    bound(*tensors)
    assert [launch.fired for launch in gemm.Prepared._launches.values()] == [2, 1]


@pytest.mark.parametrize("config", (LARGE, MEDIUM, SMALL), ids=str)
def test_nothing_to_sum_or_to_write_needs_no_kernel(config, monkeypatch):
    monkeypatch.setattr(sm90, "prepare", None)  # nothing may be launched
    output = torch.full((3, 64), float("nan")).to(E4M3)[:, :32]
    scale = torch.full((3, 3), float("nan"))[:, 1:2]
    tensors = given_of(3, 32, 0, output, scale)
    sm90.run(config, *tensors)
    want = farro.fp8_blockwise_swiglu_quantize_fp8(*tensors[:4], backend="reference")
    assert torch.equal(output.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scale, want[1]) and (scale == torch.tensor(1e-12)).all()
    sm90.run(config, *given_of(0, 32, 64))
    sm90.run(config, *given_of(3, 0, 64))


# --- agreement with the .cu files ----------------------------------------------------------------

SOURCES = jit._PACKAGE / "ops" / "fp8_swiglu_quantize"
FACTS = {
    "large": """
static_assert(L::bytes == %d && L::full %% 8 == 0 && L::b %% 1024 == 0 && L::b_bytes %% 1024 == 0);
static_assert(L::scales %% 16 == 0 && L::scale_floats %% 4 == 0, "16-byte copies of scales");
""",
    "medium": """
static_assert(L::bytes == %d && L::full %% 8 == 0 && L::b %% 1024 == 0 && L::b_bytes %% 1024 == 0);
static_assert(L::scales %% 16 == 0 && L::pitch %% 4 == 0 && L::a_bytes %% 1024 == 0, "vectors");
""",
    "small": """
static_assert(L::bytes == %d && L::full %% 8 == 0 && L::empty - L::full == L::bytes - L::empty);
static_assert(L::tokens %% 1024 == 0 && L::token_bytes %% 1024 == 0, "swizzle atoms");
static_assert(L::scales %% 8 == 0 && L::scale_floats %% 2 == 0 && L::pitch %% 4 == 0, "vectors");
""",
}


@pytest.mark.parametrize("policy", FACTS)
def test_parameters_and_shared_memory(policy, tmp_path):
    header = (SOURCES / "fp8_swiglu.cuh").read_text()
    assert fields_of("Output", header) == sizes_of(sm90._Output)
    layout = dict.fromkeys(("medium", "small"), "Layout<{0.rows}, {0.stages}>")
    layout["large"] = "Shared<{0.rows}, {0.stages}>"
    facts = {
        f"using L = {layout[policy].format(c)};" + FACTS[policy] % (sm90.shared_bytes(c) - 1024)
        for c in legal()
        if c.policy == policy
    }
    assert len(facts) >= 5
    inside = (f"namespace layout{i} {{ {fact} }}" for i, fact in enumerate(sorted(facts)))
    include = f'#include "{SOURCES / f"sm90_{policy}.cu"}"'
    structures = offsets_of("Output", sm90._Output), offsets_of("Problem", gemm._Parameters)
    compiles("\n".join([include, *structures, *inside]), tmp_path)
