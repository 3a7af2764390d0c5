"""group_mm_swiglu_quant on SM90a in one launch: what it is given, and its bytes on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from farro import nvfp4
from farro.cuda import jit
from farro.cuda.launch import Launch, kernel_function
from farro.ops.nvfp4_group_mm import sm90, sm90_configs, sm90_gated
from farro.ops.nvfp4_group_mm.sm90_configs import Config
from farro.ops.nvfp4_quantize.activation import Gated, silu
from farro.testing.nvfp4_group_mm import activations_of, weight_of

from .native_facts import buffer, pretend
from .sm90_forced import compile_all, skip_without_it
from .test_nvfp4_group_mm_sm90 import given, shapes


def gated_shapes(bf16: bool) -> list[Config]:
    """Tiles of the product that fit beside sums in shared memory, with a ring of three."""
    pairs = (dataclasses.replace(c, pair=2) for c in shapes(bf16))
    every = (*shapes(bf16), *pairs)
    return [c for c in every if sm90_configs.refuses(c, 5, bf16, gated=True) is None]


def test_how_rows_of_gate_and_up_are_copied():
    def halves(blocks: int, interleaved: bool, consumers: int) -> int:
        scales = torch.empty(2, 3, blocks, dtype=torch.uint8)
        return sm90.Gate(torch.ones(1), interleaved, scales, scales).halves(consumers)

    assert [halves(4, True, 3), halves(4, False, 2), halves(5, False, 2)] == [0, 1, 2]
    assert halves(4, False, 3) == 2


@pytest.mark.parametrize("per_expert", (False, True))
def test_one_launch_takes_what_the_quantizer_needs(per_expert, monkeypatch):
    pretend(monkeypatch, sm90)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    config = Config(4, 8, 2, 6, True)
    _, *parts, x, sfb, alphas, counts = given(config, 3, 256, 512, 8)
    codes, scales = (buffer(3 * 8 * n, torch.uint8, 0).view(3, 8, n) for n in (64, 4))
    gscale = buffer(3 if per_expert else 1, torch.float32, 0)
    gate = sm90.Gate(gscale, False, codes, scales)
    rows = sm90.rows_of(x, counts, 3, 512)
    launch = sm90.group_launch(config, gate, tuple(parts), x, sfb, alphas, rows)
    *_, problem, told, own = launch.parameters
    assert "sm90_gated.cu" in launch.function[0] and "nvfp4_gated<false" in launch.function[1]
    assert (problem.features, problem.halves, told.capacity) == (256, 1, 8)
    assert (own.codes, own.scales, own.gscale) == (
        *(codes.data_ptr(), scales.data_ptr(), gscale.data_ptr()),
    )
    assert (own.per_expert, own.blocks, own.interleaved) == (int(per_expert), 4, 0)


def test_fewer_stages_where_sums_need_the_room():
    config = Config(2, 256, 1, 6, False)
    gated = sm90_configs.deepest(config, 32, False, gated=True)
    assert gated is not None and gated.stages < 6
    assert sm90_configs.refuses(config, 32, False) is None
    assert "shared memory" in sm90_configs.refuses(config, 32, False, gated=True)


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_silu_of_every_gate(tmp_path):
    skip_without_it()
    for header in (jit._PACKAGE / "ops/nvfp4_group_mm").glob("*.cuh"):
        shutil.copy(header, tmp_path)
    source = shutil.copy(Path(__file__).with_name("nvfp4_gates.cu"), tmp_path)
    out = torch.empty(1 << 16, dtype=torch.int16, device="cuda")
    function = kernel_function(str(source), "every_gate", "sm_90a", out.get_device(), 0)
    address = (ctypes.c_void_p(out.data_ptr()),)
    Launch(out.get_device(), function, (256, 1, 1), 256, 0, 1, address).on_current_stream()
    gates = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got, want = out.cpu().view(torch.bfloat16), silu(gates)
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(got[number], want[number])  # -0 and 0 have one code


@pytest.mark.gpu
@pytest.mark.parametrize("coded", (True, False), ids=("W4A4", "W4A16"))
def test_every_configuration(coded, generator):
    """The bytes of the product, its activation and the quantizer; unused scales are 0x38."""
    skip_without_it()
    wanted = [sm90.kernel_name(c, not coded, True) for c in gated_shapes(not coded)]
    splits = [Config(1, 8, 2, 3, True, split=split) for split in (1, 2, 4)]
    wanted += [sm90.kernel_name(c, not coded) for c in splits]
    compile_all([*wanted, *(sm90.expand_name(b) for b in (False, True))])
    for e, m, k, cap in (
        (3, 64, 160, 20),
        (2, 192, 352, 33),
        (2, 832, 544, 140),
        (1, 320, 1024, 520),
    ):
        parts = [t.cuda() for t in weight_of(e, m, k, generator).values()]
        x, sfb = activations_of((e, cap), k, generator, "normal", coded).values()
        x, sfb = x.cuda(), None if sfb is None else sfb.cuda()
        counts = torch.randint(cap + 9, (e,), generator=generator, dtype=torch.int32)
        counts[0] = cap
        used = torch.arange(cap)[None] < counts[:, None]
        counts, alphas = counts.cuda(), torch.rand(e, generator=generator).cuda()
        gscale = torch.rand(e, generator=generator).cuda() * 100 + 1
        for interleaved in (False, True):
            want = {}
            for c in splits:
                x2 = torch.zeros(e, cap, m, dtype=torch.bfloat16, device="cuda")
                sm90.run(c, x2, *parts, x, sfb, alphas, counts)
                given = (x2, gscale, counts, 0, interleaved)
                want[c.split] = nvfp4.silu_mul_quant_act(*given, backend="reference")
            for config in gated_shapes(not coded):
                codes = torch.full((e, cap, m // 4), 0xAA, dtype=torch.uint8, device="cuda")
                scales = torch.full((e, cap, m // 64), 0xAB, dtype=torch.uint8, device="cuda")
                how = Gated(interleaved, "silu", 1.0, -1.0)
                operands = (*parts, x, sfb, alphas, counts, gscale, how, codes, scales)
                sm90_gated.run(config, *operands)
                right = want[config.split]
                assert torch.equal(codes[used], right[0][used]), f"{config} {m} {k} {cap}"
                assert torch.equal(scales, right[1]), f"{config} {m} {k} {cap}"
