"""The native SM90 int8_gemm without a GPU: what it runs, and with which configuration.

Its launches are in test_int8_gemm_sm90_launch.py, its results in test_int8_gemm_sm90_gpu.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro import tuning
from farro.arch import arch_named
from farro.cuda import jit
from farro.ops.int8_gemm import sm90, sm90_launch
from farro.ops.int8_gemm.sm90 import Config
from farro.problem import Problem, TensorSpec

GROUP_SIZES = (32, 64, 128, 256)
H200 = "nvidia_h200"  # has a shipped table
SIZES = (1, 2, 8, 9, 16, 33, 64, 65, 100, 128, 129, 257, 1000, 4096, 7168, 8192, 24576, 32769)


def spec(shape, dtype=torch.int8, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def problem_of(m, n, k, group_size=256, device="", **tensors):
    groups = -(-k // group_size)
    given = {
        "a": spec((m, k)),
        "b": spec((k, n), stride=(1, k)),
        "scale_a": spec((m, groups), torch.float32),
        "scale_b": spec((groups, n), torch.float32),
        "bias": None,
        "out": spec((m, n), torch.bfloat16),
    }
    given |= tensors
    arch = dataclasses.replace(arch_named("sm_90"), device=device)
    return Problem("int8_gemm", arch, tuple(given.items()), (("group_size", group_size),))


sizes = st.one_of(st.sampled_from(SIZES), st.integers(1, 2**20))
rows = st.one_of(st.sampled_from(SIZES), st.integers(1, 300), st.integers(1, 2**24))
group_sizes = st.sampled_from(GROUP_SIZES)


def test_the_small_heuristic_everywhere():
    """Each M up to 128 with each group size."""
    for group_size in GROUP_SIZES:
        for m in range(1, 129):
            for n in (1, 64, 512, 4096, 24576):
                for k in (16, 2048, 4096, 16384):
                    chosen = sm90.heuristic(m, n, k, group_size)
                    assert sm90.is_legal(chosen, group_size, m), (m, n, k, group_size, chosen)
                    assert chosen.policy == "small"


@settings(max_examples=300, deadline=None)
@given(m=rows, n=sizes, k=sizes, group_size=group_sizes, device=st.sampled_from(["", H200]))
def test_every_choice_is_legal(m, n, k, group_size, device):
    chosen = sm90.config(problem_of(m, n, k, group_size, device))
    assert sm90.is_legal(chosen, group_size, m)
    assert sm90.shared_bytes(chosen, group_size) <= sm90.SHARED_LIMIT == 227 * 1024
    x, y, z = sm90_launch._grid(chosen, m, n, 132)
    assert 1 <= x < 2**31 and 1 <= y <= 65535 and z == 1
    if chosen.policy == "small":
        assert x % (chosen.cluster * chosen.row_cluster) == 0
        assert x // chosen.cluster * chosen.columns >= n
        assert y * chosen.cluster * chosen.rows >= m
    assert chosen.warps * 32 <= 1024


@settings(max_examples=60, deadline=None)
@given(m=rows, n=sizes, k=sizes, group_size=group_sizes)
def test_what_the_tuner_times(m, n, k, group_size):
    problem = problem_of(m, n, k, group_size)
    legal, wanted = sm90.configs(problem), sm90.candidates(problem)
    assert len(set(legal)) == len(legal) > 30
    assert set(wanted) <= set(legal) and 3 <= len(set(wanted)) == len(wanted) <= 80
    assert all(Config(**c.as_dict()) == c and sm90.is_legal(c, group_size, m) for c in legal)
    if m > 64:  # every tile has a deepest ring that is tried
        tiles = {c.tile for c in legal if c.policy == "large"}
        assert {c.tile for c in wanted if c.policy == "large"} == tiles
        assert len(tiles) == 6


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 4000),
    tokens=st.sampled_from(sm90._ROWS["small"]),
    spread=st.sampled_from(({}, {"cluster": 2}, {"row_cluster": 2})),
)
def test_tiles_share_the_rows_evenly(m, tokens, spread):
    config = Config("small", max(tokens, 16), 64, 3, **spread)
    rows, step = sm90_launch.tile_rows(config, m), 8 * config.row_cluster
    tiles = sm90_launch._grid(config, m, 64, 132)[1] * config.cluster
    assert rows % step == 0 and step <= rows <= config.rows
    assert tiles * rows >= m > (rows - step) * tiles
    for height in sm90._ROWS["large"]:
        config = Config("large", height, 128, 4)
        rows = sm90_launch.tile_rows(config, m)
        tiles = -(-m // height)
        assert rows % 8 == 0 and tiles * rows >= m > (rows - 8) * tiles
        assert (tiles - 1) * rows < m and rows <= height  # no tile is empty


def test_rows_that_do_not_fit_the_grid():
    tall = 65535 * 8 + 1
    small = Config("small", 8, 64, 8, 1)
    assert sm90.is_legal(small, 256, tall - 1) and not sm90.is_legal(small, 256, tall)
    assert small not in sm90.configs(problem_of(tall, 64, 64))
    assert sm90.is_legal(Config("large", 256, 128, 4), 256, tall)


def test_illegal_configurations():
    large, small = Config("large", 256, 128, 4), Config("small", 16, 64, 8, 2, ahead=True)
    whole = Config("small", 160, 64, 7, 2)
    assert all(sm90.is_legal(c, 256) for c in (large, small, whole))
    for base, change in (
        *((large, c) for c in ({"rows": 192}, {"columns": 64}, {"columns": 256}, {"stages": 5})),
        *((large, c) for c in ({"consumers": 1}, {"ahead": True}, {"raster": 0}, {"raster": -8})),
        *(
            (large, c)
            for c in ({"stages": 2}, {"policy": "huge"}, {"rows": 256.0}, {"rows": "256"})
        ),
        *((large, c) for c in ({"raster": True}, {"raster": 65}, {"consumers": True})),
        *((small, c) for c in ({"rows": 24}, {"columns": 128}, {"stages": 4}, {"consumers": 3})),
        *((small, c) for c in ({"rows": 8}, {"consumers": 0}, {"stages": 99}, {"rows": 256})),
        *((small, c) for c in ({"cluster": 0}, {"cluster": 3}, {"cluster": 4}, {"cluster": True})),
        *((large, c) for c in ({"cluster": 2}, {"early": True}, {"chunk": 2}, {"resident": 2})),
        *((small, c) for c in ({"early": True}, {"chunk": 2}, {"row_cluster": 3}, {"resident": 4})),
        *((small, c) for c in ({"cluster": 2, "row_cluster": 2}, {"resident": 0}, {"chunk": 0})),
        *((small, c) for c in ({"early": 1}, {"chunk": True}, {"row_cluster": True})),
        *((small, c) for c in ({"rows": 144}, {"rows": 160}, {"stages": 7})),
        *((whole, c) for c in ({"consumers": 1}, {"consumers": 4}, {"early": True}, {"stages": 8})),
        (dataclasses.replace(small, ahead=False, rows=8, consumers=1), {"row_cluster": 2}),
        *((small, c) for c in ({"ahead": 1}, {"ahead": None}, {"ahead": "true"})),
    ):
        assert not sm90.is_legal(dataclasses.replace(base, **change), 256), change


def test_which_few_rows_are_legal():
    """The ring holds the units in use and another stage; sums and scales stay in registers."""

    def legal(tokens, consumers, stages, group_size, **more):
        return sm90.is_legal(Config("small", tokens, 64, stages, consumers, **more), group_size)

    for order, group_size, least in (
        *(({}, g, 2) for g in (32, 64, 128)),
        *(({"ahead": True}, g, 3) for g in (32, 64, 128)),
        *(({"early": True}, g, 3) for g in (32, 64, 128)),
        *(({}, 256, 3), ({"ahead": True}, 256, 5), ({"early": True}, 256, 5)),
    ):
        assert legal(16, 1, least, group_size, **order)
        assert not legal(16, 1, least - 1, group_size, **order), (order, group_size)
    assert not legal(8, 2, 8, 256)  # four tokens are half a swizzle atom
    for group_size, most in ((256, 1), (128, 1), (64, 2), (32, 4)):  # groups of a stage
        allowed = [c for c in range(1, 9) if legal(8, 1, 6, group_size, chunk=c)]
        assert allowed == [c for c in (1, 2, 4) if c <= most]
    # three CTAs share 64 Ki registers and 228 KiB
    assert legal(64, 1, 4, 256, resident=3) and not legal(64, 1, 5, 256, resident=3)
    assert not legal(128, 1, 3, 256, resident=3) and not legal(
        64, 1, 4, 128, ahead=True, resident=3
    )


def test_the_widest_legal_tiles():
    """By hand: sums and scales of a thread against the registers that its warps leave."""
    widest = {
        (group_size, consumers, way): max(
            tokens
            for tokens in sm90._ROWS["small"]
            if sm90.is_legal(Config("small", tokens, 64, 6, consumers, **order), group_size)
        )
        for group_size in (32, 256)
        for consumers in (1, 2, 4)
        for way, order in (("after", {}), ("ahead", {"ahead": True}), ("early", {"early": True}))
    }
    assert widest == {
        **{(g, 1, way): 64 for g in (32, 256) for way in ("ahead", "early")},
        **{(g, c, way): 128 for g in (32, 256) for c in (2, 4) for way in ("ahead", "early")},
        **{(g, c, "after"): 128 for g in (32, 256) for c in (1, 4)},
        **{(32, 2, "after"): 160, (256, 2, "after"): 192},
    }


def test_a_tile_for_all_rows_of_a_call(table):
    """It is taken where all rows fit it and all its CTAs run together."""
    whole, many = Config("small", 160, 64, 7, 2), Config("large", 128, 112, 7)
    table(
        *(
            {"backend": "cuda", "m": m, "n": 7168, "k": 16384, "config": c.as_dict()}
            for m, c in ((160, whole), (256, many))
        ),
    )

    def chosen(m, n):
        return sm90.config(problem_of(m, n, 16384, device="some_gpu"))

    assert [chosen(m, 7168) for m in (129, 160, 161)] == [whole, whole, many]
    assert chosen(160, 132 * 64) == whole != chosen(160, 132 * 64 + 1)


def test_rows_of_older_tables_are_read(table):
    """Before orders and chunks a row had fewer fields; all of them have defaults now."""
    old = {"policy": "small", "rows": 32, "columns": 64, "stages": 12, "consumers": 1}
    old |= {"ahead": True, "raster": 8, "cluster": 2}
    table({"backend": "cuda", "m": 64, "config": old})
    assert sm90.config(problem_of(64, 4096, 4096, device="some_gpu")) == Config(
        "small", 32, 64, 12, 1, ahead=True, cluster=2
    )


# --- what it runs --------------------------------------------------------------------------------


def test_why_not():
    assert sm90.why_not(problem_of(99, 100, 1000)) is not None  # the rows are 1000 bytes apart
    for good in (
        {},
        {"a": spec((99, 1001), stride=(1008, 1)), "b": spec((1001, 100), stride=(1, 4096))},
        {"out": spec((99, 100), torch.float32, stride=(3, 400), align=2)},
        {"scale_a": spec((99, 4), torch.float32, stride=(1, 99), align=4)},
    ):
        k = good.get("a", spec((99, 1024))).shape[1]
        assert sm90.why_not(problem_of(99, 100, k, **good)) is None, good
    for bad, reason in (
        ({"a": spec((99, 1024), align=8)}, "a's address is aligned to 8 bytes"),
        ({"b": spec((1024, 100), stride=(1, 1024), align=4)}, "b's address is aligned to 4"),
        ({"a": spec((99, 1024), stride=(1, 99))}, "a must be row-major: its stride along K is 99"),
        ({"b": spec((1024, 100))}, "column-major (weight.T): its stride along K is 100"),
        ({"a": spec((99, 1024), stride=(1032, 1))}, "a's leading stride is 1032"),
        ({"b": spec((1024, 100), stride=(1, 1025))}, "b's leading stride is 1025"),
        ({"a": spec((99, 1024), stride=(16, 1))}, "below K = 1024"),
        ({"b": TensorSpec((4, 256, 100), (25600, 1, 256), torch.int8)}, "group-packed"),
    ):
        problem = problem_of(99, 100, 1024, **bad)
        assert reason in sm90.why_not(problem)
        assert not sm90.must_run(problem)
    for sizes in ((2**31 - 1, 16, 16), (16, 2**31 - 1, 16), (16, 16, 2**31 - 16)):
        assert "longer than" in sm90.why_not(problem_of(*sizes))
        assert not sm90.must_run(problem_of(*sizes))


def test_a_single_row_has_no_leading_stride():
    row = problem_of(1, 1, 100, a=spec((1, 100), stride=(7, 1)), b=spec((100, 1), stride=(1, 3)))
    assert sm90.why_not(row) is None
    one = problem_of(64, 64, 1, a=spec((64, 1), stride=(16, 5)), b=spec((1, 64), stride=(9, 16)))
    assert sm90.why_not(one) is None  # a single K has no stride along K


@pytest.mark.parametrize("sizes", [(0, 7, 64), (9, 0, 64), (9, 7, 0), (0, 0, 0)])
def test_empty_problems_run(sizes):
    m, n, k = sizes
    odd = problem_of(m, n, k, a=spec((m, k), stride=(1, 1), align=1))
    assert sm90.why_not(odd) is None


@settings(max_examples=400, deadline=None)
@given(
    size=st.tuples(rows, sizes, sizes),
    pitches=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    aligned=st.booleans(),
    group_size=group_sizes,
    along=st.sampled_from([1, 1, 1, 2]),
    align=st.sampled_from([1, 8, 16, 16, 16]),
)
def test_it_never_refuses_what_it_must_run(size, pitches, aligned, group_size, along, align):
    m, n, k = size
    lead = [(k + p + 15) // 16 * 16 if aligned else k + p for p in pitches]
    tensors = {"a": spec((m, k), stride=(lead[0], 1), align=align)}
    tensors["b"] = spec((k, n), stride=(along, lead[1]))
    problem = problem_of(m, n, k, group_size, **tensors)
    refused = sm90.why_not(problem)
    if sm90.must_run(problem):
        assert refused is None
    # and what the specification lists it declares
    assert sm90.must_run(problem) == (along == 1 and align == 16 and not any(p % 16 for p in lead))


# --- agreement with the .cu files ----------------------------------------------------------------


def compiles(text, tmp_path):
    """Compile host-side facts (static_assert) about a kernel's source with NVRTC."""
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
    for header in source_of("small").parent.glob("*.cuh"):  # looked for beside what includes it
        shutil.copy(header, tmp_path)
    file = tmp_path / "facts.cu"
    file.write_text(text)
    jit.program(str(file), "sm_90a").compile("cubin")


