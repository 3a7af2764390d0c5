"""moe_ffn through Triton: legal configurations, compiled kernels, the interpreter, and a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro import dispatch
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.formats.int8_group import group_count
from farro.ops.moe_ffn import reference, triton, triton_configs
from farro.ops.moe_ffn.checks import ARGUMENTS
from farro.ops.moe_ffn.triton import Config
from farro.ops.moe_ffn.warm import operands
from farro.problem import Problem
from farro.testing import MoeCase, assert_bit_equal, moe_ffn_cases

pytest.importorskip("triton")
from farro.triton_launch import compile_only, resources

from .triton_interpreter import run_again
from .triton_silu import check_silu

KERNELS = {k.backend: k for k in operator_named("moe_ffn").kernels}
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
QWEN, MIXTRAL, DEEPSEEK = (128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 1, 7168, 2048)


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def meta(tokens, experts, topk, h, i, group_size, arch="sm_90", interleaved=False):
    """A layer's tensors and its problem, as data only."""
    given = operands("meta", (tokens, i, h), experts, group_size, topk, torch.int64)
    params = {
        "group_size": group_size,
        "interleaved": interleaved,
        "output_dtype": torch.bfloat16,
    }
    problem = Problem.of("moe_ffn", given, params, arch_named(arch))
    return tuple(given[name] for name in ARGUMENTS), problem


def launches(config, tensors, group_size, interleaved):
    """The three launches that are moe_ffn's own, with their arguments."""
    x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, ids, weights = tensors
    (experts, i, h), routes = w_down.shape, ids.numel()

    def new(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    offsets, src_tok = new(torch.int32, experts + 1), new(torch.int32, routes)
    codes, y = new(torch.int8, routes, i), new(torch.bfloat16, routes, h)
    scale = new(torch.float32, routes, group_count(i, group_size))
    out, dest = new(torch.bfloat16, *x.shape), new(torch.int32, *ids.shape)
    first = (x, scale_x, w_gate_up, scale_gate_up, offsets, src_tok, codes, scale)
    second = (codes, scale, w_down, scale_down, offsets, y)
    third = (y, dest, weights, out)
    yield triton.prepare_gate_up(config.gate_up, *first, group_size, interleaved), first
    yield triton.prepare_down(config.down, *second, group_size), second
    yield triton.prepare_combine(config.block, *third), third


def compiled(config, tensors, problem):
    size, interleaved = problem.param("group_size"), problem.param("interleaved")
    for launch, taken in launches(config, tensors, size, interleaved):
        args, capability = launch.args(*taken), problem.arch.capability
        yield compile_only(launch.kernel, args, launch.options, capability)


@pytest.mark.parametrize(
    "arch, tokens, layer, group_size",
    [
        *((arch, 64, QWEN, 64) for arch in ARCHS if arch != "sm_89"),  # as sm_80 and sm_120
        # a group of several products takes the compiler long
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sm_89", 64, QWEN, 64),
                *((arch, 64, QWEN, group) for arch in ARCHS for group in (128, 256)),
                *(("sm_80", 8192, QWEN, 128), ("sm_80", 8192, MIXTRAL, 256)),
                *(("sm_90", 8192, MIXTRAL, 256), ("sm_90", 8192, DEEPSEEK, 128)),
                *(("sm_90", 1, QWEN, 32), ("sm_120", 8192, QWEN, 256)),
            )
        ),
    ],
)
def test_chosen_configurations_compile(arch, tokens, layer, group_size):
    """Tensor cores, no spills, and no more shared memory than the choice assumed."""
    tensors, problem = meta(tokens, *layer, group_size, arch)
    config = triton.config(problem)
    first, second, third = compiled(config, tensors, problem)
    for code, tile, columns in (
        (first, config.gate_up, 2 * config.gate_up.columns),
        (second, config.down, config.down.columns),
    ):
        ptx = code.asm["ptx"]
        assert any(name in ptx for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))
        registers, stack = resources(code)
        assert stack <= 64, f"{tile} spills {stack} bytes ({registers} registers)"
        limit = triton_configs.shared_bytes(tile, columns, group_size)
        assert code.metadata.shared <= limit, tile
        if tile.stages > 1:
            assert "cp.async.cg.shared.global" in ptx, "rows are not copied 16 bytes at a time"
        assert "fma.rn.f32" in ptx and "fma.rn.ftz" not in ptx
    assert "div.rn.f32" in first.asm["ptx"] and "div.full" not in first.asm["ptx"]
    assert "fma.rn.f32" not in third.asm["ptx"]  # products are rounded before they are added
    assert resources(third)[1] == 0


