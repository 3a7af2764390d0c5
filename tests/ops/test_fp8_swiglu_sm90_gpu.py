"""Results of the native SwiGLU + quantize of SM90a on a GPU, within what rounding allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import farro
from farro.formats.fp8 import E4M3, NAN_CODE, blocks
from farro.ops.fp8_blockwise_linear.reference import product
from farro.ops.fp8_swiglu_quantize import KERNELS, reference, sm90
from farro.ops.fp8_swiglu_quantize.sm90 import Config
from farro.testing import FP8_PROMOTED_SUM, FP32_SUM, assert_bit_equal
from farro.testing.fp8_blockwise_linear import codes_of, magnitude_of, scales_of
from farro.testing.fp8_swiglu_quantize import codes_that_differ, far_from_swiglu, swiglu_cases

from . import fp8_sm90_forced as tools
from .fp8_far_gates import check_far_gates
from .fp8_sm90_forced import padded
from .sm90_forced import compile_all, skip_without_it

pytestmark = pytest.mark.gpu
CONFIGS = (  # each tile with a shallow ring, so that it goes around
    *(Config("large", rows, 3, raster=4) for rows in sm90._ROWS["large"]),
    *(
        Config(policy, rows, 4, split)
        for policy in ("medium", "small")
        for rows in sm90._ROWS[policy]
        for split in sm90._SPLITS
    ),
)
DEEP = (
    *(Config("large", rows, sm90._deepest(rows)) for rows in sm90._ROWS["large"]),
    *(Config("small", 8, 12, 4), Config("small", 16, 3, 2), Config("small", 64, 6)),
    *(Config("medium", 128, 6, 2), Config("large", 128, 4, rest=2)),
)
# beyond a tile of each size and a single tile; N in 16 up to both halves of a tile, tails of K
SHAPES = ((1, 16, 16), (9, 80, 304), (65, 128, 1040), (130, 208, 528), (70, 400, 2064))
TWO_LAUNCHES = (250, 9360, 144)  # a round of large tiles, and more
MANY_TILES = (2100, 1104, 400)  # more tiles than SMs, so that rings go on from tile to tile
CHOICES = (1, 8, 9, 17, 33, 64, 65, 129, 300)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    skip_without_it()
    rests = filter(None, map(sm90.rest_of, DEEP))
    compile_all([sm90.kernel_name(config) for config in (*CONFIGS, *DEEP, *rests)])


@dataclasses.dataclass
class Operands:
    x: torch.Tensor
    weight: torch.Tensor
    input_scale: torch.Tensor
    weight_scale: torch.Tensor
    exact: bool  # sums have few bits: in whatever order, they are the exact ones

    @property
    def all(self):
        return self.x, self.weight, self.input_scale, self.weight_scale

    def rows(self, rows):
        return dataclasses.replace(self, x=self.x[rows], input_scale=self.input_scale[rows])

    def want(self):
        """What the reference gives, and what far_from_swiglu judges by."""
        n = self.weight.shape[0] // 2
        output = torch.empty(len(self.x), n, dtype=E4M3, device=tools.DEVICE)
        scale = torch.empty(len(self.x), blocks(n), device=tools.DEVICE)
        reference.run(None, *self.all, output, scale)
        gate = self.x, self.weight[:n], self.input_scale, self.weight_scale[: blocks(n)]
        up = self.x, self.weight[n:], self.input_scale, self.weight_scale[blocks(n) :]
        products = product(*gate), product(*up), magnitude_of(*gate), magnitude_of(*up)
        return output.cpu(), [t.cpu() for t in products]

    def check(self, q, scale, want, what):
        sum_error = FP32_SUM if self.exact else FP8_PROMOTED_SUM
        found = far_from_swiglu(q, scale, *want[1], sum_error)
        found = found or codes_that_differ(q, want[0], sum_error)
        assert found is None, f"{what}: {found}"


def operands(m, n, k, generator, exact=True):
    """Sums are of the size of 1, where silu bends. The gate's and up's scales differ."""
    codes = "small" if exact else "normal"
    x, weight = (padded(codes_of(codes, (size, k), generator)) for size in (m, 2 * n))
    kind = "powers" if exact else "signed"
    input_scale = scales_of(kind, (m, blocks(k)), generator)
    weight_scale = scales_of(kind, (2 * blocks(n), blocks(k)), generator)
    size = 2.0**-6 if exact else 2.0**-14
    return Operands(
        x, weight, (input_scale * size).to(tools.DEVICE), weight_scale.to(tools.DEVICE), exact
    )


def run(config, given, output, scale):
    sm90.prepare(config, *given.all, output, scale).on_current_stream()


def forced(config, given):
    """Codes and scales in poisoned memory with guard rows."""
    m, n = len(given.x), given.weight.shape[0] // 2
    q = torch.full((m + 2, n), 0x5B, dtype=torch.uint8, device=tools.DEVICE)
    scale = torch.full((m + 2, blocks(n)), -7.0, device=tools.DEVICE)
    run(config, given, q.view(E4M3)[1:-1], scale[1:-1])
    for end in (0, -1):
        assert (q[end] == 0x5B).all() and (scale[end] == -7).all(), f"{config} wrote beside"
    return q.view(E4M3)[1:-1], scale[1:-1]


def same(got, want, what):
    for one, other in zip(got, want):
        assert_bit_equal(one, other, str(what))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile(config, generator):
    for exact in (True, False):
        for m, n, k in (*SHAPES, MANY_TILES):
            if (m, n, k) != MANY_TILES or config.policy == "large":
                given = operands(m, n, k, generator, exact)
                given.check(*forced(config, given), given.want(), f"{config} {m}x{n}x{k}")


@pytest.mark.parametrize("rest", sm90._RESTS[1:])
def test_columns_beyond_whole_rounds(rest, generator):
    for exact in (True, False):
        given = operands(*TWO_LAUNCHES, generator, exact)
        config = Config("large", 128, 4, rest=rest)
        given.check(*forced(config, given), given.want(), f"{config}")


@pytest.mark.parametrize("config", (*CONFIGS[:3], *DEEP), ids=str)
def test_every_tail(config, generator):
    for k in (*range(16, 144, 32), 384, 400, 512, 528, 912, 1040):
        given = operands(20, 144, k, generator)
        given.check(*forced(config, given), given.want(), f"{config} K={k}")
    for n in (*range(16, 144, 16), 192, 240, 256, 272):
        given = operands(20, n, 272, generator)
        given.check(*forced(config, given), given.want(), f"{config} N={n}")


@pytest.mark.parametrize("config", (*CONFIGS[:3], *DEEP), ids=str)
def test_scales_and_codes_of_any_stride(config, generator):
    for m in (39, 40):
        given = operands(m, 208, 1168, generator)
        want = forced(config, given)
        given.check(*want, given.want(), config)
        for pitch, step in ((m, 1), (m + 4, 1), (m + 1, 1), (2 * m, 2)):
            memory = torch.full((10, pitch), float("nan"), device=tools.DEVICE)
            column_major = memory[:, : m * step : step].T
            turned = given.weight_scale.T.contiguous().T
            laid = dataclasses.replace(
                given, input_scale=column_major.copy_(given.input_scale), weight_scale=turned
            )
            same(forced(config, laid), want, f"{config} input_scale {column_major.stride()}")
            results = torch.full((2, pitch), -7.0, device=tools.DEVICE)
            scale = results[:, : m * step : step].T
            q = torch.full((m, 212), 0x5B, dtype=torch.uint8, device=tools.DEVICE)
            run(config, given, q.view(E4M3)[:, 4:], scale)
            same((q.view(E4M3)[:, 4:], scale), want, f"{config} scale {scale.stride()}")
            assert (q[:, :4] == 0x5B).all(), f"{config} wrote beside its codes"
            scale.fill_(-7.0)
            assert (results == -7).all(), f"{config} wrote beside its scales"


def planted(n, gates, ups):
    """One row whose gate and up are these numbers, n columns; K is 16."""
    x = torch.zeros(1, 16)
    x[:, 0] = 1
    weight = torch.zeros(2 * n, 16)
    weight[:n, 0], weight[n:, 0] = gates, ups
    x, weight = (padded(t.to(E4M3)) for t in (x, weight))
    ones = (torch.ones(shape, device=tools.DEVICE) for shape in ((1, 1), (2 * blocks(n), 1)))
    return Operands(x, weight, *ones, True)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_group_with_an_infinity_has_nan_codes(config):
    """Without a NaN in it; other groups are as they were. So has a group with a NaN."""
    n, ups = 272, torch.full((272,), 2.0)
    ups[131] = 448
    given = planted(n, torch.full((n,), 8.0), ups)
    given.weight_scale[blocks(n) + 1] = (
        2.0**120
    )  # of up, columns 128 to 255: 448 * 2^120 passes FP32
    q, scale = forced(config, given)
    assert scale[0].tolist()[1] == float("inf") and scale[0, [0, 2]].isfinite().all()
    assert (q.view(torch.uint8)[0, 128:256] == NAN_CODE).all(), f"{config}: codes that are no NaN"
    given.weight_scale.fill_(1.0)
    given.weight.view(torch.uint8)[n + 140, 0] = NAN_CODE
    q, scale = forced(config, given)
    assert scale[0, 1].isnan() and scale[0, [0, 2]].isfinite().all()
    assert (q.view(torch.uint8)[0, 128:256] == NAN_CODE).all(), config
    assert q[0, :128].float().isfinite().all() and q[0, 256:].float().isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_not_finite_stays_in_its_group(config, generator):
    given = operands(130, 400, 528, generator, exact=False)
    want = forced(config, given)
    spoilt = dataclasses.replace(
        given,
        x=padded(given.x),
        weight=padded(given.weight),
        input_scale=given.input_scale.clone(),
    )
    spoilt.x.view(torch.uint8)[77, 527] = NAN_CODE
    spoilt.weight.view(torch.uint8)[400 + 140, 5] = NAN_CODE  # of up, the second group
    spoilt.input_scale[3, 4], spoilt.input_scale[129, 0] = float("inf"), float("nan")
    q, scale = forced(config, spoilt)
    clean = torch.ones(130, 4, dtype=torch.bool, device=tools.DEVICE)
    clean[[3, 77, 129]], clean[:, 1] = False, False
    spread = clean.repeat_interleave(128, 1)[:, :400]
    assert not scale[~clean].isfinite().any() and q[~spread].float().isnan().all(), config
    same((q[spread], scale[clean]), (want[0][spread], want[1][clean]), config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_far_gates(config):
    def run_padded(x, weight, *rest):
        sm90.prepare(config, padded(x), padded(weight), *rest).on_current_stream()

    check_far_gates(run_padded, tools.DEVICE)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_zeros_and_the_smallest_scale(config):
    """Groups of zeros, and of numbers below the floor of scales."""
    n = 272
    given = planted(n, torch.full((n,), 1.0), torch.zeros(n))
    q, scale = forced(config, given)
    assert (scale == torch.tensor(1e-12)).all() and not q.float().any()
    given = planted(n, torch.full((n,), 1.0), torch.full((n,), 1.0))
    given.weight_scale[blocks(n) :] = 2.0**-40
    q, scale = forced(config, given)
    given.check(q, scale, given.want(), config)
    assert (scale == torch.tensor(1e-12)).all() and (q.float() != 0).all()


@pytest.mark.parametrize("config", (*CONFIGS, *DEEP), ids=str)
def test_a_row_does_not_depend_on_the_others(config, generator):
    given = operands(300, 272, 1040, generator, exact=False)
    whole = forced(config, given)
    for rows in (slice(0, 1), slice(299, 300), slice(5, 70), slice(100, 257), slice(131, 140)):
        part = forced(config, given.rows(rows))
        same(part, [t[rows] for t in whole], f"{config} {rows}")


@pytest.mark.parametrize("config", (*CONFIGS, *DEEP), ids=str)
def test_runs_are_equal(config, generator):
    """Races between producers and consumers would show as differences."""
    m = 1000 if config.policy == "large" else 100
    given = operands(m, 1040, 4096, generator)
    want = forced(config, given)
    given.check(*want, given.want(), config)
    for turn in range(6):
        same(forced(config, given), want, f"{config} turn {turn}")


@pytest.mark.parametrize("case", swiglu_cases(), ids=str)
def test_cases(case, generator):
    seed = int(torch.randint(2**31, (1,), generator=generator))
    outcome = case.build(torch.device("cuda", torch.cuda.current_device()), seed).check(KERNELS[0])
    assert outcome.status != "failed", outcome.detail


def test_a_choice_runs_for_every_m(generator):
    """Through the public function, past each boundary of the choice or the tuned table."""
    given = operands(max(CHOICES), 528, 2064, generator)
    for m in CHOICES:
        part = given.rows(slice(0, m))
        results = farro.fp8_blockwise_swiglu_quantize_fp8(*part.all, backend="cuda")
        part.check(*results, part.want(), f"M={m}")


def test_graphs_see_new_values(generator):
    for m, config in ((300, DEEP[1]), (12, DEEP[2])):
        given, other = (operands(m, 272, 1040, generator) for _ in range(2))
        q = torch.empty(m, 272, dtype=E4M3, device=tools.DEVICE)
        scale = torch.empty(m, blocks(272), device=tools.DEVICE)
        launch = sm90.prepare(config, *given.all, q, scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch.on_current_stream()
        for source in (given, other):
            for to, value in zip(given.all, source.all):
                to.copy_(value.clone())
            q.view(torch.uint8).fill_(0x5B), scale.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            given.check(q, scale, given.want(), f"{config} in a graph")