def source_of(policy):
    return jit._PACKAGE / "ops" / "int8_gemm" / f"sm90_{policy}.cu"


@pytest.mark.parametrize("policy", ("large", "small"))
def test_parameters_lie_as_the_kernel_reads_them(policy, tmp_path):
    text = jit.source_text(str(source_of(policy).resolve()))  # with its headers
    body = re.search(r"struct Problem \{(.*?)\};", text, re.DOTALL)[1]
    declarations = re.sub(r"//.*", "", body).split(";")
    wide = {"i64": 8, "int": 4, "const float*": 8, "const void*": 8, "void*": 8}
    fields = []
    for declaration in filter(None, map(str.strip, declarations)):
        kind, names = re.fullmatch(r"((?:const )?\w+\*?) (.*)", declaration, re.DOTALL).groups()
        fields += [(name.strip(), wide[kind]) for name in names.split(",")]
    ours = [(name, ctypes.sizeof(kind)) for name, kind in sm90_launch._Parameters._fields_]
    assert fields == ours
    facts = [
        f"static_assert(__builtin_offsetof(Problem, {name}) == "
        f"{getattr(sm90_launch._Parameters, name).offset} && sizeof(Problem::{name}) == {size});"
        for name, size in fields
    ]
    compiles(f'#include "{source_of(policy)}"\n' + "\n".join(facts), tmp_path)


