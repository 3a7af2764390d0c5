"""moe_ffn on SM90a: legal configurations, what the launches are given, and results on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import replace

import pytest
import torch

import farro
from farro.arch import arch_named
from farro.catalogue import operator_named
from farro.cuda import jit
from farro.cuda.launch import Launch, kernel_function
from farro.formats.int8_group import GROUP_SIZES, group_count
from farro.ops.moe_ffn import reference, sm90, sm90_configs, sm90_launches
from farro.ops.moe_ffn.checks import ARGUMENTS
from farro.ops.moe_ffn.sm90_configs import Config, Tile
from farro.ops.moe_ffn.triton_configs import best_pairs
from farro.ops.moe_ffn.warm import operands
from farro.problem import Problem
from farro.testing import MoeCase, assert_bit_equal

from .native_facts import compiles, fields_of, offsets_of, pretend, sizes_of
from .silu_of_gates import check_every_gate
from .sm90_forced import compile_all, skip_without_it

KERNEL = next(k for k in operator_named("moe_ffn").kernels if k.backend == "cuda")
QWEN, MIXTRAL, DEEPSEEK = (128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 1, 7168, 2048)
EXPERTS = 128  # whose tables fit beside every tile that the tests force


def problem_of(tokens, experts, topk, h, i, group_size, interleaved=False, given=None):
    given = given or operands("meta", (tokens, i, h), experts, group_size, topk, torch.int64)
    params = {"group_size": group_size, "interleaved": interleaved}
    params |= {"output_dtype": torch.bfloat16}
    return Problem.of("moe_ffn", given, params, arch_named("sm_90"))


def shapes(gated, group_size):
    """Each tile with the deepest ring."""
    return list(sm90_configs.tiles(gated, group_size, EXPERTS))


def some_shapes(gated, group_size):
    """A quarter of the tiles, others at each group size; the fewest CTAs of down's."""
    found = {}
    for t in shapes(gated, group_size):
        number = t.routes.bit_length() + t.warpgroups.bit_length() + 2 * t.waves
        if number % len(GROUP_SIZES) == GROUP_SIZES.index(group_size):
            kind = t.routes, t.warpgroups, t.waves
            found[kind] = t if gated else found.get(kind, t)
    return list(found.values())


def pairs(group_size, choice=shapes):
    """Configurations that together have the chosen tiles of both products."""
    ups, downs = (choice(gated, group_size) for gated in (True, False))
    count = max(len(ups), len(downs))
    return [Config(ups[n % len(ups)], downs[n % len(downs)]) for n in range(count)]


def test_chosen_configurations_are_legal():
    for layer in (QWEN, MIXTRAL, DEEPSEEK, (1, 1, 16, 16), (4096, 70, 48, 32), (0, 2, 16, 16)):
        for tokens in (0, 1, 16, 300, 8192):
            for group_size in GROUP_SIZES:
                problem = problem_of(tokens, *layer, group_size)
                assert sm90_configs.why_not(problem) is None and sm90_configs.must_run(problem)
                chosen = sm90_configs.config(problem)
                assert sm90_configs.refuses(chosen, problem) is None
    found = sm90_configs.configs(problem_of(128, *QWEN, 128))
    assert len(found) > 10 and len(set(found)) == len(found)
    for config in found:
        assert sm90_configs.refuses(config, problem_of(128, *QWEN, 128)) is None
        assert Config.from_dict(config.as_dict()) == config


def test_the_choice_follows_the_routes():
    def chosen(tokens, layer, group_size=128):
        return sm90_configs.heuristic(problem_of(tokens, *layer, group_size))

    assert chosen(1, QWEN).gate_up.rows == 128, "one token's experts leave few tiles"
    assert chosen(64, QWEN).gate_up.rows == 256 and chosen(64, QWEN).gate_up.routes <= 32
    assert chosen(64, MIXTRAL).gate_up.waves == 2 and chosen(64, MIXTRAL).down.routes == 32
    # as many rows as a tile of 64 has, if the routes fell evenly: not the narrowest tile there is
    assert chosen(128, MIXTRAL).down.routes == chosen(128, MIXTRAL).gate_up.routes == 64
    assert chosen(8192, QWEN).down == chosen(8192, MIXTRAL).down
    assert chosen(8192, MIXTRAL).gate_up.routes == 128


