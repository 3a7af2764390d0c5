"""Each piece of farro/cuda/include alone, through the kernels of headers.cu."""

from __future__ import annotations

import ctypes
import io
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.cuda import jit, tensor_map
from farro.cuda.fp8 import gemm
from farro.cuda.launch import Launch, kernel_function
from farro.testing import FP8_PROMOTED_SUM, assert_bit_equal, assert_close_to_exact

SOURCE = str(Path(__file__).with_name("headers.cu"))
WIDTHS = {"int": (8, 16, 32, 64, 96, 112, 128), "float": (8, 64, 96, 192, 256)}
PRODUCTS = [
    (kind, n, more) for kind, widths in WIDTHS.items() for n in widths for more in (False, True)
]
SHARES = ((2, 1), (2, 3), (4, 3))
DTYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "float": torch.float32}
NAMES = (
    *(f"hand_over<{stages}>" for stages in (1, 3, 4)),
    *(f"load_box<{rows}, false>" for rows in (8, 64, 256)),
    *(f"load_box<{rows}, true>" for rows in (16, 96, 256)),
    *(f"copy_small<{size}>" for size in (4, 8, 16)),
    *(f"multiply<{kind}, {n}, {str(more).lower()}>" for kind, n, more in PRODUCTS),
    *(f"exchange<{size}>" for size in (2, 4, 8)),
    *(f"share<{size}, {stages}>" for size, stages in SHARES),
    *(f"convert_all<{out}>" for out in DTYPES),
    *(f"row_scales<{rows}>" for rows in (64, 192)),
    *("reverse_in_pairs", "trade_registers", "read_bias", "visit", "gelu_all"),
)


def test_headers_compile_and_keep_values_in_registers():
    log = io.StringIO()
    program = jit.program(SOURCE, "sm_90a", ptxas_options=["-v"])
    code = program.compile("cubin", name_expressions=NAMES, logs=log)
    assert set(code.symbol_mapping) == set(NAMES)
    told = log.getvalue()
    spills = re.findall(r"(\d+) bytes spill stores", told)
    assert len(spills) == len(NAMES) and set(spills) == {"0"}, told
    assert not re.search(r"C75\d\d|serialized|setmaxnreg|warning", told), told


def test_every_function_of_the_headers_has_a_use():
    """What nothing uses nobody tests either."""
    kernels = [p.read_text() for p in jit._PACKAGE.rglob("*.cu")]
    headers = {p: p.read_text() for p in jit.INCLUDE.glob("*.cuh")}
    assert len(kernels) >= 2 and len(headers) >= 3
    defined = r"__forceinline__ \w+ (\w+)\("
    names = {name for text in headers.values() for name in re.findall(defined, text)}
    assert len(names) > 20
    everything = "\n".join([*kernels, *headers.values()])
    for name in names - {"run"}:
        assert len(re.findall(rf"\b{name}\b", everything)) > 1, f"nothing uses {name}"
    tested = Path(SOURCE).read_text()
    inside = {"mbarrier_try_wait", "bf16_to_float"}  # used by those that are tested
    # the end of both FP8 kernels, whose tests run it with every epilogue and layout
    epilogue = {"finish", "load_biases", "alpha_of"}
    for name in names - {"run"} - inside - epilogue:
        assert re.search(rf"\b{name}\b", tested), f"headers.cu does not test {name}"


# --- on a GPU ------------------------------------------------------------------------------------


def launch(name, parameters, threads, blocks=1, shared=0, cluster=1):
    """Run a kernel of headers.cu; tensors are passed as their addresses."""
    device = torch.cuda.current_device()
    function = kernel_function(SOURCE, name, "sm_90a", device, shared)
    passed = tuple(
        ctypes.c_void_p(p.data_ptr()) if isinstance(p, torch.Tensor) else p for p in parameters
    )
    Launch(device, function, (blocks, 1, 1), threads, shared, cluster, passed).on_current_stream()
    torch.cuda.synchronize()


def codes(shape, generator):
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def integers(shape, generator):
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


@pytest.mark.gpu
@pytest.mark.parametrize("stages", (1, 3, 4))
def test_mbarrier_ring(stages, generator):
    given = integers((101, 32), generator)
    out = torch.zeros(101, 32, dtype=torch.int32, device="cuda")
    launch(f"hand_over<{stages}>", (given.cuda(), out, ctypes.c_int(101)), 64)
    assert torch.equal(out.cpu(), given.flip(1))


