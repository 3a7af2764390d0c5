"""Results of the native FP8 products of SM90a on a GPU: each tile, kind and epilogue."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, RESIDUAL, Config
from farro.ops.fp8_blockwise_linear import KERNELS
from farro.testing.fp8_blockwise_linear import blockwise_cases, codes_of

from . import fp8_sm90_forced as tools
from .fp8_sm90_forced import (
    BF16,
    EPILOGUES,
    FP32,
    KINDS,
    Operands,
    but_its_ring,
    check,
    depths,
    forced,
    operands,
    padded,
    same,
    shapes,
    some,
    usual,
)
from .sm90_forced import compile_all, skip_without_it

pytestmark = pytest.mark.gpu
kinds = pytest.mark.parametrize("name", KINDS)
SWEEPS = (False, pytest.param(True, marks=pytest.mark.slow))
every_kernel = pytest.mark.parametrize("every", SWEEPS, ids=("usual", "exhaustive"))
# beyond a tile of each size and a single tile of all; tails of N in 16 and in 32, of K in 16
SHAPES = (
    *((1, 16, 16), (9, 96, 304), (130, 400, 1040), (257, 1008, 528), (65, 144, 2064)),
    *((300, 352, 656), (129, 800, 1168)),
)
MANY_TILES = (2100, 2336, 656)  # more tiles than SMs, so that rings go on from tile to tile
CHOICES = (1, 8, 9, 17, 33, 64, 65, 100, 129, 256, 257, 300, 1100)  # rows, to 1008 x 2576


def kind_of(name, epilogue):
    return dataclasses.replace(KINDS[name], epilogue=epilogue)


def compile_for(kind, n, found):
    """On all cores, those that are not compiled yet."""
    compile_all([gemm.kernel_name(config, kind, n) for config in found])


def kernels_of(name, every):
    """Source and name of what a run takes of a kind, with each epilogue."""
    return [
        gemm.kernel_name(config, kind, n)
        for kind in (kind_of(name, epilogue) for epilogue in EPILOGUES[name])
        for n in (16, 32)
        for config in (shapes(kind) if every else usual(kind, n))
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """What every run takes; an exhaustive test compiles the rest by itself."""
    skip_without_it()
    wanted = [kernel for name in KINDS for kernel in kernels_of(name, False)]
    chosen = {configs.heuristic(KINDS["scaled"], m, 1008, 2576) for m in CHOICES}
    compile_all(wanted + [gemm.kernel_name(config, KINDS["scaled"], 1008) for config in chosen])


@every_kernel
@kinds
def test_every_tile_and_epilogue(name, every, generator):
    """Sums of few bits: each element is the exact one, or what GELU makes of it."""
    compile_all(kernels_of(name, every))
    for epilogue in EPILOGUES[name]:
        for m, n, k in (*SHAPES, MANY_TILES):
            given = operands(m, n, k, kind_of(name, epilogue), generator, exact=True)
            for config in shapes(given.kind) if every else usual(given.kind, n):
                if (m, n, k) != MANY_TILES or config.policy == "large":
                    what = f"{config} {given.kind} {m}x{n}x{k}"
                    check(forced(config, given), given, True, what)


@every_kernel
@kinds
def test_full_codes(name, every, generator):
    """Codes and scales as quantizers make them: errors of the tensor cores' sums are bounded."""
    if every:
        compile_all(kernels_of(name, every))
    for m, n, k in ((1, 256, 4096), (70, 272, 7168), (300, 400, 2064), (257, 144, 528)):
        given = operands(m, n, k, kind_of(name, EPILOGUES[name][-1]), generator)
        plain = dataclasses.replace(given, kind=KINDS[name])
        for inputs in (given, plain):
            for config in shapes(inputs.kind) if every else usual(inputs.kind, n):
                check(forced(config, inputs), inputs, False, f"{config} {inputs.kind} {m}x{n}x{k}")


@kinds
def test_every_k_tail(name, generator):
    for k in (*range(16, 144, 16), 240, 256, 272, 384, 400, 512, 528, 1024, 1040):
        given = operands(20, 144, k, KINDS[name], generator, exact=True)
        for config in some(KINDS[name]):
            check(forced(config, given), given, True, f"{config} {name} K={k}")