def test_the_best_tiles_of_both_products_are_paired():
    usual = Config(Tile(16, 1, 1, 5), Tile(32, 1, 1, 5))
    ups = [replace(usual, gate_up=Tile(16, 1, 1, stages)) for stages in (6, 7, 8)]
    downs = [replace(usual, down=Tile(32, 1, 1, stages)) for stages in (6, 7)]
    times = dict(zip((usual, *ups, *downs), (10.0, 9.0, 12.0, 8.0, 13.0, 7.0)))
    pairs = best_pairs(times)
    assert Config(ups[2].gate_up, downs[1].down) == pairs[0]
    assert not set(pairs) & set(times)
    assert len(pairs) == 4  # of nine, five were timed


def test_illegal_tiles_say_why():
    usual = Tile(16, 4, 1, 4)

    def told(gated=True, group=128, experts=128, **changes):
        tile = dataclasses.replace(usual, **changes)
        return str(sm90_configs.refuses_tile(tile, gated, group, experts))

    assert told() == "None"
    assert "positive" in told(stages=True)
    assert "gathered" in told(gated=False, gathered=True)
    assert "tile" in told(routes=24) and "tile" in told(waves=2)
    assert "ring" in told(group=256, stages=2)
    assert "registers" in told(routes=64)
    assert "shared memory" in told(stages=12) and "shared memory" in told(experts=4096, stages=6)


@pytest.mark.parametrize("name", ("x_int8", "w_gate_up", "w_down"))
def test_rows_that_cannot_be_copied(name):
    problem = problem_of(4, *QWEN, 128)
    spec = problem.spec(name)

    def changed(**changes):
        moved = dataclasses.replace(spec, **changes)
        tensors = tuple((n, moved if n == name else t) for n, t in problem.tensors)
        other = dataclasses.replace(problem, tensors=tensors)
        assert not sm90_configs.must_run(other)
        return str(sm90_configs.why_not(other))

    assert "aligned to 8" in changed(align=8)
    assert "multiple of 16" in changed(stride=tuple(s if s == 1 else s + 8 for s in spec.stride))
    assert "needed 1" in changed(stride=tuple(16 if s == 1 else s for s in spec.stride))
    assert "multiple of 8" in str(sm90_configs.why_not(problem_of(4, 2, 1, 32, 36, 32)))


def test_parameters_lie_as_the_kernels_read_them(tmp_path):
    folder = jit._PACKAGE / "ops/moe_ffn"
    text = []
    for file, named, structures in (
        ("sm90.cu", "sm90_layout.cuh", {"Problem": sm90_launches._Problem}),
        (
            "sm90_route.cu",
            "sm90_route.cu",
            {
                "Routes": sm90_launches._Routes,
                "Sum": sm90_launches._Sum,
                "Gather": sm90_launches._Gather,
            },
        ),
    ):
        source = (folder / named).read_text()
        facts = [f'#include "{folder / file}"']
        for name, mirror in structures.items():
            assert fields_of(name, source) == sizes_of(mirror)
            facts.append(offsets_of(name, mirror))
        text.append(facts)
    for gated in (True, False):
        for group_size in GROUP_SIZES:
            for n, t in enumerate(shapes(gated, group_size)[::5]):
                gathers = gated and not t.gathered
                given = f"{str(gated).lower()}, {str(gathers).lower()}, {group_size}, {t.routes}, "
                given += f"{t.warpgroups}, {t.waves}, {t.stages}, {t.ctas}"
                own = sm90_configs.shared_bytes(t, gated, group_size, 9)
                facts = f"T::table == {own - sm90_configs._ALIGNMENT - 8 * 10}"
                facts += f" && T::CLUSTER == {sm90_configs.cluster_of(t, gated, group_size)}"
                facts += " && T::results % 1024 == 0 && T::rates % 16 == 0 && T::full % 8 == 0"
                taken = "T::exchange ? T::taken : T::launched"
                facts += f" && ({taken}) == {sm90_configs.registers(t, gated)}"
                text[0].append(
                    f"namespace fact{int(gated)}_{group_size}_{n} {{ using T = Traits<{given}>;\n"
                    f"static_assert({facts}); }}"
                )
    for n, facts in enumerate(text):
        (tmp_path / str(n)).mkdir()
        for header in folder.glob("*.cuh"):
            (tmp_path / str(n) / header.name).write_text(header.read_text())
        compiles("\n".join(facts), tmp_path / str(n))