SMALL_FACTS = """
static_assert(L::bytes == %d && L::full %% 8 == 0 && L::empty - L::full == L::bytes - L::empty);
static_assert(L::tokens %% 1024 == 0 && L::token_bytes %% 1024 == 0, "swizzle atoms");
static_assert(L::scales %% 16 == 0 && L::scale_floats %% 4 == 0, "16-byte copies of scales");
static_assert(L::unit_groups * kRows %% 4 == 0 && L::pitch %% 16 == 0, "16-byte stores");
"""


@pytest.mark.parametrize("policy", ("large", "small"))
def test_shared_memory_adds_up(policy, tmp_path):
    facts = set()
    for group_size in GROUP_SIZES:
        for c in sm90.configs(problem_of(64, 4096, 4096, group_size)):
            if c.policy != policy:
                continue
            size = sm90.shared_bytes(c, group_size) - 1024
            if policy == "large":
                layout = f"Shared<{c.rows}, {c.columns}, {c.stages}>"
                end = f"{layout}::scale_empty + 8 * kScaleStages"
                facts.add(f"static_assert({end} == {size} && {layout}::full % 8 == 0);")
                continue
            for out in ("float", "BFloat16"):
                layout = f"Layout<{out}, {group_size}, {c.rows}, {c.stages}>"
                facts.add(f"using L = {layout};" + SMALL_FACTS % size)
    assert len(facts) >= 20
    inside = (f"namespace layout{i} {{ {fact} }}" for i, fact in enumerate(sorted(facts)))
    compiles(f'#include "{source_of(policy)}"\n' + "\n".join(inside), tmp_path)