@every_kernel
@kinds
def test_clusters_with_more_ctas_than_blocks_of_k(name, every, generator):
    """Some have nothing to multiply, and give zeros."""
    kind = kind_of(name, BIAS if every else 0)
    compile_for(kind, 144, shapes(kind))
    for k in (16, 128, 144, 272, 400, 912, 1040):
        given = operands(21, 144, k, kind, generator, exact=True)
        for config in shapes(kind):
            if config.policy == "small":
                check(forced(config, given), given, True, f"{config} {name} K={k}")


@every_kernel
@kinds
def test_every_depth_of_the_ring(name, every, generator):
    """Rings that hold all of K, and rings that go around many times; or the deepest of each."""
    given = operands(150, 208, 5008, KINDS[name], generator, exact=True)
    deepest = {but_its_ring(c): c for c in depths(KINDS[name])}.values()
    configs = depths(KINDS[name]) if every else list(deepest)
    compile_for(KINDS[name], 208, configs)
    for config in configs:
        check(forced(config, given), given, True, f"{config} {name}")


# --- operands as they may lie --------------------------------------------------------------------


def inside(values, before, after, step):
    """A slice of a wider matrix of NaN."""
    rows, columns = values.shape
    width = before + columns * step + after
    whole = torch.full((rows, width), float("nan"), dtype=values.dtype, device=tools.DEVICE)
    view = whole[:, before : before + columns * step : step]
    view.copy_(values)
    return view


@pytest.mark.parametrize("m", (1, 39, 40, 260))
def test_scales_of_any_stride(m, generator):
    kind = KINDS["scaled"]
    for k in (128, 1168):  # one block; ten, the last of 16
        given = operands(m, 272, k, kind, generator, exact=True)
        wanted = {config: forced(config, given) for config in some(kind)}
        for config, want in wanted.items():
            check(want, given, True, f"{config} M={m} K={k}")
        scales = given.input_scale, given.weight_scale
        blocks = scales[0].shape[1]
        plans = [(0, 0, 1), (1, 2, 1), (2, 6 - blocks % 4, 1), (4, -blocks % 4, 1), (0, 0, 3)]
        plans += [(4, -m % 4, 1), (4, 1, 1)]  # column-major, read together and not
        vectors = set()
        for how in plans:
            for turned in (False, True):
                of_input, of_weight = (
                    inside(s.T.contiguous(), *how).T if turned else inside(s, *how) for s in scales
                )
                vectors.add(gemm._scale_vector(of_input))
                for pair in ((of_input, scales[1]), (scales[0], of_weight), (of_input, of_weight)):
                    laid = dataclasses.replace(given, input_scale=pair[0], weight_scale=pair[1])
                    for config, want in wanted.items():
                        what = f"{config} M={m} K={k} scales {how} turned {turned}"
                        same(forced(config, laid), want, what)
        assert vectors >= ({0, 1, 2} if m % 4 == 0 else {0, 1})


@pytest.mark.parametrize("epilogue", (0, RESIDUAL, BIAS | RESIDUAL))
@kinds
def test_views_of_out_bias_and_residual(name, epilogue, generator):
    if epilogue not in EPILOGUES[name]:
        pytest.skip("no operator asks for it")
    kind = kind_of(name, epilogue)
    for m, n, k in ((70, 272, 400), (300, 192, 528)):
        given = operands(m, n, k, kind, generator, exact=True)
        given.bias = given.bias.repeat_interleave(3)[::3]
        residuals = {
            "rows": given.residual,
            "columns": given.residual.repeat(1, 3)[:, n : 2 * n],
            "turned": given.residual.T.contiguous().T,
            "odd": inside(given.residual, 1, 2, 1),
            "repeated": given.residual[5:6].expand(m, n),
        }
        for way, residual in residuals.items() if epilogue & RESIDUAL else [("none", None)]:
            inputs = dataclasses.replace(given, residual=residual)
            for config in (c for c in some(kind) if c in usual(kind, n)):
                what = f"{config} {kind} {m}x{n}x{k} residual {way}"
                want = forced(config, inputs)
                check(want, inputs, True, what)
                wide = torch.empty(m, 2 * n + 3, dtype=BF16, device=tools.DEVICE)
                views = {
                    "transposed": torch.empty(n, m, dtype=BF16, device=tools.DEVICE).T,
                    "odd rows": wide[:, 1 : n + 1],
                    "every second": wide[:, 1 : 2 * n + 1 : 2],
                    "rows apart": torch.empty(m * 2, n, dtype=BF16, device=tools.DEVICE)[::2],
                }
                for view, out in views.items():
                    wide.fill_(float("nan"))
                    same(forced(config, inputs, out), want, f"{what}, out {view}")
                    if view in ("odd rows", "every second"):
                        out.fill_(float("nan"))
                        assert wide.isnan().all(), f"{what} wrote beside out {view}"