@pytest.mark.parametrize("interleaved", (False, True))
def test_what_the_launches_are_given(interleaved, monkeypatch):
    pretend(monkeypatch, sm90_launches)
    for name in ("encode_experts", "encode_pairs"):
        monkeypatch.setattr(sm90_launches.tensor_map, name, lambda *what, name=name: (name, *what))
    monkeypatch.setattr(
        sm90_launches, "resident_clusters", lambda d, f, t, s, cluster, ctas: 132 // cluster
    )
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    experts, topk, h, i, group_size, tokens = 3, 4, 256, 96, 128, 5
    given = operands("cpu", (tokens, i, h), experts, group_size, topk, torch.int32)
    x, scale_x, w, scale_w, w_down, scale_down, ids, weights = (given[n] for n in ARGUMENTS)
    routes, base = ids.numel(), 1 << 20
    scratch = sm90_launches.Scratch(routes, experts, h, i, group_size)
    assert scratch.pitch == 96 and scratch.groups == 1
    assert all(at % 256 == 0 for at in scratch.at.values())
    assert scratch.bytes >= routes * (2 * h + 96 + 4 + 8) + 16

    tile = Tile(16, 1, 1, 4)
    first = sm90_launches.gate_up_launch(
        tile, x, scale_x, w, scale_w, routes, scratch, base, group_size, interleaved
    )
    described, problem = first.parameters
    steps = (2 * h, h) if interleaved else (h, i * h)
    assert described == ("encode_pairs", w.data_ptr(), (3, i, h), (2 * i * h, *steps), 4)
    assert (problem.features, problem.k, problem.out_pitch, problem.experts) == (i, h, 96, 3)
    assert problem.interleaved == interleaved and problem.w_scale_vector == 1
    # four CTAs of 32 features share a group of 128; at most 4 tiles, for 20 routes and 3 experts
    assert first.cluster == 4 and first.grid == (16, 1, 1) and first.threads == 256

    second = sm90_launches.down_launch(tile, w_down, scale_down, routes, scratch, base, group_size)
    described, codes, results, problem = second.parameters
    assert results == (base + scratch.at["y"], routes, 2 * h, 2 * h, 8, 128)
    assert described == ("encode_experts", w_down.data_ptr(), (3, h, i), (h * i, i), 64)
    assert codes == (base + scratch.at["codes"], routes, i, 96, 8, 128)
    assert (problem.features, problem.k, problem.out, problem.out_vector) == (
        *(h, i, base + scratch.at["y"], 2),
    )
    assert second.cluster == 1 and second.grid == (16, 1, 1)

    # rows that are gathered, and their scales [groups][routes], lie where BF16 rows will
    gather = sm90_launches.gather_launch(x, scale_x, experts, routes, scratch, base)
    (given_to_it,) = gather.parameters
    second_at = base + scratch.at["y"] + routes * h
    assert (given_to_it.rows, given_to_it.scales) == (base + scratch.at["y"], second_at)
    wide = Tile(64, 2, 1, 4, gathered=True)
    after = sm90_launches.gate_up_launch(
        wide, x, scale_x, w, scale_w, routes, scratch, base, group_size, interleaved
    )
    _, rows, problem = after.parameters
    assert "moe_gate_up_gathered<" in after.function[1]
    assert rows == (base + scratch.at["y"], routes, h, h, 32, 128)
    assert (problem.x_scale, problem.x_scale_row, problem.x_scale_group) == (second_at, 1, routes)

    plan = sm90_launches.plan_launch(ids, experts, scratch, base)
    assert plan.grid == (1, 1, 1) and "moe_plan<int, 1>" in plan.function[1]
    out = torch.empty(tokens, h, dtype=torch.float16)
    last = sm90_launches.sum_launch(weights, out, scratch, base)
    assert "moe_sum<Float16, 8>" in last.function[1] and last.grid == (5, 1, 1)
    out, many = torch.empty(1025, h), torch.ones(1025, topk)
    last = sm90_launches.sum_launch(many, out, sm90_launches.Scratch(4100, 3, h, i, 128), base)
    assert "moe_sum_many<float>" in last.function[1] and last.grid == (129, 1, 1)
    tensors, narrow = tuple(given[n] for n in ARGUMENTS), Tile(8, 1, 1, 4)
    for tile, name in ((narrow, None), (wide, "moe_gather<")):
        out = torch.empty(tokens, h)
        told = sm90_launches.launches(
            Config(tile, narrow), tensors, out, scratch, base, group_size, interleaved
        )
        names = [launch.function[1].split("<")[0] + "<" for launch in told]
        product = "moe_gate_up_gathered<" if name else "moe_gate_up<"
        expected = ["moe_plan<", *([name] if name else []), product, "moe_down<", "moe_sum<"]
        assert names == expected

    many = torch.zeros(3000, 4, dtype=torch.int64)
    plan = sm90_launches.plan_launch(
        many, experts, sm90_launches.Scratch(12000, 3, h, i, 128), base
    )
    assert plan.grid == (8, 1, 1) and plan.cluster == 8 and "<long long, 8>" in plan.function[1]