def test_facts_that_are_wrong_do_not_compile(tmp_path):
    with pytest.raises(Exception, match="static assert"):
        include = f'#include "{source_of("large")}"\n'
        compiles(include + "static_assert(sizeof(Problem) == 8);", tmp_path)


# --- tuned tables --------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))

    def write(*rows):
        path = tuning.user_path("int8_gemm", "some_gpu")
        filled = [{"group_size": 256, "n": 4096, "k": 4096, **row} for row in rows]
        tuning.write(path, "int8_gemm", "some_gpu", filled, None)

    return write


def test_the_tuned_table_is_asked_first(table):
    best, other = Config("large", 128, 96, 5, raster=16), Config("small", 8, 64, 12, 1)
    rows = [
        {"backend": "cuda", "m": 1024, "config": best.as_dict()},
        {"backend": "cuda", "m": 4, "config": other.as_dict()},
        {"backend": "triton", "m": 1001, "config": {"family": "ring"}},
        # of other versions: fields, policies, tiles and rings that this one does not have
        {"backend": "cuda", "m": 1000, "config": {**best.as_dict(), "split": 2}},
        {"backend": "cuda", "m": 1000, "config": {"policy": "large"}},
        {"backend": "cuda", "m": 1000, "config": {**best.as_dict(), "policy": "cooperative"}},
        {"backend": "cuda", "m": 1000, "config": {**best.as_dict(), "rows": 192}},
        {"backend": "cuda", "m": 1000, "config": {**best.as_dict(), "stages": 9}},
        {"backend": "cuda", "m": 1000, "config": {**best.as_dict(), "stages": "4"}},
        {"backend": "cuda", "m": 1000, "config": {**best.as_dict(), "raster": None}},
        {"backend": "cuda", "m": 5, "config": {**other.as_dict(), "ahead": None}},
        {"backend": "cuda", "m": 5, "config": {"policy": "small", "rows": 8, "cluster": 2}},
    ]
    table(*rows)
    assert sm90.config(problem_of(1000, 4096, 4096, device="some_gpu")) == best
    assert sm90.config(problem_of(4, 4096, 4096, device="some_gpu")) == other
    deepest = dataclasses.replace(other, stages=16)
    assert sm90.config(problem_of(5, 4000, 4000, device="some_gpu")) == deepest
    assert sm90.config(problem_of(1000, 4096, 4096)) != best  # another device
    assert sm90.config(problem_of(1000, 4096, 4096, 128, device="some_gpu")) != best
    table(rows[1])
    tall = sm90.config(problem_of(2**20, 4096, 4096, device="some_gpu"))
    assert tall == sm90.heuristic(2**20, 4096, 4096, 256)  # its grid has no room for this