@pytest.mark.parametrize("name", ("promoted", "fast"))
def test_a_residual_that_is_the_output(name, generator):
    """In place, in rows that are aligned and in rows that are not."""
    kind = kind_of(name, BIAS | RESIDUAL)
    for m, n, k in ((1, 80, 304), (130, 272, 400), (300, 208, 528)):
        given = operands(m, n, k, kind, generator, exact=True)
        for config in some(kind):
            want = forced(config, given)
            check(want, given, True, f"{config} {kind}")
            for before in (0, 8, 1):
                both = inside(given.residual, before, 8, 1)
                tools.run(config, dataclasses.replace(given, residual=both), both)
                same(both, want, f"{config} in place, {before} columns before")


@pytest.mark.parametrize("name", ("promoted", "fast"))
def test_alpha_of_any_kind(name, generator):
    given = operands(70, 272, 400, KINDS[name], generator, exact=True)
    values = (0.5, -3.0, 0.0, 1e-40, 3e38, float("inf"), float("nan"), 1 / 3)
    for config in some(KINDS[name]):
        for value in values:
            pair = torch.tensor([1.0, value], device=tools.DEVICE)
            alphas = (value, pair[1], pair[1:])
            results = [forced(config, dataclasses.replace(given, alpha=a)) for a in alphas]
            total = dataclasses.replace(given, alpha=1.0).exact[0].float()
            want = (total * torch.tensor(value, dtype=FP32, device=total.device)).to(BF16)
            for out in results:
                same((out + 0.0).nan_to_num(7.0), (want + 0.0).nan_to_num(7.0), f"{config} {value}")


# --- rows, values, order -------------------------------------------------------------------------


@every_kernel
@kinds
def test_what_is_not_finite_stays_in_its_row_and_column(name, every, generator):
    kind = kind_of(name, BIAS if every else 0)
    compile_for(kind, 400, shapes(kind))
    given = operands(150, 400, 1040, kind, generator)
    for config in shapes(kind):
        want = forced(config, given)
        x, weight = (padded(t) for t in (given.x, given.weight))
        x.view(torch.uint8)[77, 1039], weight.view(torch.uint8)[333, 5] = 0x7F, 0xFF
        spoilt = dataclasses.replace(given, x=x, weight=weight)
        clean = torch.ones_like(want, dtype=torch.bool)
        clean[77], clean[:, 333] = False, False
        if kind.scaled:
            spoilt.input_scale = given.input_scale.clone()
            spoilt.input_scale[3, 8], spoilt.input_scale[149, 0] = float("inf"), float("nan")
            clean[3], clean[149] = False, False
        out = forced(config, spoilt)
        assert not out[~clean].isfinite().any(), f"{config} {kind}"
        same(out[clean], want[clean], f"{config} {kind}")


@every_kernel
@kinds
def test_a_row_does_not_depend_on_the_others(name, every, generator):
    """Bit for bit, alone and in a batch, wherever it lies in a tile."""
    given = operands(300, 400, 1040, kind_of(name, EPILOGUES[name][-1 if every else 0]), generator)
    compile_for(given.kind, 400, shapes(given.kind))
    for config in shapes(KINDS[name]):
        whole = forced(config, given)
        for rows in (slice(0, 1), slice(299, 300), slice(5, 70), slice(100, 257), slice(131, 140)):
            part = forced(config, given.rows(rows))
            same(part, whole[rows], f"{config} {name} {rows}")