def test_auto_takes_it_where_it_can_run():
    given = operands("meta", (64, 768, 2048), 128, 128, 8, torch.int64)
    told = farro.explain(farro.moe_ffn, **given, group_size=128, arch="sm_90")
    assert told.chosen == "moe_ffn.cuda_sm90"
    given["w_down"] = given["w_down"].transpose(1, 2).contiguous().transpose(1, 2)
    given["x_int8"] = torch.empty(64, 4096, dtype=torch.int8, device="meta")[:, ::2]
    told = farro.explain(farro.moe_ffn, **given, group_size=128, arch="sm_90")
    assert told.chosen == "moe_ffn.triton"


FAR = (20.0, 80.0, 84.0, 87.0, 87.5, 88.0, 88.5, 89.0, 90.0, 91.0)


@pytest.mark.parametrize(
    "backend",
    (
        *("reference", "cpu"),
        *(pytest.param(backend, marks=pytest.mark.gpu) for backend in ("triton", "cuda")),
    ),
)
def test_far_gates(backend):
    """silu of -88 and below is tiny, not zero: an up projection of some 2^100 brings it back."""
    if backend == "cuda":
        skip_without_it()
    size, gates = 32, torch.tensor(FAR)
    tokens = len(gates)
    x = torch.zeros(tokens, size, dtype=torch.int8)
    x[:, 0] = 1
    rows = torch.zeros(1, 2 * size, size, dtype=torch.int8)
    rows[0, :size, 0], rows[0, size:, 0] = -1, torch.arange(127 - size, 127)
    rows[0, -1, 0] = 127
    scales = torch.ones(1, 1, 2 * size)
    scales[..., size:] = 2.0**100
    identity = torch.eye(size, dtype=torch.int8)[None]
    layer = (x, gates[:, None], rows.transpose(1, 2), scales, identity, torch.ones(1, 1, size))
    routes = torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)
    device = "cuda" if backend in ("triton", "cuda") else "cpu"
    given = [t.to(device) for t in (*layer, *routes)]
    if device == "cuda":  # as preferred: rows of weights
        given[4] = given[4].transpose(1, 2).contiguous().transpose(1, 2)
    out = farro.moe_ffn(*given, group_size=size, output_dtype=torch.float32, backend=backend)
    up = (gates[:, None] * rows[0, size:, 0]).bfloat16().double() * 2.0**100
    want = torch.nn.functional.silu(-gates.double())[:, None] * up
    assert (want != 0).all()
    # half a code of at least 95, and BF16 rows
    torch.testing.assert_close(out.cpu().double(), want, rtol=2.0**-7, atol=0)


# --- on a GPU ------------------------------------------------------------------------------------


def seed_of(generator):
    return int(torch.randint(2**31, (1,), generator=generator))


def cases(group_size):
    i = {32: 48, 64: 208, 128: 400, 256: 784}[group_size]
    h = 2 * group_size + 32
    for layout in ("concatenated", "interleaved"):
        for values in ("exact", "usual"):
            name = f"{layout} {values}"
            yield MoeCase(name, 70, 3, 6, h, i, group_size, layout, values=values)
    yield MoeCase("skewed", 300, 2, 9, 144, 32, group_size, ids="skewed")
    yield MoeCase("one expert", 150, 1, 5, h, 3 * group_size + 16, group_size, ids="one")
    yield MoeCase("one token", 1, 8, 128, 272, 32, group_size, values="usual")
    yield MoeCase("nonfinite", 40, 2, 4, 160, 80, group_size, values="nonfinite", ids="twice")
    none = {"ids": "none", "output": torch.bfloat16, "id_dtype": torch.int32}
    yield MoeCase("no routes", 40, 2, 4, 160, 80, group_size, **none)
    few = {"values": "usual", "output": torch.float16}
    yield MoeCase("empty experts", 5, 2, 120, 336, 1040, group_size, "interleaved", **few)
    yield MoeCase("strided scales", 33, 2, 3, 96, 64, group_size, scales="transposed")