def test_few_rows_take_what_is_resident_at_once(table):
    """A deep ring leaves room for one CTA of a multiprocessor; a second round would wait for it."""
    deep, other = Config("small", 64, 64, 12, 1, ahead=True), Config("small", 16, 64, 3, 2)
    assert sm90.shared_bytes(deep, 256) > sm90.SHARED_LIMIT / 2
    table(
        {"backend": "cuda", "m": 64, "n": 8192, "config": deep.as_dict()},
        {"backend": "cuda", "m": 16, "n": 64, "config": other.as_dict()},
    )

    def chosen(n, multiprocessors):
        problem = problem_of(64, n, 4096, device="some_gpu")
        arch = dataclasses.replace(problem.arch, multiprocessors=multiprocessors)
        return sm90.config(dataclasses.replace(problem, arch=arch))

    assert chosen(8192, 128) == chosen(8192, 9) == deep  # as measured, whatever fits
    assert chosen(8000, 128) == deep  # 125 tiles, the nearest row
    half = dataclasses.replace(deep, stages=6)  # two CTAs fit a multiprocessor
    assert sm90.shared_bytes(half, 256) <= sm90.SHARED_LIMIT / 2 - 1024
    assert chosen(8193, 128) == chosen(2 * 8192, 128) == half
    # nothing is resident at once
    assert chosen(2**20, 128) == sm90.heuristic(64, 2**20, 4096, 256)


