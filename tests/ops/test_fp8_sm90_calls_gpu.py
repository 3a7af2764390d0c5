"""Calls of the native FP8 products of SM90a on a GPU: functions, graphs, streams, addresses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro.arch import arch_of
from farro.cuda.fp8 import configs, gemm
from farro.cuda.fp8.configs import BIAS, GELU, RESIDUAL
from farro.formats.fp8 import E4M3
from farro.ops.fp8_linear import KERNELS, sm90
from farro.testing.fp8_blockwise_linear import codes_of
from farro.testing.fp8_linear import linear_cases

from . import fp8_sm90_forced as tools
from .fp8_sm90_forced import BF16, EPILOGUES, KINDS, Operands, check, forced, operands, same, some
from .sm90_forced import compile_all, skip_without_it
from .test_fp8_linear_sm90 import problem_of

pytestmark = pytest.mark.gpu
PROMOTED, FAST = KINDS["promoted"], KINDS["fast"]
CHOICES = (1, 8, 9, 17, 33, 64, 65, 129, 256, 257, 1100)  # rows, to 1008 x 2576


@pytest.fixture(scope="module", autouse=True)
def compiled():
    skip_without_it()
    device = arch_of(torch.device("cuda", torch.cuda.current_device())).device
    wanted = [
        gemm.kernel_name(config, kind, n)
        for kind in KINDS.values()
        for config in some(kind)
        for n in (16, 32)
    ]
    for kind in (PROMOTED, FAST):
        wanted += [gemm.kernel_name(config, kind, 16) for config in sm90.VARIANTS.values()]
        chosen = {
            sm90.config(problem_of(m, 1008, 2576, "none", kind.fast, device)) for m in CHOICES
        }
        for epilogue in EPILOGUES["fast"]:
            of_epilogue = dataclasses.replace(kind, epilogue=epilogue)
            wanted += [gemm.kernel_name(config, of_epilogue, 1008) for config in chosen]
    compile_all(wanted)


def public(given: Operands, **keywords):
    """The public function that computes these operands."""
    if given.kind.scaled:
        scales = given.input_scale, given.weight_scale
        return farro.fp8_blockwise_linear_bf16(
            given.x, given.weight, *scales, backend="cuda", **keywords
        )
    keywords |= {"alpha": given.alpha, "fast_accum": given.kind.fast, "backend": "cuda"}
    epilogue = given.kind.epilogue
    if epilogue == BIAS | RESIDUAL:
        call, more = farro.fp8_linear_bias_residual_bf16, (given.bias, given.residual)
    elif epilogue == RESIDUAL:
        call, more = farro.fp8_linear_residual_bf16, (given.residual,)
    elif epilogue == BIAS:
        call, more = farro.fp8_linear_bias_bf16, (given.bias,)
    elif epilogue == BIAS | GELU:
        call, more = farro.fp8_linear_bias_gelu_bf16, (given.bias,)
    else:
        call, more = farro.fp8_linear_bf16, ()
    return call(given.x, given.weight, *more, **keywords)


@pytest.mark.parametrize("case", linear_cases(), ids=str)
def test_cases(case, generator):
    seed = int(torch.randint(2**31, (1,), generator=generator))
    outcome = case.build(torch.device("cuda", torch.cuda.current_device()), seed).check(KERNELS[0])
    assert outcome.status != "failed", outcome.detail


@pytest.mark.parametrize("epilogue", (0, RESIDUAL, BIAS, BIAS | RESIDUAL, BIAS | GELU))
@pytest.mark.parametrize("name", ("promoted", "fast"))
def test_public_functions_for_every_m(name, epilogue, generator):
    """Past each boundary of the choice or the tuned table."""
    kind = dataclasses.replace(KINDS[name], epilogue=epilogue)
    given = operands(max(CHOICES), 1008, 2576, kind, generator, exact=True)
    for m in CHOICES:
        part = given.rows(slice(0, m))
        part.residual = part.residual.clone()  # one function writes over it
        judged = dataclasses.replace(part, residual=part.residual.clone())
        check(public(part), judged, True, f"{kind} M={m}")


def test_a_residual_for_every_row(generator):
    given = operands(
        40, 272, 400, dataclasses.replace(PROMOTED, epilogue=RESIDUAL), generator, True
    )
    for row in (given.residual[3], given.residual[3:4]):
        judged = dataclasses.replace(given, residual=row.expand(40, 272))
        check(public(dataclasses.replace(given, residual=row)), judged, True, tuple(row.shape))


def test_every_variant(generator):
    """A pinned tile gives what it gives when forced, bit for bit, with promoted sums and fast."""
    tiles = {c.name: c for c in sm90.VARIANTS.values()}
    for kind in (KINDS["promoted"], KINDS["fast"]):
        given = operands(70, 272, 2064, kind, generator)
        met = set()
        for variant in range(1, 20):
            try:
                name = farro.select_fp8_linear_tile(70, 272, 2064, variant)
            except ValueError:
                continue
            if name in tiles:
                same(public(given, variant=variant), forced(tiles[name], given), name)
                met.add(name)
        assert met == set(tiles)


# --- graphs and streams --------------------------------------------------------------------------


@pytest.mark.parametrize("m", (1, 60, 700))
@pytest.mark.parametrize("name", KINDS)
def test_graphs_see_new_values(name, m, generator):
    """alpha on the device too."""
    kind = KINDS[name]
    given, other = (operands(m, 528, 1040, kind, generator, exact=True) for _ in range(2))
    for each, alpha in ((given, 2.0**-6), (other, -(2.0**-5))):
        each.alpha = torch.tensor([alpha], device=tools.DEVICE)
    out = torch.empty(m, 528, dtype=BF16, device=tools.DEVICE)
    public(given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        public(given, out=out)
        own = public(given)
    names = ("input_scale", "weight_scale") if kind.scaled else ("alpha",)
    for source in (given, other):
        for field in ("x", "weight", *names):
            getattr(given, field).copy_(getattr(source, field).clone())
        judged = dataclasses.replace(given)
        for result in (out, own):
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for result in (out, own):
            check(result, judged, True, f"{name} in a graph, M={m}")


def test_capture_of_a_kernel_never_compiled(generator, monkeypatch):
    from farro.cuda import jit, launch

    monkeypatch.setattr(gemm, "kernel_function", launch.kernel_function.__wrapped__)
    monkeypatch.setattr(jit, "load", jit.load.__wrapped__)
    for kind in KINDS.values():
        given = operands(33, 208, 304, kind, generator, exact=True)
        out = torch.zeros(33, 208, dtype=BF16, device=tools.DEVICE)
        for config in some(kind)[::2]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=r"farro\.warmup"):
                tools.run(config, given, out)
            check(forced(config, given), given, True, "after a refused capture")


@pytest.mark.parametrize("name", KINDS)
def test_side_streams(name, generator):
    """Each launch waits for what its own stream did before, and for nothing else."""
    for config in some(KINDS[name]):
        for turn in range(4):
            given, spare = (operands(200, 256, 1024, KINDS[name], generator, True) for _ in "ab")
            out = torch.full((200, 256), float("nan"), dtype=BF16, device=tools.DEVICE)
            torch.cuda.synchronize()
            stream = torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                for field in ("x", "weight", "input_scale", "weight_scale"):
                    if getattr(given, field) is not None:
                        getattr(given, field).copy_(getattr(spare, field))
                tools.run(config, given, out)
            stream.synchronize()
            check(out, spare, True, f"{config} turn {turn}")


# --- addresses -----------------------------------------------------------------------------------


def test_one_address_for_every_shape(generator):
    """All operands of all problems begin at the same addresses: alone they say nothing."""
    memory = [torch.empty(2**22, dtype=torch.uint8, device=tools.DEVICE) for _ in range(5)]

    def placed(i, tensor):
        place = memory[i][: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return place.view(tensor.shape).copy_(tensor)

    for turn in range(3):
        for m, n, k in (
            (40, 256, 512),
            (20, 256, 1024),
            (512, 128, 1024),
            (17, 80, 208),
            (1, 16, 16),
        ):
            for kind in KINDS.values():
                given = operands(m, n, k, kind, generator, exact=True)
                given.x, given.weight = placed(0, given.x), placed(1, given.weight)
                if kind.scaled:
                    given.input_scale = placed(2, given.input_scale)
                    given.weight_scale = placed(3, given.weight_scale)
                out = placed(4, torch.full((m, n), float("nan"), dtype=BF16, device=tools.DEVICE))
                public(given, out=out)
                check(out, given, True, f"{turn}: {m}x{n}x{k} {kind}")


def test_the_device_of_the_tensors_counts(generator):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = operands(40, 256, 512, PROMOTED, generator, exact=True)
    there = dataclasses.replace(given, x=given.x.to("cuda:1"), weight=given.weight.to("cuda:1"))
    with torch.cuda.device(0):
        out = public(there)
    assert out.device.index == 1
    check(out, there, True, "on the second GPU")


def test_strides_past_two_billion(generator):
    """Leading strides of every operand beyond 2^31 elements."""
    far = 2**31 + 16
    if torch.cuda.mem_get_info()[0] < 5 * far:
        pytest.skip("needs 11 GiB of GPU memory")
    kind = dataclasses.replace(KINDS["scaled"], epilogue=0)
    given = operands(2, 16, 256, kind, generator, exact=True)
    memory = torch.empty(far + 1024, dtype=torch.uint8, device=tools.DEVICE).view(E4M3)
    x = memory.as_strided((2, 256), (far, 1))
    x.view(torch.uint8).copy_(given.x.view(torch.uint8))
    for config in some(kind):
        check(forced(config, dataclasses.replace(given, x=x)), given, True, f"{config} input")
    del x, memory
    floats = torch.empty(far + 1024, device=tools.DEVICE)
    for turned in (False, True):
        layout = (1, far) if turned else (far, 1)
        scale = floats.as_strided((2, 2), layout).copy_(given.input_scale)
        for config in some(kind):
            laid = dataclasses.replace(given, input_scale=scale)
            check(forced(config, laid), given, True, f"{config} input_scale turned {turned}")
    del scale, floats
    wide = torch.empty(far + 1024, dtype=BF16, device=tools.DEVICE)
    residual = dataclasses.replace(PROMOTED, epilogue=BIAS | RESIDUAL)
    given = operands(2, 16, 512, residual, generator, exact=True)
    place = wide.as_strided((2, 16), (far, 1))
    for config in some(residual):
        place.copy_(given.residual)
        tools.run(config, dataclasses.replace(given, residual=place), place)
        check(place, given, True, f"{config} out and residual")


def test_more_rows_than_int32_holds_bytes(generator):
    """Rows of the input pass 2^31 bytes, and rows times the stride of scales 2^31 elements."""
    m, n, k = 2**17 + 3, 16, 2**15
    if torch.cuda.mem_get_info()[0] < 2 * m * k:
        pytest.skip("needs 9 GiB of GPU memory")
    weight = codes_of("small", (n, k), generator).to(tools.DEVICE)
    x = torch.zeros(m, k, dtype=torch.uint8, device=tools.DEVICE).view(E4M3)
    rows = torch.tensor([0, 1, 2**16 - 1, 2**16, 2**17 - 1, 2**17, m - 1], device=tools.DEVICE)
    few = codes_of("small", (len(rows), k), generator).to(tools.DEVICE)
    x.view(torch.uint8)[rows] = few.view(torch.uint8)
    given = Operands(x, weight, PROMOTED, alpha=2.0**-6)
    judged = dataclasses.replace(given, x=few)
    for config in some(PROMOTED)[1:3]:
        assert configs.refuses(config, PROMOTED, m) is None
        out = torch.full((m, n), float("nan"), dtype=BF16, device=tools.DEVICE)
        tools.run(config, given, out)
        check(out[rows], judged, True, config)
        assert int(out.count_nonzero(dim=1).count_nonzero()) <= len(rows)