def check_tiles(group_size, found, generator):
    """The reference's result, as far as silu's last bits allow, and the same in every run."""
    skip_without_it()
    wanted = [sm90_launches.kernel_name(c.gate_up, True, group_size) for c in found]
    wanted += [sm90_launches.kernel_name(c.down, False, group_size) for c in found]
    compile_all(wanted)
    for case in cases(group_size):
        call = case.build("cuda", seed_of(generator))
        assert sm90_configs.why_not(call.problem) is None, case
        call.precise = False
        for config in found:
            outs = [torch.full_like(call.expected[0], float("nan"), device="cuda") for _ in "ab"]
            for out in outs:
                sm90.run(config, *call.operands, out, group_size, call.interleaved)
            wrong = call.differs(0, outs[0], call.expected[0])
            assert wrong is None, f"{case} {config}: {wrong}"
            assert_bit_equal(*outs, f"{case} {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_some_tiles_on_a_gpu(group_size, generator):
    check_tiles(group_size, pairs(group_size, some_shapes), generator)


@pytest.mark.gpu
@pytest.mark.slow  # compiles 70 to 80 kernels
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_tile_on_a_gpu(group_size, generator):
    check_tiles(group_size, pairs(group_size), generator)


@pytest.mark.gpu
def test_silu_of_every_gate_on_a_gpu(tmp_path):
    skip_without_it()
    source = tmp_path / "silus.cu"
    source.write_text(
        f'#include "{jit._PACKAGE / "ops/moe_ffn/swiglu.cuh"}"\n'
        "__global__ void silus(const float* x, float* y) {\n"
        "  const int at = blockIdx.x * 256 + threadIdx.x;\n"
        "  y[at] = farro::silu(x[at]);\n}\n"
    )

    def silu(gates):
        x, y = gates.cuda(), torch.empty(1 << 16, device="cuda")
        device = x.get_device()
        function = kernel_function(str(source), "silus", "sm_90a", device, 0)
        given = tuple(ctypes.c_void_p(t.data_ptr()) for t in (x, y))
        Launch(device, function, (256, 1, 1), 256, 0, 1, given).on_current_stream()
        return y

    check_every_gate(silu, 2.0**-148)


@pytest.mark.gpu
@pytest.mark.parametrize("gathered", (False, True))
@pytest.mark.parametrize("tokens", (1, 7, 64, 300, 1000, 4096))
def test_each_launch_on_a_gpu(tokens, gathered, generator):
    """Codes as near as silu's last bits allow; from these codes on, every bit is the formula's."""
    skip_without_it()
    from .test_moe_ffn_triton import layer_of, routed

    experts, topk, h, i, group_size = 40, 4, 512, 384, 128
    given = layer_of(generator, experts, h, i) | routed(generator, tokens, experts, topk, h)
    tensors = tuple(given[name] for name in ARGUMENTS)
    config = sm90_configs.config(problem_of(0, 0, 0, 0, 0, group_size, given=given))
    if gathered:
        tile = sm90_configs.deepest(Tile(128, 2, 2, 2, gathered=True), True, group_size, experts)
        config = replace(config, gate_up=tile)
    out, routes = torch.empty(tokens, h, device="cuda"), tokens * topk
    scratch = sm90_launches.Scratch(routes, experts, h, i, group_size)
    memory = torch.full((scratch.bytes,), 0x5A, dtype=torch.uint8, device="cuda")
    where = out, scratch, memory.data_ptr()
    for launch in sm90_launches.launches(config, tensors, *where, group_size, False):
        launch.on_current_stream()
    after = memory.cpu()

    def part(name, dtype, *shape):
        size = torch.Size(shape).numel() * dtype.itemsize
        return after[scratch.at[name] : scratch.at[name] + size].view(dtype).view(shape)

    bounds = part("offsets", torch.int32, experts + 1).tolist()
    dest = part("row_of", torch.int32, tokens, topk).long()
    source = part("source", torch.int32, routes).long()
    codes = part("codes", torch.int8, routes, scratch.pitch)[:, :i]
    scale = part("scale", torch.float32, routes, group_count(i, group_size))
    y = part("y", torch.bfloat16, routes, h)
    here = {name: tensor.cpu() for name, tensor in given.items()}
    ids = here["topk_ids"]
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert bounds == [0, *counts.cumsum(0).tolist()]
    assert torch.equal(dest.flatten().sort().values, torch.arange(routes))
    assert torch.equal(source[dest], torch.arange(tokens)[:, None].expand(-1, topk))
    first = torch.tensor(bounds)
    assert ((dest >= first[ids]) & (dest < first[ids + 1])).all()
    for e in range(experts):
        rows = slice(bounds[e], bounds[e + 1])
        token = source[rows]
        if not len(token):
            continue
        want = reference.hidden(
            *(here["x_int8"][token], here["scale_x"][token]),
            *(here["w_gate_up"][e], here["scale_gate_up"][e], group_size, False),
        )
        assert ((scale[rows] - want[1]).abs() <= 2.0**-20 * want[1]).all()
        steps = (codes[rows].int() - want[0].int()).abs()
        assert steps.max() <= 1 and float((steps != 0).double().mean()) < 1e-3
        mine = codes[rows].contiguous(), scale[rows].contiguous()
        down = reference.down(*mine, here["w_down"][e], here["scale_down"][e], group_size)
        assert_bit_equal(y[rows].contiguous(), down, f"expert {e}")
    total = torch.empty(tokens, h)
    reference.combine(y[dest], dest >= 0, here["topk_weights"], total)
    assert_bit_equal(out.cpu(), total)


@pytest.mark.gpu
def test_rows_of_a_token_do_not_depend_on_the_batch_on_a_gpu(generator):
    skip_without_it()
    from .test_moe_ffn_triton import layer_of, routed

    given = layer_of(generator, 16, 256, 256) | routed(generator, 4096, 16, 2, 256)
    whole = farro.moe_ffn(**given, group_size=128, backend="cuda")
    for tokens in (1, 2, 17, 64, 129, 1000):
        names = ("x_int8", "scale_x", "topk_ids", "topk_weights")
        fewer = {**given, **{name: given[name][:tokens] for name in names}}
        few = farro.moe_ffn(**fewer, group_size=128, backend="cuda")
        assert_bit_equal(few, whole[:tokens], f"{tokens} tokens")


@pytest.mark.gpu
def test_replays_see_new_routing_on_a_gpu(generator):
    """Skewed, empty and dropped experts, in a graph that was captured with others."""
    skip_without_it()
    from .test_moe_ffn_triton import layer_of, routed

    experts, topk, tokens, h = 24, 4, 96, 256
    weights = layer_of(generator, experts, h, 256)
    static = weights | routed(generator, tokens, experts, topk, h)
    keywords = {"group_size": 128, "backend": "cuda"}
    farro.moe_ffn(**static, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = farro.moe_ffn(**static, **keywords)
    for ids in (None, torch.zeros(tokens, topk), torch.full((tokens, topk), experts), None):
        new = routed(generator, tokens, experts, topk, h)
        if ids is not None:
            new["topk_ids"] = ids.long().cuda()
        for name, tensor in new.items():
            static[name].copy_(tensor)
        out.fill_(7)
        graph.replay()
        assert_bit_equal(out, farro.moe_ffn(**weights, **new, **keywords))


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31_on_a_gpu(generator):
    """The weights of the last expert begin past 2^31 bytes."""
    skip_without_it()
    experts, h, i = 140, 4096, 2048
    case = MoeCase("last", 3, 1, 1, h, i, 128, ids="one")
    given = case.build("cuda", seed_of(generator)).arguments
    want = farro.moe_ffn(**given, backend="cuda")
    for name in ("w_gate_up", "w_down", "scale_gate_up", "scale_down"):
        rows = given[name].transpose(1, 2) if name.startswith("w") else given[name]
        many = rows.new_empty(experts, *rows.shape[1:])
        many[-1] = rows[0]
        given[name] = many.transpose(1, 2) if name.startswith("w") else many
    assert given["w_gate_up"][:-1].numel() > 2**31
    given["topk_ids"] = torch.full_like(given["topk_ids"], experts - 1)
    assert_bit_equal(farro.moe_ffn(**given, backend="cuda"), want)
