"""Grouped products through Triton: legal configurations, the interpreter, and a GPU."""

from __future__ import annotations

import pytest
import torch

import farro
from farro import nvfp4
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.ops.nvfp4_group_mm import product, triton
from farro.testing import GroupCase, assert_bit_equal, group_mm_cases

from .triton_interpreter import run_again

KERNEL = next(k for k in operator_named("nvfp4_group_mm").kernels if k.backend == "triton")


@pytest.mark.slow  # half a minute; the kernels are compiled for five architectures in any run
def test_in_the_interpreter():
    run_again("nvfp4_group_mm.py")


def problem_of(e, m, k, cap, coded=True, ragged=False, tactic=0, arch="sm_90", expected=0):
    def meta(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    code, brain = torch.uint8, torch.bfloat16
    rows = (e * cap,) if ragged else (e, cap)
    operands = (
        *(meta(code, e, m, k // n) for n in (4, 16, 32)),
        meta(code, *rows, k // 2) if coded else meta(brain, *rows, k),
        meta(code, *rows, k // 32) if coded else None,
        meta(torch.float32, e),
        meta(torch.int32, e + ragged),
    )
    name = "group_mm_ragged" if ragged else "group_mm"
    out = meta(brain, *rows, m)
    return product.problem_of(name, out, operands, (tactic, 1, 1), arch_named(arch), expected)


def test_chosen_configurations_are_legal():
    for e, m, k, cap in ((1, 32, 32, 1), (8, 28672, 4096, 16), (128, 1536, 2048, 8), (3, 0, 0, 0)):
        for ragged in (False, True):
            problem = problem_of(e, m, k, cap, ragged=ragged)
            assert triton.why_not(problem) is None and triton.must_run(problem)
            assert triton.refuses(triton.config(problem), problem) is None
            for config in triton.configs(problem):
                assert triton.refuses(config, problem) is None
                assert triton.Config.from_dict(config.as_dict()) == config


def test_a_table_serves_the_form_that_it_was_tuned_for(monkeypatch):
    """By the benchmark's names; ragged rows count as those of an expert on average."""
    tuned = {
        ("w4a4", 16): (64, 16, 4, 3),
        ("w4a16", 16): (64, 16, 8, 3),
        ("ragged", 16): (128, 16, 8, 3),
        ("ragged", 48): (128, 16, 4, 3),
    }
    rows = [
        {"backend": "triton", "variant": name, "m": m, "e": 8, "n": 256, "k": 512}
        | {"config": triton.Config(*tile).as_dict()}
        for (name, m), tile in tuned.items()
    ]
    monkeypatch.setattr(triton, "table", lambda operator, device: tuple(rows))
    for how, key in (
        ({}, ("w4a4", 16)),
        ({"coded": False}, ("w4a16", 16)),
        ({"ragged": True}, ("ragged", 16)),
        ({"coded": False, "ragged": True}, ("w4a16", 16)),
    ):
        assert triton.config(problem_of(8, 256, 512, 16, **how)) == triton.Config(*tuned[key])
    assert triton.config(problem_of(8, 256, 512, 48, ragged=True)).warps == 4


def test_tactics_are_taken_or_refused():
    names = nvfp4.group_mm_configs()
    for config_id, name in enumerate(names):
        problem = problem_of(4, 256, 1024, 64, tactic=config_id)
        reason = triton.why_not(problem)
        if name == "auto":
            assert reason is None
        elif "split" in name or name.endswith(("x8", "x256")):
            assert f"tactic {name!r}" in reason
            assert not triton.must_run(problem)
        else:
            assert reason is None
            config = triton.config(problem)
            assert f"{config.rows}x{config.tokens}" == name
            assert triton.refuses(config, problem) is None
            assert all(c.tile == config.tile for c in triton.configs(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("case", group_mm_cases(), ids=str)
def test_cases_on_a_gpu(case, generator):
    call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
    outcome = call.check(KERNEL)
    refused = case.tactic and triton.why_not(call.problem) is not None
    assert outcome.status == ("refused" if refused else "ok"), outcome.detail


@pytest.mark.gpu
@pytest.mark.parametrize("count", (10, pytest.param(None, marks=pytest.mark.slow)))
@pytest.mark.parametrize("ragged", (False, True))
@pytest.mark.parametrize("coded", (True, False))
def test_every_configuration_on_a_gpu(coded, ragged, count, generator):
    case = GroupCase("each", 5, 352, 608, 150, ragged, coded)
    call = case.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
    out = call.arguments["out"]
    configs = triton.configs(call.problem)
    for pick in torch.randperm(len(configs), generator=generator)[:count].tolist():
        config = configs[pick]
        out.fill_(7)
        triton.run(config, out, *call.operands)
        found = call.differs(0, out.clone(), call.expected[0])
        assert found is None, f"{config}: {found}"


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31_on_a_gpu(generator):
    """The weight of the last expert begins past 2^31 bytes, and so do its rows of `out`."""
    e, m, k, cap = 80, 8192, 16384, 2048
    parts = [torch.empty(e, m, k // n, dtype=torch.uint8, device="cuda") for n in (4, 16, 32)]
    assert parts[0][:-1].numel() > 2**31 and (e - 1) * cap * m > 2**30
    last = GroupCase("last", 1, m, k, 3, counts="full")
    call = last.build("cuda", int(torch.randint(2**31, (1,), generator=generator)))
    given = call.arguments
    for part, name in zip(parts, ("a_comp", "e_meta", "sfa")):
        part[-1] = given[name][0]
    x = torch.empty(e, cap, k // 2, dtype=torch.uint8, device="cuda")
    scales = torch.empty(e, cap, k // 32, dtype=torch.uint8, device="cuda")
    x[-1, :3], scales[-1, :3] = given["b_act"][0], given["sfb"][0]
    counts = torch.zeros(e, dtype=torch.int32, device="cuda")
    counts[-1] = 3
    alphas = given["alphas"].repeat(e)
    out = torch.full((e, cap, m), 7, dtype=torch.bfloat16, device="cuda")
    nvfp4.group_mm(out, *parts, x, scales, alphas, counts, m, k, backend="triton")
    assert call.differs(0, out[-1:, :3], call.expected[0]) is None
    assert (out[-1, 3:] == 7).all() and (out[0] == 7).all()


@pytest.mark.gpu
def test_replays_see_new_counts(generator):
    call = GroupCase("replay", 4, 128, 256, 40, counts="full").build("cuda", 3)
    given = {k: v for k, v in call.arguments.items() if k != "out"}
    counts = given["expert_num_tokens"]
    want = call.function(**given, backend="triton")
    out = torch.full_like(want, 7)
    farro.nvfp4.group_mm(out, **given, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        farro.nvfp4.group_mm(out, **given, backend="triton")
    for new in ([0, 40, 3, 17], [41, -2, 0, 1], [0, 0, 0, 0]):
        counts.copy_(torch.tensor(new))
        out.fill_(7)
        graph.replay()
        for e, count in enumerate(new):
            count = min(max(count, 0), 40)
            assert_bit_equal(out[e, :count], want[e, :count])
            assert (out[e, count:] == 7).all()