@pytest.mark.parametrize("arch", (*ARCHS, "sm_86", "sm_121"))
def test_chosen_configurations_are_legal(arch):
    """And so are those that a tuner times; each survives the way to a table and back."""
    for layer in (QWEN, MIXTRAL, DEEPSEEK, (1, 1, 1, 1), (4096, 70, 33, 0), (0, 2, 8, 8)):
        for tokens in (0, 1, 16, 300, 8192):
            for group_size in (32, 64, 128, 256):
                _, problem = meta(tokens, *layer, group_size, arch)
                assert triton.why_not(problem) is None and triton.must_run(problem)
                assert triton.refuses(triton.config(problem), problem) is None
    _, problem = meta(128, *QWEN, 128, arch)
    found = triton.configs(problem)
    assert len(found) > 10 and len(set(found)) == len(found)
    for config in found:
        assert triton.refuses(config, problem) is None
        assert Config.from_dict(config.as_dict()) == config


def test_illegal_configurations_say_why():
    _, problem = meta(128, *QWEN, 256, "sm_120")
    usual = triton.config(problem)

    def told(**changes) -> str:
        tile = dataclasses.replace(usual.gate_up, **changes)
        return str(triton.refuses(dataclasses.replace(usual, gate_up=tile), problem))

    assert told() == "None"
    assert "powers of two" in told(columns=48)
    assert "4 or 8 warps" in told(warps=2)
    assert "compile too long" in told(columns=32)
    assert "spill" in told(tokens=128, columns=128)
    assert "shared memory" in told(stages=9)
    assert "block" in str(triton.refuses(dataclasses.replace(usual, block=100), problem))


def test_enormous_problems_are_refused():
    _, problem = meta(1 << 30, *QWEN, 256)
    assert "routes" in str(triton.why_not(problem)) and not triton.must_run(problem)


def test_in_the_interpreter():
    run_again("moe_ffn.py")


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", moe_ffn_cases(), ids=str)
def test_cases_on_a_gpu(case, generator):
    outcome = case.build("cuda", seed_of(generator)).check(KERNELS["triton"])
    assert outcome.status == "ok", outcome.detail


@pytest.mark.gpu
def test_silu_on_a_gpu():
    check_silu("cuda")


def layer_of(generator, experts, h, i, group_size=128):
    """Weights of a layer as quantizing normal values leaves them, on the GPU."""
    rows = {"w_gate_up": (experts, 2 * i, h), "w_down": (experts, h, i)}
    given = {}
    for name, shape in rows.items():
        values = torch.randn(shape, generator=generator) * shape[2] ** -0.5
        codes, scale = farro.quantize_int8_groups(values.cuda(), group_size)
        given[name] = codes.transpose(1, 2)
        given[name.replace("w_", "scale_")] = scale.transpose(1, 2).contiguous()
    return given


def routed(generator, tokens, experts, topk, h, group_size=128):
    x = torch.randn(tokens, h, generator=generator).cuda()
    codes, scale = farro.quantize_int8_groups(x, group_size)
    bias = torch.randn(experts, generator=generator) * 2  # some experts get most, some nothing
    logits = torch.randn(tokens, experts, generator=generator) + bias
    top, ids = logits.topk(topk, 1)
    weights = torch.softmax(top, 1)
    given = {"x_int8": codes, "scale_x": scale, "topk_ids": ids, "topk_weights": weights}
    return {name: tensor.cuda() for name, tensor in given.items()}


def stages(given, group_size, interleaved=False):
    """What the launches leave behind: the plan, codes and scales, BF16 rows, and the result."""
    tensors = tuple(given[name] for name in ARGUMENTS)
    problem = dispatch._DESCRIBERS[farro.moe_ffn](**given, group_size=group_size)[1]
    layer = triton.bind(triton.config(problem))
    (experts, i, h), routes = given["w_down"].shape, given["topk_ids"].numel()
    plan = layer.routed(given["topk_ids"], experts)
    codes = torch.full((routes, i), 99, dtype=torch.int8, device="cuda")
    scale = torch.full((routes, group_count(i, group_size)), -1.0, device="cuda")
    first = (*tensors[:4], plan[0], plan[2])
    layer.gate_up(*first, codes, scale, group_size, interleaved)
    y = torch.full((routes, h), -1.0, dtype=torch.bfloat16, device="cuda")
    layer.down(codes, scale, *tensors[4:6], plan[0], y, group_size)
    out = torch.empty(given["x_int8"].shape, device="cuda")
    layer.combine(y, plan[1], given["topk_weights"], out)
    return plan, codes, scale, y, out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (1, 7, 64, 300, 1000, 4096))
