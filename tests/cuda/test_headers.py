"""Each piece of farro/cuda/include alone, through the kernels of headers.cu."""

from __future__ import annotations

import ctypes
import io
import itertools
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.cuda import jit, tensor_map
from farro.cuda.fp8 import gemm
from farro.cuda.launch import Launch, kernel_function
from farro.formats import nvfp4
from farro.ops.nvfp4_quantize import activation
from farro.testing import FP8_PROMOTED_SUM, assert_bit_equal, assert_close_to_exact

SOURCE = str(Path(__file__).with_name("headers.cu"))
WIDTHS = {"int": (8, 16, 32, 64, 96, 112, 128), "float": (8, 64, 80, 96, 144, 160, 192, 256)}
PRODUCTS = [
    (kind, n, more) for kind, widths in WIDTHS.items() for n in widths for more in (False, True)
]
BOOLEANS = ("false", "true")
SPARSE = [  # N, BF16, whether more is added
    (n, bf16, more)
    for n in (8, 16, 32, 64, 128, 192, 256)
    for bf16 in BOOLEANS
    for more in BOOLEANS
]
SHARES = ((2, 1), (2, 3), (4, 3))
DTYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "float": torch.float32}
NAMES = (
    *(f"hand_over<{stages}>" for stages in (1, 3, 4)),
    *(f"load_box<{rows}, false>" for rows in (8, 64, 256)),
    *(f"load_box<{rows}, true>" for rows in (16, 96, 256)),
    *(f"store_boxes<{32 * size}>" for size in (128, 80)),
    "store_some_boxes<1024>",
    *(f"load_expert_box<{rows}, false>" for rows in (64, 256)),
    *(f"load_expert_box<{rows}, true>" for rows in (64, 256)),
    *(f"copy_small<{size}>" for size in (4, 8, 16)),
    *(f"multiply<{kind}, {n}, {str(more).lower()}>" for kind, n, more in PRODUCTS),
    *(f"multiply_sparse<{n}, {bf16}, {more}>" for n, bf16, more in SPARSE),
    *(f"exchange<{size}>" for size in (2, 4, 8)),
    *(f"share_maxima<{size}>" for size in (1, 2, 4, 8)),
    *(f"tell_all<{size}>" for size in (1, 2, 8)),
    *(f"share<{size}, {stages}>" for size, stages in SHARES),
    *(f"convert_all<{out}>" for out in DTYPES),
    *(f"row_scales<{rows}>" for rows in (64, 192)),
    *(f"{name}<{bf16}>" for name in ("multiply_pairs", "expand_units") for bf16 in BOOLEANS),
    *("reverse_in_pairs", "trade_registers", "read_bias", "visit", "gelu_all"),
    "encode_fours",
    *("copy_bulk", "expand_blocks", "rows_of_experts", "decode_bytes", "widen_halves"),
    *("gate_pairs", "scale_blocks"),
    *("copy_partly", "write_late", "read_after", "share_tiles", "first_of_warp"),
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
    sources = (*jit._PACKAGE.rglob("*.cu"), *jit._PACKAGE.rglob("*.cuh"))
    kernels = [p.read_text() for p in sources if p.parent != jit.INCLUDE]
    headers = {p: p.read_text() for p in jit.INCLUDE.glob("*.cuh")}
    assert len(kernels) >= 2 and len(headers) >= 3
    defined = r"__forceinline__ \w+ (\w+)\("
    names = {name for text in headers.values() for name in re.findall(defined, text)}
    assert len(names) > 20
    parts = [p.read_text() for p in jit._PACKAGE.rglob("*.cuh")]  # operators have some too
    everything = "\n".join([*kernels, *parts])
    for name in names - {"run"}:
        assert len(re.findall(rf"\b{name}\b", everything)) > 1, f"nothing uses {name}"
    tested = Path(SOURCE).read_text()
    # used by those that are tested
    inside = {"mbarrier_try_wait", "bf16_to_float"}
    inside |= {"expand_unit", "reorder_unit", "spread_nan", "add_zero_times"}  # all by unit_of
    inside |= {"silu_of_bf16", "rounded_to_bf16"}  # by gated_pair
    # the end of both FP8 kernels, whose tests run it with every epilogue and layout
    epilogue = {"finish_values", "store_values", "load_biases", "load_residual", "alpha_of"}
    epilogue |= {"read_vector", "unpack2", "expect_biases", "expect_residual", "prefetch_to_l2"}
    for name in names - {"run"} - inside - epilogue:
        assert re.search(rf"\b{name}\b", tested), f"headers.cu does not test {name}"


# --- on a GPU ------------------------------------------------------------------------------------


def launch(name, parameters, threads, blocks=1, shared=0, cluster=1, **more):
    """Run a kernel of headers.cu; tensors are passed as their addresses."""
    device = torch.cuda.current_device()
    function = kernel_function(SOURCE, name, "sm_90a", device, shared)
    passed = tuple(
        ctypes.c_void_p(p.data_ptr()) if isinstance(p, torch.Tensor) else p for p in parameters
    )
    grid = blocks, 1, 1
    Launch(device, function, grid, threads, shared, cluster, passed, **more).on_current_stream()
    if not more:
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
@pytest.mark.parametrize("box, size", [(16, 16), (96, 16), (256, 16), (96, 32), (256, 32)])
def test_tma_box_of_groups(box, size, generator):
    """Rows in the order that encode_groups tells, each group by itself; zeros outside."""
    rows, columns, pitch = 11 * size, 208, 224
    memory = torch.full((rows + 2, pitch), 0x5B, dtype=torch.uint8)
    memory[1:-1, :columns] = torch.randint(0, 256, (rows, columns), generator=generator).byte()
    there = memory.cuda()
    given = (there[1].data_ptr(), rows, columns, pitch, box // size, 128, size)
    described = tensor_map.encode_groups(*given)
    wide = torch.zeros(rows + 512, columns + 512, dtype=torch.uint8)
    wide[:rows, :columns] = memory[1:-1, :columns]
    row, column = torch.arange(box)[:, None], torch.arange(128)[None]
    q, j, i = row % size // (size // 4), row % (size // 4) // 2, row % 2
    lies = row // size * size + 8 * j + 2 * q + i
    place = lies * 128 + (column // 16 ^ lies % 8) * 16 + column % 16
    for x, group in ((0, 0), (128, 0), (16, 3), (0, 10), (256, 0), (0, 11), (192, 1)):
        out = torch.full((box * 128,), 0xAA, dtype=torch.uint8, device="cuda")
        at = (ctypes.c_int(x), ctypes.c_int(group))
        launch(f"load_box<{box}, true>", (described, out, *at), 128, shared=box * 128 + 2048)
        got = out.cpu()[place.flatten()].view(box, 128)
        want = wide[size * group : size * group + box, x : x + 128]
        assert torch.equal(got, want), f"box at column {x}, group {group}"


@pytest.mark.gpu
def test_bulk_copies(generator):
    given = torch.randint(0, 256, (16384,), generator=generator).byte()
    there = given.cuda()
    for begin, first, size in ((0, 0, 16384), (16, 0, 16), (4096, 48, 2816), (1008, 15360, 1024)):
        out = torch.full((16384,), 0xAA, dtype=torch.uint8, device="cuda")
        at = (ctypes.c_int(first), ctypes.c_int(size))
        launch("copy_bulk", (there[begin:], out, *at), 128, shared=16384 + 2048)
        want = torch.full((16384,), 0x5B, dtype=torch.uint8)
        want[first : first + size] = given[begin : begin + size]
        assert torch.equal(out.cpu(), want), f"{size} bytes from {begin} to {first}"


@pytest.mark.gpu
@pytest.mark.parametrize("group, groups", [(32, 4), (16, 5)])
def test_tma_store_of_results(group, groups, generator):
    """[groups][16 rows][group] to rows of the output; nothing past its rows, columns and pitch."""
    rows, columns, size = 75, 6 * group, group * groups
    given = torch.randint(1, 2**15, (5, groups, 16, group), generator=generator).short()
    for z in (0, 1, 4):
        memory = torch.zeros(rows + 2, columns + 8, dtype=torch.int16, device="cuda")
        pitch = 2 * memory.stride(0)
        what = (memory[1].data_ptr(), rows, columns, pitch, groups, 16, group)
        described = tensor_map.encode_results(*what)
        parameters = (described, given.cuda(), ctypes.c_int(5), ctypes.c_int(z))
        name = f"store_boxes<{32 * size}>"
        launch(name, parameters, 32, shared=32 * size + 2048)
        want = torch.zeros(rows + 2, columns + 8 + size, dtype=torch.int16)
        boxes = given.permute(0, 2, 1, 3).reshape(80, size)
        want[1:-1, z * group : z * group + size] = boxes[:rows]
        want[:, columns:] = 0
        assert torch.equal(memory.cpu(), want[:, : columns + 8]), f"from group {z} on"


@pytest.mark.gpu
def test_eights_of_rows_are_stored_where_valid(generator):
    """In the swizzle that wgmma reads; what is outside of the matrix, or not valid, stays."""
    given = torch.randint(1, 256, (6, 8, 8, 16), generator=generator).byte()
    memory = torch.zeros(50, 208, dtype=torch.uint8, device="cuda")
    described = tensor_map.encode(memory.data_ptr(), 43, 192, 208, 8, 128)
    valid = 0b110101
    numbers = ctypes.c_int(6), ctypes.c_int(128), ctypes.c_uint(valid)
    launch("store_some_boxes<1024>", (described, given.cuda(), *numbers), 32, shared=1024 + 2048)
    want = torch.zeros(50, 208, dtype=torch.uint8)
    row, piece = torch.arange(8)[:, None], torch.arange(8)
    for box in range(6):
        if valid >> box & 1:
            flat = given[box][row, piece ^ row].reshape(8, 128)
            want[8 * box : 8 * box + 8, 128:192] = flat[:, :64]
    want[43:] = 0
    assert torch.equal(memory.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", (4, 8, 16))
def test_small_copies_fill_with_zeros(size, generator):
    given = torch.randint(1, 256, (32, size), generator=generator).byte()
    for valid in (0xFFFFFFFF, 0, 0x80000001, 0x5A5A1234):
        out = torch.full((32, size), 0xAA, dtype=torch.uint8, device="cuda")
        launch(f"copy_small<{size}>", (given.cuda(), out, ctypes.c_uint(valid)), 32)
        kept = torch.tensor([valid >> lane & 1 for lane in range(32)], dtype=torch.uint8)
        assert torch.equal(out.cpu(), given * kept[:, None])


@pytest.mark.gpu
def test_parts_of_16_bytes(generator):
    given = torch.randint(1, 256, (32, 16), generator=generator).byte()
    out = torch.full((32, 16), 0xAA, dtype=torch.uint8, device="cuda")
    launch("copy_partly", (given.cuda(), out), 32)
    kept = torch.arange(16) < torch.arange(32)[:, None] % 17
    assert torch.equal(out.cpu(), given * kept)


def boxed(got, box):
    """Rows of a box, from shared memory as the 128-byte swizzle leaves it."""
    row, column = torch.arange(box)[:, None], torch.arange(128)[None]
    place = row * 128 + (column // 16 ^ row % 8) * 16 + column % 16
    return got[place.flatten()].view(box, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("box", (64, 256))
def test_tma_box_of_an_expert(box, generator):
    experts, rows, columns, pitch = 3, 150, 200, 208
    memory = torch.randint(0, 256, (experts, rows + 2, pitch), generator=generator).byte()
    there = memory.cuda()
    steps = (there.stride(0), pitch)
    described = tensor_map.encode_experts(there.data_ptr(), (experts, rows, columns), steps, box)
    wide = torch.zeros(experts, rows + 512, columns + 256, dtype=torch.uint8)
    wide[:, :rows, :columns] = memory[:, :rows, :columns]
    for x, y, e in ((0, 0, 0), (128, 64, 2), (128, 100, 1), (256, 0, 0), (0, 152, 2)):
        out = torch.full((box * 128,), 0xAA, dtype=torch.uint8, device="cuda")
        at = (ctypes.c_int(x), ctypes.c_int(y), ctypes.c_int(e))
        launch(
            f"load_expert_box<{box}, false>", (described, out, *at), 128, shared=box * 128 + 2048
        )
        want = wide[e, y : y + box, x : x + 128]
        assert torch.equal(boxed(out.cpu(), box), want), f"box at {x}, {y} of expert {e}"


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("box", (64, 256))
def test_tma_box_of_pairs(box, interleaved, generator):
    """Eight rows, then their partners, which are half of the rows away or the next ones."""
    experts, pairs, columns, pitch = 3, 88, 200, 208
    memory = torch.randint(0, 256, (experts, 2 * pairs, pitch), generator=generator).byte()
    there = memory.cuda()
    steps = (there.stride(0), *((2 * pitch, pitch) if interleaved else (pitch, pairs * pitch)))
    described = tensor_map.encode_pairs(
        there.data_ptr(), (experts, pairs, columns), steps, box // 16
    )
    of_pair = memory.view(experts, pairs, 2, pitch)
    if not interleaved:
        of_pair = memory.view(experts, 2, pairs, pitch).transpose(1, 2)
    wide = torch.zeros(experts, pairs + 512, 2, columns + 256, dtype=torch.uint8)
    wide[:, :pairs, :, :columns] = of_pair[..., :columns]
    for x, block, e in ((0, 0, 0), (128, 4, 2), (128, 10, 1), (256, 0, 0), (0, 11, 2)):
        out = torch.full((box * 128,), 0xAA, dtype=torch.uint8, device="cuda")
        at = (ctypes.c_int(x), ctypes.c_int(block), ctypes.c_int(e))
        shared = box * 128 + 2048
        launch(f"load_expert_box<{box}, true>", (described, out, *at), 128, shared=shared)
        want = wide[e, 8 * block : 8 * block + box // 2, :, x : x + 128]
        want = want.view(box // 16, 8, 2, 128).transpose(1, 2).reshape(box, 128)
        assert torch.equal(boxed(out.cpu(), box), want), f"box at {x}, block {block}, expert {e}"


@pytest.mark.gpu
@pytest.mark.parametrize("size", (1, 2, 4, 8))
def test_maxima_over_a_cluster(size, generator):
    clusters, rounds = 40, 50
    given = integers((clusters, size, rounds, 64), generator)
    out = torch.zeros_like(given, device="cuda")
    blocks = clusters * size
    launch(
        f"share_maxima<{size}>",
        (given.cuda(), out, ctypes.c_int(rounds)),
        64,
        blocks=blocks,
        cluster=size,
    )
    slot = (torch.arange(64) * 7 + torch.arange(rounds)[:, None]) % 64 // 2
    unsigned = given.long() & 0xFFFFFFFF
    want = torch.zeros(clusters, size, rounds, 64, dtype=torch.long)
    want.scatter_reduce_(3, slot.expand_as(unsigned), unsigned, "amax")
    want = want.amax(1, keepdim=True).expand(-1, size, -1, -1)
    assert torch.equal(out.cpu().long() & 0xFFFFFFFF, want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", (1, 2, 8))
def test_numbers_told_to_a_cluster(size, generator):
    clusters, rounds = 40, 50
    given = integers((clusters, rounds), generator)
    out = torch.zeros((clusters, size, rounds, 64), dtype=torch.int32, device="cuda")
    parameters = (given.cuda(), out, ctypes.c_int(rounds))
    launch(f"tell_all<{size}>", parameters, 64, blocks=clusters * size, cluster=size)
    assert torch.equal(out.cpu(), given[:, None, :, None].expand_as(out))


@pytest.mark.gpu
def test_a_kernel_that_overlaps_sees_what_the_one_before_wrote():
    blocks = 64
    there, out = (torch.zeros(blocks * 32, dtype=torch.int32, device="cuda") for _ in "ab")
    for value in (5, 7000, 11):
        launch("write_late", (there, ctypes.c_int(value)), 32, blocks=blocks, overlaps=False)
        launch("read_after", (there, out), 32, blocks=blocks, overlaps=True)
        assert torch.equal(out.cpu(), torch.arange(blocks * 32, dtype=torch.int32) + value)


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
@pytest.mark.parametrize("more", BOOLEANS)
@pytest.mark.parametrize("bf16", BOOLEANS)
@pytest.mark.parametrize("n", sorted({n for n, _, _ in SPARSE}))
def test_sparse_wgmma(n, bf16, more, generator):
    """Two of each four of K, chosen alike in both halves of each 32: sums of small integers."""
    dtype = torch.bfloat16 if bf16 == "true" else torch.float16
    kept = torch.randint(-4, 5, (64, 2, 2, 4, 2), generator=generator)  # row, 32, half, four, which
    choices = torch.tensor([(i, j) for j in range(4) for i in range(j)])
    choice = choices[torch.randint(len(choices), (64, 2, 4), generator=generator)]
    a = torch.zeros(64, 2, 2, 4, 4, dtype=torch.int64)
    a.scatter_(-1, choice[:, :, None].expand_as(kept), kept)
    nibbles = choice[..., 0] | choice[..., 1] << 2
    half = sum(nibbles[..., c] << 4 * c for c in range(4)).view(4, 2, 8, 2)  # warp, high, row, 32
    words = (half[:, 0] | half[:, 1] << 16).contiguous()
    b = torch.randint(-8, 9, (n, 64), generator=generator)
    there = b.to(dtype).cuda()
    described = tensor_map.encode(there.data_ptr(), n, 128, 128, n, 128)
    given = kept.to(dtype).cuda(), words.to(torch.uint32).cuda()
    out = torch.full((64, n), -1.0, device="cuda")
    name = f"multiply_sparse<{n}, {bf16}, {more}>"
    launch(name, (described, *given, out), 128, shared=n * 128 + 2048)
    want = a.view(64, 64) @ b.T
    if more == "true":
        want += torch.arange(64 * n).view(64, n) % 200
    assert torch.equal(out.cpu(), want.float())


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


def token_counts(experts, kind, generator):
    """Rows of each expert: some, as many as make one tile each, few experts only, or none."""
    if kind == "some":
        return torch.randint(0, 100, (experts,), generator=generator)
    if kind == "one tile each":
        return torch.ones(experts, dtype=torch.int64)
    counts = torch.zeros(experts, dtype=torch.int64)
    if kind == "few":  # the others are skipped in one search
        counts[torch.randint(experts, (2,), generator=generator)] = 500
    return counts


def launch_tiles(counts, rows, step):
    """The sums of tiles, and the expert of each tile as each lane sees it (-1: not taken)."""
    experts, tiles = len(counts), int((-(-counts // rows)).sum())
    sums = torch.full((experts + 1,), -1, dtype=torch.int32, device="cuda")
    owners = torch.full((tiles + 1, 32), -1, dtype=torch.int32, device="cuda")
    sizes = (ctypes.c_int(size) for size in (experts, rows, step))
    given = (counts.int().cuda(), sums, owners, *sizes)
    launch("share_tiles", given, 128, shared=4 * (experts + 1))
    return sums.tolist(), owners.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("some", "one tile each", "few", "none"))
@pytest.mark.parametrize("experts", (1, 7, 31, 32, 33, 128, 257, 4096))
def test_whose_a_tile_is(experts, kind, generator):
    """Neighbouring tiles, and tiles so far apart that a search jumps over experts."""
    counts = token_counts(experts, kind, generator)
    for rows in (1, 16, 64):
        of_each = [-(-count // rows) for count in counts.tolist()]
        before = [0, *itertools.accumulate(of_each)]
        want = torch.arange(experts).repeat_interleave(torch.tensor(of_each))
        for step in (4, 132):
            sums, owners = launch_tiles(counts, rows, step)
            assert sums == before, (rows, step)
            taken = torch.arange(len(want)) % step < 4  # four warps begin at tiles 0 to 3
            seen = torch.where(taken, want, -1)[:, None]
            assert (owners[:-1] == seen).all(), (rows, step)
            assert (owners[-1] == -1).all(), "a tile past the last one"


@pytest.mark.gpu
def test_a_lane_speaks_for_its_warp(generator):
    given = integers((128,), generator)
    out = torch.zeros_like(given, device="cuda")
    launch("first_of_warp", (given.cuda(), out), 128)
    assert torch.equal(out.cpu(), given[::32].repeat_interleave(32))


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


@pytest.mark.gpu
def test_codes_of_e4m3():
    given = torch.randn(4096, 4) * torch.tensor([1e-30, 1e-3, 1.0, 1e30]).repeat(1024)[:, None]
    given[::7] = 0.0
    given[5, 1], given[9, 2], given[13, 0] = float("nan"), float("inf"), float("-inf")
    scale, codes = torch.full((4096,), -1.0, device="cuda"), torch.zeros(4096, 4, device="cuda")
    codes = codes.to(torch.uint8)
    launch("encode_fours", (given.cuda(), scale, codes, ctypes.c_int(4096)), 256, blocks=16)
    want = (given.abs().amax(1) / 448).clamp_min(1e-12)
    assert_bit_equal(scale.cpu(), want)
    finite = want.isfinite()
    assert (codes.cpu()[~finite] & 127 == 127).all() and finite.sum() == 4093
    exact = (given * want.reciprocal()[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.cpu()[finite], exact.view(torch.uint8)[finite])


class Rows(ctypes.Structure):
    """`struct Rows` of nvfp4.cuh."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("experts", "capacity", "k", "ragged")),
    )


@pytest.mark.gpu
def test_rows_of_experts():
    counts = torch.tensor([3, 0, -5, 7, 8, 9, 2**31 - 1], dtype=torch.int32, device="cuda")
    out = torch.full((7, 2), -1, dtype=torch.int32, device="cuda")
    launch("rows_of_experts", (Rows(counts.data_ptr(), 7, 8, 32, 0), out), 32)
    assert out.tolist() == [[0, n] for n in (3, 0, 0, 7, 8, 8, 8)]
    ends = torch.tensor([0, 3, 3, 2, 50, 2**31 - 1], dtype=torch.int32, device="cuda")
    out = torch.full((5, 2), -1, dtype=torch.int32, device="cuda")
    launch("rows_of_experts", (Rows(ends.data_ptr(), 5, 40, 32, 1), out), 32)
    assert out.tolist() == [[0, 3], [3, 0], [3, 0], [2, 38], [40, 0]]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(byte):
    """From its definition: bias 7, subnormals, no infinities, NaN in the last code."""
    exponent, mantissa = (byte >> 3 & 15).double(), (byte & 7).double()
    size = torch.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2 ** (exponent - 7))
    size = torch.where((byte & 127) == 127, torch.nan, size)
    return torch.where(byte > 127, -size, size)


def assert_same_values(out, want):
    got = out.cpu().double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.gpu
def test_bytes_become_halves():
    byte = torch.stack([torch.arange(256).roll(-i) for i in (0, 77, 130, 201)], 1)
    out = torch.full((256, 3, 4), -1.0, dtype=torch.float16, device="cuda")
    launch("decode_bytes", (byte.byte().cuda(), out, ctypes.c_int(256)), 256)
    codes = (byte & 15, byte >> 4)
    want = [e4m3(byte), *(E2M1[code].double() / 64 for code in codes)]
    assert_same_values(out, torch.stack(want, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", BOOLEANS)
def test_products_of_pairs(bf16, generator):
    dtype, count = (torch.bfloat16 if bf16 == "true" else torch.float16), 4096
    a, b = (torch.randint(-15, 16, (count, 2), generator=generator) for _ in "ab")
    a, b = a.double() / 64, b.double() * 2  # products have 8 bits, as those of codes and scales
    out = torch.full((3, count, 2), -1.0, dtype=dtype, device="cuda")
    given = a.to(dtype).cuda(), b.to(dtype).cuda()
    launch(f"multiply_pairs<{bf16}>", (*given, out, ctypes.c_int(count)), 256, blocks=count // 256)
    if bf16 == "false":
        assert_same_values(out[0], a * b)
    assert_same_values(out[1], a * b[:, :1])
    assert_same_values(out[2], a * b[:, 1:])


@pytest.mark.gpu
def test_scales_widen_exactly():
    scales = e4m3(torch.arange(256))
    out = torch.full((256,), -1.0, dtype=torch.bfloat16, device="cuda")
    at = (scales.half().cuda(), out, ctypes.c_float(2.0**118), ctypes.c_int(128))
    launch("widen_halves", at, 128)
    assert_same_values(out, scales * 2.0**118)


@pytest.mark.gpu
def test_activations_expand_in_the_order_of_weights(generator):
    """Even positions of each 32, then odd ones. Codes: each with each scale."""
    scales = torch.arange(128).repeat_interleave(16)
    codes = (torch.arange(32) + torch.arange(16).repeat(128)[:, None]) % 16
    codes = codes[:, torch.randperm(32, generator=generator)]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).byte()
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)])
    out = torch.full((2048, 32), -1.0, dtype=torch.float16, device="cuda")
    units = ctypes.c_int(4 * 2048)
    given = packed.cuda(), scales.byte().cuda()
    launch("expand_units<false>", (*given, out, units), 256, blocks=32)
    want = (E2M1[codes].double() * e4m3(scales)[:, None])[:, order]
    assert_same_values(out, want)
    out.fill_(-1)
    launch("expand_blocks", (*given, out, ctypes.c_int(2048)), 256, blocks=8)
    assert_same_values(out, want)
    x = torch.randint(-(2**15), 2**15, (2048, 32), generator=generator).short().view(torch.bfloat16)
    out = torch.full((2048, 32), -1.0, dtype=torch.bfloat16, device="cuda")
    launch("expand_units<true>", (x.cuda(), ctypes.c_void_p(0), out, units), 256, blocks=32)
    fours = x[:, order].view(2048, 8, 4)
    spoilt = ~fours.isfinite().all(-1, keepdim=True)
    assert 100 < int(spoilt.sum()) < 8000
    assert_same_values(out.view(2048, 8, 4), fours.double().masked_fill(spoilt, torch.nan))


@pytest.mark.gpu
def test_gates_and_scales_of_blocks(generator):
    """Gates and ups of any bits; magnitudes of any bits with some gscales, odd ones too."""
    gate, up = (
        torch.randint(-(2**15), 2**15, (1 << 18, 2), generator=generator).short() for _ in range(2)
    )
    out = torch.zeros_like(gate).cuda()
    values = torch.zeros(gate.shape, device="cuda")
    count = ctypes.c_int(gate.shape[0])
    launch("gate_pairs", (gate.cuda(), up.cuda(), out, values, count), 256, blocks=1 << 10)
    both = torch.cat((gate.view(torch.bfloat16), up.view(torch.bfloat16)), -1)
    want = activation.gated(both, activation.Gated(False, "silu", 1.0, -1.0))
    assert_same_values(out.view(torch.bfloat16), want.double())
    assert_same_values(values, want.double())

    bits = torch.randint(0, 2**15, (1 << 18,), generator=generator).int() << 16
    some = torch.tensor([1.0, 3.0, 0.37, 448.0, 1e30, 1e-30, 0.0, -2.0, torch.inf, torch.nan])
    gscale = some[torch.randint(0, len(some), bits.shape, generator=generator)]
    scales, ratios = torch.zeros_like(bits).cuda(), torch.zeros(bits.shape, device="cuda")
    given = (bits.cuda(), gscale.cuda(), scales, ratios, ctypes.c_int(bits.shape[0]))
    launch("scale_blocks", given, 256, blocks=1 << 10)
    blocks = torch.zeros(bits.shape[0], 32)
    blocks[:, 5] = bits.view(torch.float32)
    _, wanted = nvfp4.quantize_blocks(blocks, gscale[:, None])
    assert torch.equal(scales.cpu(), wanted.flatten().int())