@pytest.mark.gpu
def test_named_barriers_of_some_warps(generator):
    rows = 1000
    given = integers((rows, 2, 64), generator)
    out = torch.zeros_like(given, device="cuda")
    launch("reverse_in_pairs", (given.cuda(), out, ctypes.c_int(rows)), 128)
    want = given.flip(2)
    want[rows // 2 :, 0] = 0  # the first pair leaves halfway, the second begins a row later
    want[0, 1] = 0
    assert torch.equal(out.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("box", (8, 64, 256))
@pytest.mark.parametrize("pitch", (208, 1024))
def test_tma_box_swizzle_and_zeros_outside(pitch, box, generator):
    rows, columns = 150, 200
    memory = torch.full((rows + 2, pitch), 0x5B, dtype=torch.uint8)
    memory[1:-1, :columns] = torch.randint(0, 256, (rows, columns), generator=generator).byte()
    there = memory.cuda()
    described = tensor_map.encode(there[1].data_ptr(), rows, columns, pitch, box, 128)
    wide = torch.zeros(rows + 512, columns + 512, dtype=torch.uint8)  # what outside must read as
    wide[:rows, :columns] = memory[1:-1, :columns]
    row, column = torch.arange(box)[:, None], torch.arange(128)[None]
    place = row * 128 + (column // 16 ^ row % 8) * 16 + column % 16
    for x, y in ((0, 0), (128, 0), (16, 3), (0, 149), (128, 100), (256, 0), (0, 152), (192, 1)):
        out = torch.full((box * 128,), 0xAA, dtype=torch.uint8, device="cuda")
        at = (ctypes.c_int(x), ctypes.c_int(y))
        launch(f"load_box<{box}, false>", (described, out, *at), 128, shared=box * 128 + 2048)
        got = out.cpu()[place.flatten()].view(box, 128)
        assert torch.equal(got, wide[y : y + box, x : x + 128]), f"box at column {x}, row {y}"


@pytest.mark.gpu
@pytest.mark.parametrize("box", (16, 96, 256))
def test_tma_box_of_groups(box, generator):
    """Rows in the order that encode_groups tells, each group of 16 by itself; zeros outside."""
    rows, columns, pitch = 176, 208, 224
    memory = torch.full((rows + 2, pitch), 0x5B, dtype=torch.uint8)
    memory[1:-1, :columns] = torch.randint(0, 256, (rows, columns), generator=generator).byte()
    there = memory.cuda()
    given = (there[1].data_ptr(), rows, columns, pitch, box // 16, 128)
    described = tensor_map.encode_groups(*given)
    wide = torch.zeros(rows + 512, columns + 512, dtype=torch.uint8)
    wide[:rows, :columns] = memory[1:-1, :columns]
    row, column = torch.arange(box)[:, None], torch.arange(128)[None]
    q, j, i = row % 16 // 4, row % 4 // 2, row % 2
    lies = row // 16 * 16 + 8 * j + 2 * q + i
    place = lies * 128 + (column // 16 ^ lies % 8) * 16 + column % 16
    for x, group in ((0, 0), (128, 0), (16, 3), (0, 10), (256, 0), (0, 11), (192, 1)):
        out = torch.full((box * 128,), 0xAA, dtype=torch.uint8, device="cuda")
        at = (ctypes.c_int(x), ctypes.c_int(group))
        launch(f"load_box<{box}, true>", (described, out, *at), 128, shared=box * 128 + 2048)
        got = out.cpu()[place.flatten()].view(box, 128)
        want = wide[16 * group : 16 * group + box, x : x + 128]
        assert torch.equal(got, want), f"box at column {x}, group {group}"


@pytest.mark.gpu
@pytest.mark.parametrize("size", (4, 8, 16))
def test_small_copies_fill_with_zeros(size, generator):
    given = torch.randint(1, 256, (32, size), generator=generator).byte()
    for valid in (0xFFFFFFFF, 0, 0x80000001, 0x5A5A1234):
        out = torch.full((32, size), 0xAA, dtype=torch.uint8, device="cuda")
        launch(f"copy_small<{size}>", (given.cuda(), out, ctypes.c_uint(valid)), 32)
        kept = torch.tensor([valid >> lane & 1 for lane in range(32)], dtype=torch.uint8)
        assert torch.equal(out.cpu(), given * kept[:, None])


def multiplied(kind, n, more, a, b):
    """A (128 x 128 bytes) times B (n x 128), added to what the kernel puts there first."""
    there = a.cuda(), b.cuda()
    maps = [tensor_map.encode(t.data_ptr(), len(t), 128, 128, len(t), 128) for t in there]
    dtype = torch.int32 if kind == "int" else torch.float32
    out = torch.full((128, n), -1, dtype=dtype, device="cuda")
    shared = (128 + n) * 128 + 2048
    launch(f"multiply<{kind}, {n}, {str(more).lower()}>", (*maps, out), 128, shared=shared)
    before = torch.arange(128 * n, dtype=torch.int32).view(128, n) % 200
    return out.cpu(), before if more else torch.zeros_like(before)


@pytest.mark.gpu
@pytest.mark.parametrize("more", (False, True))
@pytest.mark.parametrize("n", WIDTHS["int"])
def test_wgmma_of_int8(n, more, generator):
    a, b = codes((128, 128), generator), codes((n, 128), generator)
    a[3], b[5] = -128, -128
    out, before = multiplied("int", n, more, a, b)
    assert torch.equal(out, before + a.int() @ b.int().T)


@pytest.mark.gpu
@pytest.mark.parametrize("more", (False, True))
@pytest.mark.parametrize("n", WIDTHS["float"])
def test_wgmma_of_fp8(n, more, generator):
    e4m3 = torch.float8_e4m3fn

    def small(rows):  # multiples of 1/2 to 2: sums of 128 products are exact in 14 bits
        return (torch.randint(-4, 5, (rows, 128), generator=generator) / 2).to(e4m3)

    a, b = small(128), small(n)
    out, before = multiplied("float", n, more, a, b)
    assert_bit_equal(out + 0.0, (before + a.double() @ b.double().T).float() + 0.0)
    a, b = (
        (codes((rows, 128), generator).view(torch.uint8) & 0xFE).view(e4m3) for rows in (128, n)
    )
    a.view(torch.uint8)[3, 70], b.view(torch.uint8)[5, 127] = 0x7F, 0xFF  # NaN
    out, before = multiplied("float", n, more, a, b)
    magnitude = a.double().abs() @ b.double().abs().T + before
    assert_close_to_exact(out, a.double() @ b.double().T + before, magnitude, FP8_PROMOTED_SUM)
    assert int(out.isnan().sum()) == n + 127


@pytest.mark.gpu
@pytest.mark.parametrize("size", (2, 4, 8))
def test_cluster_exchange(size):
    clusters, rounds = 40, 7
    blocks = clusters * size
    out = torch.zeros(blocks, rounds, size, 32, 4, device="cuda")
    launch(f"exchange<{size}>", (out, ctypes.c_int(rounds)), 32, blocks=blocks, cluster=size)
    block, turn = torch.arange(blocks)[:, None, None, None], torch.arange(rounds)[:, None, None]
    rank = torch.arange(size)[:, None]
    want = 8192 * (block // size * size + rank) + 1024 * turn + 128 * rank + torch.arange(128)
    want = want.view(blocks, rounds, size, 32, 4).flip(3)
    assert torch.equal(out.cpu(), want.float())


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "stages"), SHARES)
def test_multicast(size, stages, generator):
    clusters, boxes = 60, 50
    rows = boxes * 8 * size
    given = torch.randint(0, 256, (rows, 128), generator=generator).byte().cuda()
    described = tensor_map.encode(given.data_ptr(), rows, 128, 128, 8, 128)
    out = torch.full((clusters * size, rows, 128), 0xAA, dtype=torch.uint8, device="cuda")
    shared, blocks = stages * size * 8 * 128 + 2048, clusters * size
    at = (described, out, ctypes.c_int(boxes))
    launch(f"share<{size}, {stages}>", at, 64, blocks=blocks, shared=shared, cluster=size)
    row, column = torch.arange(rows)[:, None], torch.arange(128)[None]
    place = (row * 128 + (column // 16 ^ row % 8) * 16 + column % 16).flatten().cuda()
    assert (out.view(blocks, -1)[:, place].view(blocks, rows, 128) == given).all()


@pytest.mark.gpu
def test_registers_move_between_warpgroups(generator):
    given = integers((128 + 192 * 256,), generator)
    out = torch.zeros_like(given, device="cuda")
    launch("trade_registers", (given.cuda(), out), 384)
    want = torch.cat([given[:128], given[128:].view(192, 256).flip(0).flatten()])
    assert torch.equal(out.cpu(), want)


def floats(generator):
    """Bit patterns of every kind, an even number of them."""
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), 65504.0, 65519.99, 65520.0, 1.0]
    )
    ties = (integers((50000,), generator) >> 13 << 13) + 0x1000  # halfway for FP16
    halves = (integers((50000,), generator) >> 16 << 16) + 0x8000  # halfway for BF16
    small = torch.randint(0, 2**25, (50000,), generator=generator).int()  # subnormal, nearly
    bits = torch.cat([integers((100000,), generator), ties, halves, small])
    return torch.cat([bits.view(torch.float32), 2.0 ** -(special.abs() + 20), special])


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
def test_conversions_round_as_torch_does(name, generator):
    dtype, given = DTYPES[name], floats(generator)
    count = given.numel()
    assert count % 2 == 0
    out = torch.full((count,), 7, dtype=dtype, device="cuda")
    pairs = torch.zeros(count // 2, dtype=torch.int32, device="cuda")
    parameters = (given.cuda(), out, pairs, ctypes.c_int(count))
    launch(f"convert_all<{name}>", parameters, 256, blocks=-(-count // 256))
    assert_bit_equal(out, given.to(dtype))
    if name != "float":
        assert_bit_equal(pairs.view(dtype), given.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", (1, 2, 3))
def test_biases_widen_exactly(kind):
    dtype = (torch.bfloat16, torch.float16, torch.float32)[kind - 1]
    if dtype is torch.float32:
        values = torch.randn(65536)
    else:
        values = torch.arange(-32768, 32768).short().view(dtype)  # every one there is
    spread = torch.zeros(65536, 3, dtype=dtype, device="cuda")
    spread[:, 1] = values.cuda()
    out = torch.zeros(65536, device="cuda")
    bias = ctypes.c_void_p(spread[0, 1].data_ptr())
    parameters = (bias, ctypes.c_int(kind), ctypes.c_int64(3), out, ctypes.c_int(65536))
    launch("read_bias", parameters, 256, blocks=256)
    assert_bit_equal(out, values.float())


@pytest.mark.gpu
@pytest.mark.parametrize("raster", (1, 3, 8, 64))
def test_tiles_in_bands(raster):
    for row_tiles, column_tiles in ((1, 1), (1, 7), (7, 1), (8, 5), (17, 9), (64, 3), (65, 2)):
        tiles = row_tiles * column_tiles
        out = torch.full((tiles, 2), -1, dtype=torch.int32, device="cuda")
        sizes = (ctypes.c_int(size) for size in (row_tiles, column_tiles, raster))
        launch("visit", (out, *sizes), 128, blocks=-(-tiles // 128))
        want = [
            [row, column]
            for first in range(0, row_tiles, raster)
            for column in range(column_tiles)
            for row in range(first, min(first + raster, row_tiles))
        ]
        assert out.tolist() == want, (row_tiles, column_tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (64, 192))
@pytest.mark.parametrize("layout", ("rows", "columns", "neither"))
@pytest.mark.parametrize("m", (100, 101, 400))
def test_scales_of_a_tiles_rows(m, layout, rows, generator):
    blocks = 11
    pitch = {"rows": 12, "columns": m + 4, "neither": 13}[layout]
    whole = torch.randn(blocks if layout == "columns" else m, pitch, generator=generator).cuda()
    scale = whole[:, :m].T if layout == "columns" else whole[:, :blocks]
    codes = torch.empty(m, 128 * blocks, dtype=torch.uint8, device="cuda")
    problem = gemm.parameters(codes, codes, None, raster=1, input_scale=scale)
    together = {"rows": 1, "columns": 2 if m % 4 == 0 else 0, "neither": 0}[layout]
    assert problem.input_scale_vector == together
    wide = torch.zeros(m + rows, blocks + 4)
    wide[:m, :blocks] = scale.cpu()
    for first in range(0, m, rows):
        for block in range(0, blocks, 4):
            out = torch.full((4, rows) if together == 2 else (rows, 4), -1.0, device="cuda")
            at = (ctypes.c_int(value) for value in (first, block, blocks))
            launch(f"row_scales<{rows}>", (problem, out, *at), 32)
            got = out.cpu().T if together == 2 else out.cpu()
            want = wide[first : first + rows, block : block + 4]
            assert torch.equal(got, want), f"rows from {first}, blocks from {block}"


@pytest.mark.gpu
def test_gelu(generator):
    size = torch.randn(1 << 16, generator=generator)
    given = torch.cat([size * scale for scale in (1, 4, 1e-6, 30, 1e20)])
    special = [0.0, -0.0, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 1e-42, -11.2]
    given = torch.cat([given, torch.tensor(special)])
    out = torch.full_like(given, -1.0, device="cuda")
    count = len(given)
    launch("gelu_all", (given.cuda(), out, ctypes.c_int(count)), 256, blocks=-(-count // 256))
    x = given.double()
    inner = 0.7978845608028654 * (x + 0.044715 * x**3)
    exact = x / (1 + torch.exp(-2 * inner))
    got = out.cpu().double()
    # __expf's error and that of its argument grow with |inner|; results near 1e-37 may become 0
    allowed = exact.abs() * 2.0**-23 * (4 + 8 * inner.abs().clamp(max=100)) + 1e-36
    right = (got - exact).abs() <= allowed
    right |= (got == exact) | (got.isnan() & exact.isnan())
    assert right.all(), [(float(v), float(g)) for v, g in zip(x[~right], got[~right])][:5]
