"""The native FP8 products of SM90a without a GPU: what they run, and with which configuration.

Their launches are in test_fp8_sm90_launch.py, their results in test_fp8_sm90_gpu.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro import tuning
from farro.arch import arch_named
from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, GELU, Config, Kind
from farro.formats.fp8 import E4M3, blocks
from farro.ops.fp8_blockwise_linear import sm90 as blockwise
from farro.problem import Problem, TensorSpec

from .fp8_sm90_forced import but_its_ring

H200 = "nvidia_h200"
KINDS = {"scaled": Kind(True), "promoted": Kind(False), "fast": Kind(False, True)}
SIZES = (16, 32, 64, 80, 128, 144, 1008, 4096, 7168, 16384, 24576, 65536)
ROWS = (1, 2, 8, 9, 16, 33, 64, 65, 100, 128, 129, 257, 1000, 4096, 8192, 32769)
sizes = st.one_of(st.sampled_from(SIZES), st.integers(1, 2**16).map(lambda x: 16 * x))
rows = st.one_of(st.sampled_from(ROWS), st.integers(1, 300), st.integers(1, 2**24))
kinds = st.sampled_from(list(KINDS.values()))


def spec(shape, dtype=E4M3, stride=None, align=16):
    return TensorSpec(shape, stride or (shape[1], 1), dtype, align)


def problem_of(m, n, k, device="", activation=None, **tensors):
    given = {
        "input": spec((m, k)),
        "weight": spec((n, k)),
        "input_scale": spec((m, blocks(k)), torch.float32),
        "weight_scale": spec((blocks(n), blocks(k)), torch.float32),
        "bias": None,
        "out": spec((m, n), torch.bfloat16),
        **tensors,
    }
    arch = dataclasses.replace(arch_named("sm_90"), device=device)
    params = (("activation", activation),)
    return Problem("fp8_blockwise_linear", arch, tuple(given.items()), params)


# --- configurations ------------------------------------------------------------------------------


def check_choice(chosen, kind, m, n):
    assert configs.refuses(chosen, kind, m) is None, (m, n, chosen)
    assert configs.shared_bytes(chosen, kind.scaled) <= configs.SHARED_LIMIT == 227 * 1024
    x, y, z = gemm._grid(chosen, m, n, 132)
    assert 1 <= x < 2**31 and 1 <= y <= 65535 and z == 1
    if chosen.policy == "small":
        assert x % chosen.ctas == 0 and x // chosen.ctas * chosen.columns >= n
        assert y * chosen.rows * chosen.multicast >= m
    else:
        assert x <= 132


@settings(max_examples=300, deadline=None)
@given(m=rows, n=sizes, k=sizes, device=st.sampled_from(["", H200]))
def test_every_choice_is_legal(m, n, k, device):
    check_choice(blockwise.config(problem_of(m, n, k, device)), KINDS["scaled"], m, n)


@settings(max_examples=200, deadline=None)
@given(m=rows, n=sizes, k=sizes, kind=kinds, count=st.sampled_from([1, 78, 132, 1000]))
def test_every_heuristic_choice_is_legal(m, n, k, kind, count):
    check_choice(configs.heuristic(kind, m, n, k, count), kind, m, n)


def test_the_heuristic_for_few_rows():
    """The narrowest tile that holds the rows; clusters where there is K for each of their CTAs."""
    for kind in KINDS.values():
        for m in range(1, 65):
            for n, k in ((16, 16), (64, 4096), (512, 2048), (4096, 4096), (24576, 16384)):
                chosen = configs.heuristic(kind, m, n, k)
                check_choice(chosen, kind, m, n)
                tokens = chosen.rows * chosen.multicast
                assert chosen.policy == "small" and tokens == max(8, 2 ** (m - 1).bit_length())
                assert chosen.cluster == 1 or blocks(k) >= 2 * chosen.cluster
        assert configs.heuristic(kind, 1, 64, 16384).cluster == 8
        assert configs.heuristic(kind, 1, 24576, 16384).cluster == 1
        # what products by blocks gained from, and others did not
        together, shared = (configs.heuristic(kind, 64, n, 4096) for n in (24576, 4096))
        assert together.ahead != kind.scaled and shared.multicast == (2 if kind.scaled else 1)
        assert together.ahead or configs._in_one_round(together, kind, 64, 24576, 132)
        assert configs.heuristic(kind, 64, 65536, 4096).ahead  # two rounds, either way


def test_the_heuristic_for_many_rows():
    """Each tile has products that it is taken for: none is forgotten."""
    for name, kind in KINDS.items():
        taken = {
            configs.heuristic(kind, m, n, 4096).tile
            for m in range(128, 4097, 128)
            for n in range(64, 4097, 96)
        }
        large = {c.tile for c in configs.configs(kind, 1) if c.policy == "large"}
        assert len(taken & large) >= 5 and (128, 64) in taken, (name, large - taken)


@settings(max_examples=60, deadline=None)
@given(m=rows, n=sizes, k=sizes, kind=kinds)
def test_what_the_tuner_times(m, n, k, kind):
    legal = list(configs.configs(kind, m))
    wanted = configs.candidates(kind, m, n, k)
    assert len(set(legal)) == len(legal) > 30
    assert set(wanted) <= set(legal) and 3 <= len(set(wanted)) == len(wanted) <= 72
    assert all(Config(**c.as_dict()) == c for c in legal)
    assert all(configs.refuses(c, kind, m) is None for c in legal)
    for c in wanted:
        assert c.multicast == 1 or m > c.rows, "a CTA without a token"
        assert (m > 64) >= (c.policy == "large") and (m <= 256) >= (c.policy == "small")
    if m <= 64:  # nothing is cut off: every ring of the tile that holds the rows
        held = [c for c in legal if c.tile == wanted[-1].tile and c.cluster == 1 and c.ahead]
        assert {c for c in held if c.multicast == 1} <= set(wanted)
    if m > 256:  # the heuristic's is among them, results stored and, where it can, staged
        tile = configs.heuristic(kind, m, n, k).tile
        of_tile = {c.staged for c in wanted if c.tile == tile}
        assert of_tile == {c.staged for c in legal if c.tile == tile}


def test_names_tell_configurations_apart():
    tiles, names = set(), set()
    for kind in KINDS.values():
        for c in configs.configs(kind, 1):
            tiles.add(but_its_ring(c))
            names.add(c.name)
    assert len(names) == len(tiles)
    plain = Kind(False, True, BIAS)
    large = gemm.kernel_name(Config("large", 256, 96, 5), plain)
    assert large == ("cuda/fp8/large.cu", "fp8_large<1, false, true, 96, 2, 5, 32, false>")
    for c, n in ((Config("large", 256, 96, 5), 80), (Config("large", 256, 80, 5), 96)):
        assert gemm.kernel_name(c, plain, n)[1].endswith(f", {c.columns}, 2, 5, 16, false>")
    staged = gemm.kernel_name(Config("large", 128, 192, 4, staged=True), KINDS["fast"], 64)[1]
    assert staged == "fp8_large<0, false, true, 192, 1, 4, 32, true>"
    small = gemm.kernel_name(Config("small", 16, 64, 8, 4), Kind(True, False, BIAS | GELU))
    assert small == ("cuda/fp8/small.cu", "fp8_small<5, true, false, 16, 8, 4, true, 1>")


def test_rows_that_do_not_fit_the_grid():
    tall = 65535 * 8 + 1
    small, kind = Config("small", 8, 64, 8), KINDS["scaled"]
    assert configs.refuses(small, kind, tall - 1) is None
    assert "65535 tiles" in configs.refuses(small, kind, tall)
    assert small not in list(configs.configs(kind, tall))
    assert configs.refuses(Config("large", 256, 128, 4), kind, tall) is None


def test_illegal_configurations():
    large, small = Config("large", 256, 128, 4), Config("small", 16, 64, 8, 2)
    forms = [Config("small", 64, 64, 4, **form) for form in ({"ahead": False}, {"multicast": 2})]
    for kind in KINDS.values():
        assert all((configs.refuses(c, kind) is None) == (not kind.fast) for c in forms)
        assert configs.refuses(large, kind) is None and configs.refuses(small, kind) is None
        for base, change in (
            *((large, c) for c in ({"rows": 192}, {"columns": 104}, {"columns": 256})),
            *((large, c) for c in ({"cluster": 2}, {"raster": 0}, {"raster": -8}, {"raster": 65})),
            *((large, c) for c in ({"stages": 2}, {"stages": 5}, {"policy": "huge"})),
            *((large, c) for c in ({"rows": 256.0}, {"rows": "256"}, {"raster": True})),
            *((large, c) for c in ({"policy": None}, {"stages": None}, {"columns": 64.0})),
            *((base, {"staged": s}) for base in (large, small) for s in (1, True)),
            (large, {"staged": True, "stages": 3}),
            *((small, c) for c in ({"rows": 24}, {"columns": 128}, {"stages": 2}, {"rows": 256})),
            *((small, c) for c in ({"cluster": 3}, {"cluster": 16}, {"cluster": 0})),
            *((small, c) for c in ({"stages": 99}, {"cluster": True}, {"ahead": False})),
            *((small, c) for c in ({"multicast": 2}, {"ahead": 1}, {"multicast": True})),
            *((large, c) for c in ({"multicast": 2}, {"ahead": False})),
            *(
                (form, c)
                for form in forms
                for c in ({"multicast": 4}, {"cluster": 2}, {"rows": 16})
            ),
            (forms[0], {"multicast": 2}),
        ):
            changed = dataclasses.replace(base, **change)
            assert isinstance(configs.refuses(changed, kind), str), (kind, change)


def test_which_tiles_are_legal():
    """By hand: up to 192 FP32 sums in a thread."""

    def widths(kind, tokens):
        found = (c for c in configs.configs(kind, 1) if c.policy == "large" and c.rows == tokens)
        return sorted({c.columns for c in found})

    fast = [208, 224, 240, 256]
    for name, wide in (("scaled", []), ("promoted", []), ("fast", fast)):
        assert widths(KINDS[name], 256) == [64, 80, 96, 112, 128], name
        plain = [64, 80, 96, 112, 128, 144, 160, 176, 192]
        assert widths(KINDS[name], 128) == [*plain, *wide], name
    rings = [(128, 192, 4), (128, 208, 4), *((128, columns, 3) for columns in fast[1:])]
    for name, tiles in (("scaled", []), ("promoted", []), ("fast", rings)):
        staged = {c.tile: c.stages for c in configs.configs(KINDS[name], 1) if c.staged}
        assert [(*tile, deepest) for tile, deepest in staged.items()] == tiles


# --- what it runs --------------------------------------------------------------------------------


def test_why_not():
    for good in (
        {},
        {"input": spec((99, 1040), stride=(1056, 1)), "weight": spec((96, 1040), stride=(4096, 1))},
        {"out": spec((99, 96), torch.bfloat16, stride=(3, 400), align=2)},
        {"input_scale": spec((99, 9), torch.float32, stride=(1, 99), align=4)},
        {"weight_scale": spec((1, 9), torch.float32, stride=(5, 7), align=4)},
    ):
        problem = problem_of(99, 96, 1040, **good)
        assert blockwise.why_not(problem) is None and blockwise.must_run(problem), good
    for bad, reason in (
        ({"input": spec((99, 1040), align=8)}, "input's address is aligned to 8 bytes; TMA needs"),
        ({"weight": spec((96, 1040), align=4)}, "weight's address is aligned to 4"),
        (
            {"input": spec((99, 1040), stride=(1, 99))},
            "input must be row-major: its stride along K is 99",
        ),
        (
            {"weight": spec((96, 1040), stride=(1, 96))},
            "weight must be row-major: its stride along K is 96",
        ),
        (
            {"input": spec((99, 1040), stride=(1048, 1))},
            "input's leading stride is 1048; TMA needs",
        ),
        ({"weight": spec((96, 1040), stride=(1041, 1))}, "weight's leading stride is 1041"),
        ({"input": spec((99, 1040), stride=(16, 1))}, "below K = 1040"),
    ):
        problem = problem_of(99, 96, 1040, **bad)
        assert reason in blockwise.why_not(problem)
        assert not blockwise.must_run(problem)
    for m, n, k in ((9, 100, 1040), (9, 96, 1000), (9, 8, 16), (9, 16, 8)):
        reason = blockwise.why_not(problem_of(m, n, k))
        assert reason == f"N = {n} and K = {k} must be multiples of 16"
        assert not blockwise.must_run(problem_of(m, n, k))
    for huge in ((2**31 - 1, 16, 16), (16, 2**31 - 16, 16), (16, 16, 2**31 - 16)):
        assert "longer than" in blockwise.why_not(problem_of(*huge))
        assert not blockwise.must_run(problem_of(*huge))


def test_a_single_row_has_no_leading_stride():
    row = problem_of(1, 16, 64, input=spec((1, 64), stride=(7, 1)))
    assert blockwise.why_not(row) is None and blockwise.must_run(row)
    gaps = problem_of(1, 16, 64, input=spec((1, 64), stride=(128, 2)))
    assert "stride along K is 2" in blockwise.why_not(gaps) and not blockwise.must_run(gaps)


@pytest.mark.parametrize("sizes", [(0, 16, 64), (9, 0, 64), (9, 16, 0), (0, 0, 0)])
def test_empty_problems_run(sizes):
    m, n, k = sizes
    odd = problem_of(m, n, k, input=spec((m, k), stride=(1, 1), align=1))
    assert blockwise.why_not(odd) is None and blockwise.must_run(odd)


@settings(max_examples=400, deadline=None)
@given(
    size=st.tuples(rows, st.integers(1, 400), st.integers(1, 400)),
    whole=st.booleans(),
    pitches=st.tuples(st.integers(-20, 80), st.integers(0, 80)),
    aligned=st.booleans(),
    along=st.sampled_from([1, 1, 1, 2]),
    align=st.sampled_from([1, 8, 16, 16, 16]),
)
def test_it_never_refuses_what_it_must_run(size, whole, pitches, aligned, along, align):
    m, n, k = (size[0], 16 * size[1], 16 * size[2]) if whole else size
    lead = [(k + p + 15) // 16 * 16 if aligned else k + p for p in pitches]
    tensors = {"input": spec((m, k), stride=(lead[0], along), align=align)}
    tensors["weight"] = spec((n, k), stride=(lead[1], 1))
    problem = problem_of(m, n, k, **tensors)
    if blockwise.must_run(problem):
        assert blockwise.why_not(problem) is None
    # and what the specification lists it declares
    sixteen = n % 16 == 0 and k % 16 == 0 and align == 16 and along == 1 and lead[1] % 16 == 0
    lies = m == 1 or (lead[0] % 16 == 0 and lead[0] >= k)
    assert blockwise.must_run(problem) == (sixteen and lies)


# --- tuned tables --------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch, tmp_path):
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))

    def write(*rows):
        path = tuning.user_path("fp8_blockwise_linear", "some_gpu")
        filled = [{"n": 4096, "k": 4096, **row} for row in rows]
        tuning.write(path, "fp8_blockwise_linear", "some_gpu", filled, None)

    return write


def test_the_tuned_table_is_asked_first(table):
    best, other = Config("large", 128, 96, 5, raster=16), Config("small", 8, 64, 12, 2)
    named = {"backend": "cuda", "m": 1000}
    rows = [
        {"backend": "cuda", "m": 1024, "config": best.as_dict()},
        {"backend": "cuda", "m": 4, "config": other.as_dict()},
        {"backend": "triton", "m": 1001, "config": {"family": "ring"}},
        # of other versions: fields, policies, tiles and rings that this one does not have
        {**named, "config": {**best.as_dict(), "split": 2}},
        {**named, "config": {"policy": "large"}},
        {**named, "config": {**best.as_dict(), "policy": "cooperative"}},
        {**named, "config": {**best.as_dict(), "policy": ["large"]}},
        {**named, "config": {**best.as_dict(), "rows": 192}},
        {**named, "config": {**best.as_dict(), "columns": 208}},
        {**named, "config": {**best.as_dict(), "stages": 9}},
        {**named, "config": {**best.as_dict(), "stages": "4"}},
        {**named, "config": {**best.as_dict(), "raster": None}},
        {**named, "config": {**best.as_dict(), "lag": False}},
        {**named, "config": {**best.as_dict(), "warpgroups": 1}},
        {**named, "config": {**best.as_dict(), "staged": "no"}},
        {**named, "m": 5, "config": {**other.as_dict(), "cluster": 16}},
        {**named, "m": 5, "config": {"policy": "small", "rows": 8, "ahead": True}},
    ]
    table(*rows)
    assert blockwise.config(problem_of(1000, 4096, 4096, "some_gpu")) == best
    assert blockwise.config(problem_of(5, 4000, 4000, "some_gpu")) == other
    assert blockwise.config(problem_of(1000, 4096, 4096)) != best  # another device
    table(rows[0])  # far from any row the heuristic knows more
    far = blockwise.config(problem_of(1000, 4096, 1024, "some_gpu"))
    assert far == configs.heuristic(KINDS["scaled"], 1000, 4096, 1024) != best
    table(rows[1])
    tall = blockwise.config(problem_of(2**20, 4096, 4096, "some_gpu"))
    assert tall == configs.heuristic(KINDS["scaled"], 2**20, 4096, 4096)  # no room in its grid


def test_few_rows_take_what_is_resident_at_once(table):
    """A deep ring leaves room for one CTA of a multiprocessor; a second round would wait for it."""
    deep, shallow = Config("small", 64, 64, 12), Config("small", 64, 64, 6)
    assert configs.shared_bytes(deep, True) > configs.SHARED_LIMIT / 2
    assert configs.shared_bytes(shallow, True) <= configs.SHARED_LIMIT / 2 - 1024
    table(
        {"backend": "cuda", "m": 64, "n": 8192, "config": deep.as_dict()},
        {"backend": "cuda", "m": 64, "n": 64, "config": shallow.as_dict()},
    )

    def chosen(n, multiprocessors):
        problem = problem_of(64, n, 4096, "some_gpu")
        arch = dataclasses.replace(problem.arch, multiprocessors=multiprocessors)
        return blockwise.config(dataclasses.replace(problem, arch=arch))

    assert chosen(8192, 128) == deep  # 128 tiles, the nearest row
    assert chosen(8192, 127) == chosen(8208, 128) == chosen(2 * 8192, 128) == shallow
    assert chosen(2**20, 128) == deep  # nothing is resident at once: the nearest row after all


def test_auto_yields_where_the_table_says_so(table):
    table(
        {"backend": "auto", "m": 1024, "config": {"backend": "cuda"}},
        {"backend": "auto", "m": 16, "config": {"backend": "triton"}},
    )
    assert "triton is faster" in blockwise.yields(problem_of(20, 4096, 4096, "some_gpu"))
    assert blockwise.yields(problem_of(900, 4096, 4096, "some_gpu")) is None
    assert blockwise.yields(problem_of(20, 4096, 4096)) is None


def test_an_activation_or_a_bias_is_a_kind_and_no_other_choice():
    bias = TensorSpec((4096,), (1,), torch.bfloat16)
    for m in (5, 500):
        plain, full = problem_of(m, 4096, 512), problem_of(m, 4096, 512, "", "gelu_tanh", bias=bias)
        assert blockwise.kind_of(plain) == Kind(True)
        assert blockwise.kind_of(full) == Kind(True, False, BIAS | GELU)
        assert blockwise.config(plain) == blockwise.config(full)
        assert blockwise.candidates(plain) == blockwise.candidates(full)


def test_explain_tells_the_configuration():
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
    meta = {"device": "meta"}
    operands = torch.empty(300, 1040, dtype=E4M3, **meta), torch.empty(96, 1040, dtype=E4M3, **meta)
    scales = torch.empty(300, 9, **meta), torch.empty(1, 9, **meta)
    told = farro.explain(farro.fp8_blockwise_linear_bf16, *operands, *scales, arch="sm_90")
    assert told.chosen == "fp8_blockwise_linear.cuda_sm90"
    chosen = configs.heuristic(KINDS["scaled"], 300, 96, 1040)
    assert str(chosen) in str(told)
