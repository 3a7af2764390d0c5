"""Grouped products on SM90a: legal configurations, what a launch is given, and results on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farro import nvfp4
from farro.catalogue import operator_named
from farro.cuda import jit
from farro.formats.nvfp4 import NAN_SCALE
from farro.ops.nvfp4_group_mm import sm90, sm90_configs
from farro.ops.nvfp4_group_mm.sm90_configs import Config
from farro.testing import group_mm_cases
from farro.testing.nvfp4_group_mm import GroupCase

from .native_facts import buffer, compiles, fields_of, offsets_of, pretend, sizes_of
from .sm90_forced import compile_all, skip_without_it
from .test_nvfp4_group_mm_triton import problem_of

KERNEL = next(k for k in operator_named("nvfp4_group_mm").kernels if k.backend == "cuda")
FEW, MANY = Config(4, 8, 2, 6, True), Config(2, 256, 1, 3, False)


def shapes(bf16: bool = True) -> list[Config]:
    """Each tile, step, way to expand, number of CTAs and split, with a ring of three."""
    found = {dataclasses.replace(c, stages=3): None for c in sm90_configs.configs(1, bf16)}
    return list(found)


def usual(bf16: bool) -> list[Config]:
    """Those that every run takes: two of each number of tokens and way to expand, and
    one of each number of warpgroups.
    """
    found: dict[tuple[int, bool], list[Config]] = {}
    for config in shapes(bf16):
        found.setdefault((config.tokens, config.inside), []).append(config)
    picks = ({i % len(alike), (i + 3) % len(alike)} for i, alike in enumerate(found.values()))
    chosen = [alike[i] for alike, pick in zip(found.values(), picks) for i in sorted(pick)]
    widest = {config.consumers: config for config in shapes(bf16)}
    return list(dict.fromkeys([*chosen, *widest.values()]))


SWEEPS = (False, pytest.param(True, marks=pytest.mark.slow))
every_kernel = pytest.mark.parametrize("every", SWEEPS, ids=("usual", "exhaustive"))


def test_chosen_configurations_are_legal():
    sizes = ((1, 32, 32, 1), (8, 28672, 4096, 16), (128, 1536, 2048, 8), (4096, 64, 96, 300))
    for e, m, k, cap in (*sizes, (3, 0, 0, 0), (1, 4096, 7168, 70), (2, 512, 512, 4000)):
        for ragged in (False, True):
            for coded in (False, True):
                problem = problem_of(e, m, k, cap, coded, ragged)
                assert sm90_configs.why_not(problem) is None and sm90_configs.must_run(problem)
                assert sm90_configs.refuses(sm90_configs.config(problem), e, not coded) is None
                for config in sm90_configs.candidates(problem):
                    assert sm90_configs.refuses(config, e, not coded) is None


def test_chosen_are_the_fastest_that_were_measured():
    for (e, m, k, cap), fastest in (
        ((128, 1536, 2048, 8), Config(4, 8, 2, 9, True)),
        ((128, 2048, 768, 8), Config(4, 8, 2, 9, True)),
        ((32, 4096, 7168, 16), Config(4, 16, 2, 8, True)),
        ((32, 4096, 7168, 64), Config(4, 64, 2, 5, False)),
        ((32, 4096, 7168, 512), Config(2, 256, 1, 6, False)),
    ):
        assert sm90_configs.heuristic(problem_of(e, m, k, cap)) == fastest


def test_tiles_go_by_the_rows_that_are_expected():
    """Layers of models, and the tiles that were the fastest for them or nearly."""
    for (e, m, k, cap), expected, tokens in (
        ((128, 1536, 2048, 128), 8, 64),
        ((128, 1536, 2048, 16), 1, 8),
        ((8, 28672, 4096, 128), 32, 64),
        ((8, 28672, 4096, 16), 4, 16),
        ((32, 4096, 7168, 128), 4, 16),
        ((32, 4096, 7168, 512), 16, 64),
        ((1, 4096, 7168, 512), 16, 32),
        ((32, 4096, 7168, 4096), 512, 256),
    ):
        for ragged in (False, True):
            problem = problem_of(e, m, k, cap, ragged=ragged, expected=expected)
            assert sm90_configs.config(problem).tokens == tokens, (e, cap, expected)


def test_tables_say_all_but_the_width(monkeypatch):
    shared = {"backend": "cuda", "variant": "w4a4", "n": 4096, "k": 7168, "e": 32}
    made = [Config(3, 16, 2, 8, True), Config(2, 256, 1, 6, False, raster=4, pair=2)]
    rows = tuple({**shared, "m": m, "config": c.as_dict()} for m, c in zip((16, 512), made))
    monkeypatch.setattr(sm90_configs, "table", lambda *_: rows)
    for ragged in (False, True):
        assert sm90_configs.config(problem_of(32, 4096, 7168, 16, ragged=ragged)) == made[0]
        assert sm90_configs.config(problem_of(32, 4096, 7168, 900, ragged=ragged)) == made[1]
        assert sm90_configs.config(problem_of(32, 4096, 7168, 8, ragged=ragged)).tokens == 8
    assert sm90_configs.config(problem_of(32, 4096, 7168, 16, coded=False)).consumers == 4


def test_few_tokens_take_tiles_that_fill_the_device():
    alone = sm90_configs.heuristic(problem_of(1, 2048, 7168, 4))
    assert alone.tile == (8, 64) and alone.split == 4
    assert sm90_configs.heuristic(problem_of(1, 64, 128, 4)).split == 1


def test_tactics_are_taken_or_refused():
    for config_id, name in enumerate(nvfp4.group_mm_configs()):
        problem = problem_of(4, 256, 1024, 64, tactic=config_id)
        assert sm90_configs.why_not(problem) is None
        if name != "auto":
            config = sm90_configs.config(problem)
            assert f"{config.rows}x{config.tokens}" == name.partition("_")[0]
            assert config.split == int(name.partition("split")[2] or 1)
            assert not sm90_configs.must_run(problem)
    split = nvfp4.group_mm_configs().index("64x8_split4")
    assert "splits K in 4" in sm90_configs.why_not(problem_of(4, 256, 256, 8, tactic=split))


@pytest.mark.parametrize("name", ("a_comp", "e_meta", "sfa", "b_act"))
def test_addresses_that_bulk_copies_cannot_read(name):
    problem = problem_of(4, 256, 1024, 64)
    spec = dataclasses.replace(problem.spec(name), align=8)
    tensors = tuple((n, spec if n == name else t) for n, t in problem.tensors)
    moved = dataclasses.replace(problem, tensors=tensors)
    assert f"{name} must begin" in sm90_configs.why_not(moved) and not sm90_configs.must_run(moved)


def test_parameters_lie_as_the_kernel_reads_them(tmp_path):
    folder = jit._PACKAGE / "ops/nvfp4_group_mm"
    structures = {
        "Problem": (sm90._Problem, folder / "sm90_tiles.cuh"),
        "Gated": (sm90._Gated, folder / "sm90_gated.cuh"),
        "Rows": (sm90._Rows, jit.INCLUDE / "nvfp4.cuh"),
    }
    for header in folder.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    text = [f'#include "{folder / name}"' for name in ("sm90.cu", "sm90_gated.cu")]
    for name, (mirror, header) in structures.items():
        assert fields_of(name, header.read_text()) == sizes_of(mirror)
        text.append(offsets_of(name, mirror))
    for i, c in enumerate(shapes(False)[::7]):
        given = f"{c.consumers}, {c.tokens}, {c.step}, {c.stages}, {c.ctas}, {c.split}, {c.pair}"
        bf16, gated = i % 2 == 0 and sm90_configs.refuses(c) is None, i % 3 == 0
        flags = ", ".join(str(flag).lower() for flag in (gated, bf16, c.inside))
        own = sm90_configs.shared_bytes(c, 5, bf16, gated) - sm90_configs._ALIGNMENT - 4 * 16
        facts = f"T::table == {own} && T::full % 8 == 0 && T::half % 1024 == 0 && T::sums % 16 == 0"
        facts += f" && T::raw % 1024 == 0 && T::a % 16 == 0 && T::few == {c.few}"
        facts += " && T::staging % 16 == 0"
        taken = "T::exchange ? T::taken : T::launched"
        text.append(
            f"namespace fact{i} {{ using T = Traits<{flags}, {given}>;\n"
            f"static_assert({facts} && ({taken}) == {sm90_configs.registers(c)}); }}"
        )
    compiles("\n".join(text), tmp_path)


def given(config, e, m, k, cap, coded=True, ragged=False, offset=0):
    rows = (e * cap,) if ragged else (e, cap)
    code, brain = torch.uint8, torch.bfloat16

    def new(dtype, *size, offset=0):
        count = torch.Size(size).numel()
        return buffer(count, dtype, offset).view(size)

    out = new(brain, *rows, m, offset=offset)
    parts = tuple(new(code, e, m, k // n) for n in (4, 16, 32))
    x = new(code, *rows, k // 2) if coded else new(brain, *rows, k)
    sfb = new(code, *rows, k // 32) if coded else None
    return out, *parts, x, sfb, new(torch.float32, e), new(torch.int32, e + ragged)


def test_few_tokens_are_one_launch(monkeypatch):
    pretend(monkeypatch, sm90)
    out, *parts, x, sfb, alphas, counts = given(FEW, 3, 256, 512, 8, offset=1)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    rows = sm90.rows_of(out, counts, 3, 512)
    launch = sm90.group_launch(FEW, out, tuple(parts), x, sfb, alphas, rows)
    few, every, problem, told = launch.parameters
    assert few == every == (x.data_ptr(), 24, 256, 256, 8, 128)
    assert launch.grid == (132, 1, 1) and launch.threads == 640 and launch.cluster == 1
    assert (told.experts, told.capacity, told.k, told.ragged) == (3, 8, 512, 0)
    assert problem.x == x.data_ptr() and problem.x_scales == sfb.data_ptr()
    assert (problem.features, problem.out_vector, problem.contiguous) == (256, 0, 1)
    assert problem.scale_vector == 1
    shared = dataclasses.replace(FEW, split=4)
    launch = sm90.group_launch(shared, out, tuple(parts), x, sfb, alphas, rows)
    assert launch.cluster == 4 and launch.grid[0] % 4 == 0


def test_many_tokens_are_expanded_before(monkeypatch):
    pretend(monkeypatch, sm90)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    out, *parts, x, sfb, alphas, counts = given(MANY, 3, 256, 512, 300, ragged=True)
    rows = sm90.rows_of(out, counts, 3, 512)
    expanded = torch.empty(900, 512, dtype=torch.float16)
    first = sm90.expand_launch(x, sfb, expanded, rows)
    assert first.grid[1] == 3 and first.threads == 256
    launch = sm90.group_launch(MANY, out, tuple(parts), x, sfb, alphas, rows, expanded)
    few, every, problem, told = launch.parameters
    assert problem.x == x.data_ptr() and "<false, false, 2, 256" in launch.function[1]
    assert few == (expanded.data_ptr(), 900, 1024, 1024, 64, 128) and every[4] == 256
    assert (problem.out_vector, problem.contiguous, told.ragged, told.capacity) == (1, 0, 1, 900)


# --- on a GPU ------------------------------------------------------------------------------------


def compiled(bf16: bool, every: bool) -> list[Config]:
    """Configurations whose kernels are ready."""
    skip_without_it()
    found = shapes(bf16) if every else usual(bf16)
    compile_all([*(sm90.kernel_name(c, bf16) for c in found), sm90.expand_name(bf16)])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", group_mm_cases(), ids=str)
def test_cases_on_a_gpu(case, generator):
    skip_without_it()
    call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
    outcome = call.check(KERNEL)
    refused = sm90_configs.why_not(call.problem) is not None
    assert outcome.status == ("refused" if refused else "ok"), outcome.detail


@pytest.mark.gpu
@every_kernel
@pytest.mark.parametrize("coded", (True, False), ids=("W4A4", "W4A16"))
def test_every_configuration(coded, every, generator):
    """Sums of few bits: each element is the exact one; rows of no token keep their bytes."""
    configs = compiled(not coded, every)
    for e, m, k, cap in ((3, 96, 160, 20), (5, 544, 1376, 9), (2, 320, 1024, 300)):
        for ragged in (False, True):
            name = f"{e} {m} {k} {cap} {ragged}"
            case = GroupCase(name, e, m, k, cap, ragged, coded, values="exact")
            call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
            out = call.arguments["out"]
            for config in configs:
                out.fill_(7)
                sm90.run(config, out, *call.operands)
                wrong = call.differs(0, out, call.expected[0])
                assert wrong is None, f"{config} {name}: {wrong}"


def poisoned(call):
    """Infinities and NaN among BF16 activations: alone, two of a sign, of both signs."""
    x, k = call.inputs["b_act"].view, call.arguments["k"]
    rows = x.flatten(0, -2)
    for i in range(0, rows.shape[0], 2):
        values = ((torch.inf,), (-torch.inf,), (torch.inf, torch.inf), (torch.inf, -torch.inf))[
            i // 2 % 4
        ]
        for j, value in enumerate(values):
            rows[i, (7 * i + 1 + 2 * j) % k] = value
    rows[1::6, k - 1] = torch.nan


def dense_choices(call):
    """A weight whose kept codes are never 0, so that an infinity that it meets stays one."""
    codes = call.inputs["a_comp"].view
    codes |= 0x22


@pytest.mark.gpu
@every_kernel
def test_infinities_are_those_of_the_formula(every, generator):
    configs = compiled(True, every)
    for e, m, k, cap in ((3, 96, 160, 20), (2, 544, 1376, 9), (2, 320, 1024, 300)):
        for ragged in (False, True):
            case = GroupCase(f"inf {m} {ragged}", e, m, k, cap, ragged, coded=False)
            call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
            poisoned(call)
            dense_choices(call)
            out, want = call.arguments["out"], call.expected[0]
            assert want.isinf().any() and want.isnan().any() and want.isfinite().any()
            for config in configs:
                out.fill_(7)
                sm90.run(config, out, *call.operands)
                wrong = call.differs(0, out, want)
                assert wrong is None, f"{config} {case.name}: {wrong}"
                got = out.flatten(0, -2).cpu().double()
                mine = call._exact[2].unsqueeze(1)
                for same in (torch.isnan, torch.isposinf, torch.isneginf):
                    assert torch.equal(same(got) & mine, same(want) & mine), f"{config} {case.name}"


@pytest.mark.gpu
@every_kernel
def test_rows_do_not_depend_on_others_and_runs_are_equal(every, generator):
    configs = compiled(False, every)
    case = GroupCase("rows", 4, 512, 2048, 40, counts="full")
    call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
    a_comp, e_meta, sfa, b_act, sfb, alphas, counts = call.operands
    for config in configs:
        out, again = (torch.full((4, 40, 512), 7.0, dtype=torch.bfloat16).cuda() for _ in "ab")
        sm90.run(config, out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
        for _ in range(3):
            sm90.run(config, again, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
            assert torch.equal(out, again), config
        alone = torch.full((4, 40, 512), 7.0, dtype=torch.bfloat16).cuda()
        spoilt = sfb.clone()
        spoilt[:, 5:] = NAN_SCALE
        sm90.run(config, alone, a_comp, e_meta, sfa, b_act, spoilt, alphas, counts)
        assert torch.equal(out[:, :5], alone[:, :5]), config
        assert alone[:, 5:].isnan().all(), config