def test_models_serve_many_rows(table):
    near, far = Config("large", 128, 128, 6), Config("large", 256, 128, 4)
    about = {"backend": "cuda", "n": None, "k": None}
    models = [
        {"config": near.as_dict(), "tile": [128, 128], "model": [1.0, 4.0, 0.0]},
        {"config": far.as_dict(), "tile": [256, 128], "model": [1.0, 6.0, 0.0]},
        {"config": {**far.as_dict(), "rows": 512}, "tile": [512, 128], "model": [0.0, 0.0, 0.0]},
    ]
    tuned = [{k: v for k, v in {**about, **m}.items() if v is not None} for m in models]
    path = tuning.user_path("int8_gemm", "some_gpu")
    rows = [{"group_size": 256, **row} for row in tuned]
    tuning.write(path, "int8_gemm", "some_gpu", rows, None)
    # 128 tiles of 128 rows fit 132 multiprocessors; of 8192 rows there are 2048 or 1024: 16 or 8
    assert sm90.config(problem_of(512, 4096, 4096, device="some_gpu")) == near
    assert sm90.config(problem_of(8192, 4096, 4096, device="some_gpu")) == far
    few = sm90.config(problem_of(64, 4096, 4096, device="some_gpu"))
    assert few == sm90.heuristic(64, 4096, 4096, 256)  # models are for many


def test_auto_yields_where_the_table_says_so(table):
    pytest.importorskip("triton")
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
    table(
        {"backend": "auto", "m": 1024, "config": {"backend": "cuda"}},
        {"backend": "auto", "m": 16, "config": {"backend": "triton"}},
    )
    assert "triton is faster" in sm90.yields(problem_of(20, 4096, 4096, device="some_gpu"))
    assert sm90.yields(problem_of(900, 4096, 4096, device="some_gpu")) is None
    assert sm90.yields(problem_of(20, 4096, 4096)) is None
    assert sm90.yields(problem_of(20, 4096, 4096, 64, device="some_gpu")) is None
    arch = problem_of(1, 1, 1, device="some_gpu").arch

    def chosen(m, backend="auto"):
        meta = {"device": "meta"}
        a = torch.empty(m, 4096, dtype=torch.int8, **meta)
        b = torch.empty(4096, 4096, dtype=torch.int8, **meta).T
        scales = torch.empty(m, 16, **meta), torch.empty(16, 4096, **meta)
        told = farro.explain(farro.int8_gemm, a, b, *scales, backend=backend, arch=arch)
        return told.chosen

    assert chosen(20) == "int8_gemm.triton"
    assert chosen(900) == chosen(20, "cuda") == "int8_gemm.cuda_sm90"