def test_each_launch_on_a_gpu(tokens, generator):
    """Codes as near as silu's last bits allow; from these codes on, every bit is the formula's."""
    experts, topk, h, i, group_size = 40, 4, 512, 384, 128
    given = layer_of(generator, experts, h, i) | routed(generator, tokens, experts, topk, h)
    plan, codes, scale, y, out = stages(given, group_size)
    offsets, dest, src_tok, _ = (part.cpu() for part in plan)
    here = {name: tensor.cpu() for name, tensor in given.items()}
    bounds = offsets.tolist()
    assert bounds[-1] == tokens * topk
    for e in range(experts):
        rows = slice(bounds[e], bounds[e + 1])
        token = src_tok[rows].long()
        if not len(token):
            continue
        want = reference.hidden(
            *(here["x_int8"][token], here["scale_x"][token]),
            *(here["w_gate_up"][e], here["scale_gate_up"][e], group_size, False),
        )
        mine = codes[rows].cpu(), scale[rows].cpu()
        assert ((mine[1] - want[1]).abs() <= 2.0**-20 * want[1]).all()
        steps = (mine[0].int() - want[0].int()).abs()
        assert steps.max() <= 1 and float((steps != 0).double().mean()) < 1e-3
        down = reference.down(*mine, here["w_down"][e], here["scale_down"][e], group_size)
        assert_bit_equal(y[rows].cpu(), down, f"expert {e}")
    total = torch.empty(tokens, h)
    rows = y.cpu()[dest.long()]
    reference.combine(rows, dest >= 0, here["topk_weights"], total)
    assert_bit_equal(out.cpu(), total)
    whole = farro.moe_ffn(**given, group_size=128, output_dtype=torch.float32, backend="triton")
    assert_bit_equal(whole, out)


@pytest.mark.gpu
@pytest.mark.parametrize("count", (2, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize("group_size, layout", [(256, "concatenated"), (64, "interleaved")])
def test_some_configurations_on_a_gpu(group_size, layout, count, generator):
    case = MoeCase("each", 200, 2, 6, 520, 300, group_size, layout)
    call = case.build("cuda", seed_of(generator))
    found = triton.configs(call.problem)
    for pick in torch.randperm(len(found), generator=generator)[:count].tolist():
        config = found[pick]
        out = torch.full((200, 520), float("nan"), device="cuda")
        triton.run(config, *call.operands, out, group_size, layout == "interleaved")
        assert_bit_equal(out, call.expected[0], str(config))


@pytest.mark.gpu
def test_rows_of_a_token_do_not_depend_on_the_batch_on_a_gpu(generator):
    given = layer_of(generator, 16, 256, 256) | routed(generator, 4096, 16, 2, 256)
    whole = farro.moe_ffn(**given, group_size=128, backend="triton")
    for tokens in (1, 2, 17, 64, 129, 1000):
        names = ("x_int8", "scale_x", "topk_ids", "topk_weights")
        fewer = {**given, **{name: given[name][:tokens] for name in names}}
        few = farro.moe_ffn(**fewer, group_size=128, backend="triton")
        assert_bit_equal(few, whole[:tokens], f"{tokens} tokens")


@pytest.mark.gpu
def test_replays_see_new_routing(generator):
    """Skewed, empty and dropped experts, in a graph that was captured with others."""
    experts, topk, tokens, h = 24, 4, 96, 256
    weights = layer_of(generator, experts, h, 256)
    static = weights | routed(generator, tokens, experts, topk, h)
    farro.moe_ffn(**static, group_size=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = farro.moe_ffn(**static, group_size=128)
    for ids in (None, torch.zeros(tokens, topk), torch.full((tokens, topk), experts), None):
        new = routed(generator, tokens, experts, topk, h)
        if ids is not None:
            new["topk_ids"] = ids.long().cuda()
        for name, tensor in new.items():
            static[name].copy_(tensor)
        out.fill_(7)
        graph.replay()
        assert_bit_equal(out, farro.moe_ffn(**weights, **new, group_size=128))


@pytest.mark.gpu
def test_memory_on_a_gpu(generator):
    """Of what grows with the routes there are the codes with their scales, and the BF16 rows."""
    tokens, topk, h, i = 2048, 8, 1024, 512
    given = layer_of(generator, 8, h, i) | routed(generator, tokens, 8, topk, h)
    farro.moe_ffn(**given, group_size=128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    farro.moe_ffn(**given, group_size=128)
    used = torch.cuda.max_memory_allocated() - before
    routes = tokens * topk
    needed = routes * (i + 4 * i // 128 + 2 * h) + 3 * 4 * routes + 2 * tokens * h
    assert used <= needed + (8 << 20), f"{used} bytes, {needed} expected"


@pytest.mark.gpu
def test_nothing_synchronizes_on_a_gpu(generator):
    given = layer_of(generator, 8, 256, 256) | routed(generator, 33, 8, 2, 256)
    farro.moe_ffn(**given, group_size=128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        farro.moe_ffn(**given, group_size=128)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31_on_a_gpu(generator):
    """The weights of the last expert begin past 2^31 bytes."""
    experts, h, i = 140, 4096, 2048
    case = MoeCase("last", 3, 1, 1, h, i, 128, ids="one")
    given = case.build("cuda", seed_of(generator)).arguments
    want = farro.moe_ffn(**given, backend="triton")
    for name in ("w_gate_up", "w_down", "scale_gate_up", "scale_down"):
        many = given[name].new_empty(experts, *given[name].shape[1:])
        many[-1] = given[name][0]
        given[name] = many
    assert given["w_gate_up"][:-1].numel() > 2**31
    given["topk_ids"] = torch.full_like(given["topk_ids"], experts - 1)
    assert_bit_equal(farro.moe_ffn(**given, backend="triton"), want)