@kinds
def test_runs_are_equal(name, generator):
    """Races between producers and consumers would show as differences."""
    problems = {"large": (1000, 2064, 2048), "small": (100, 2064, 4096)}
    for policy, (m, n, k) in problems.items():
        given = operands(m, n, k, KINDS[name], generator, exact=True)
        for config in shapes(KINDS[name]):
            if config.policy == policy:
                want = forced(config, given)
                check(want, given, True, f"{config} {name}")
                for turn in range(6):
                    same(forced(config, given), want, f"{config} {name} turn {turn}")


@pytest.mark.parametrize("raster", (1, 3, 8, 64))
@kinds
def test_the_order_of_tiles_changes_nothing(name, raster, generator):
    given = operands(2000, 1504, 304, KINDS[name], generator, exact=True)
    for config in some(KINDS[name])[:5]:
        chosen = dataclasses.replace(config, raster=raster)
        check(forced(chosen, given), given, True, f"{chosen} {name}")


def test_one_fused_multiply_add_a_block():
    """Terms of -1 and 4097 * (1 / 4097) give exactly 2^-36; product and sum apart give 0."""
    for config in some(KINDS["scaled"]):
        if config.cluster > 1:
            continue  # its CTAs' sums are added, not fused
        x = torch.zeros(40, 256)
        weight = torch.ones(128, 256)
        x[:, 0], x[:, 128:160], weight[:, 255], x[:, 255] = -1, 128, 0.5, 2
        given = Operands(*(padded(t.to(torch.float8_e4m3fn)) for t in (x, weight)), KINDS["scaled"])
        given.input_scale = torch.ones(40, 2, device=tools.DEVICE)
        given.weight_scale = torch.ones(1, 2, device=tools.DEVICE)
        given.weight_scale[:, 1] = torch.tensor(1.0) / 4097
        out = forced(config, given)
        assert (out == 2.0**-36).all(), (config, out[0, 0].item())


# --- through the operator ------------------------------------------------------------------------


@pytest.mark.parametrize("case", blockwise_cases(), ids=str)
def test_cases(case, generator):
    seed = int(torch.randint(2**31, (1,), generator=generator))
    outcome = case.build(torch.device("cuda", torch.cuda.current_device()), seed).check(KERNELS[0])
    assert outcome.status != "failed", outcome.detail


def test_a_choice_runs_for_every_m(generator):
    """Through the public function, past each boundary of the heuristic or the tuned table."""
    given = operands(max(CHOICES), 1008, 2576, KINDS["scaled"], generator)
    for m in CHOICES:
        part = given.rows(slice(0, m))
        scales = part.input_scale, part.weight_scale
        out = farro.fp8_blockwise_linear_bf16(part.x, part.weight, *scales, backend="cuda")
        check(out, part, False, f"M={m}")


def test_outputs_past_four_billion_elements(generator):
    """Element offsets pass 2^31 and 2^32 (rows times columns)."""
    m, n, k = 32769 * 2, 65536, 16
    need = m * n * 2 + (m + n) * k
    if torch.cuda.mem_get_info()[0] < need + 2**30:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    x, weight = (codes_of("small", (size, k), generator).to(tools.DEVICE) for size in (m, n))
    out = torch.empty(m, n, dtype=BF16, device=tools.DEVICE)
    rows = torch.tensor([0, 255, 256, 32767, 32768, 32769, 65535, 65536, m - 1], device="cuda")
    given = Operands(x, weight, KINDS["promoted"], alpha=0.5)
    few = dataclasses.replace(given, x=x[rows].contiguous())
    want = few.exact[0].float().to(BF16) + 0.0
    for config in (Config("large", 256, 128, 4), Config("small", 64, 64, 4, 2)):
        out.fill_(float("nan"))
        tools.run(config, given, out)
        same(out[rows] + 0.0, want, config)
        assert not out[-1000:].isnan().any() and not out[:1000].isnan().any()
