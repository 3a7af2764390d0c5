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
from farro.cuda.launch import Launch, kernel_function
from farro.testing import assert_bit_equal

SOURCE = str(Path(__file__).with_name("headers.cu"))
WIDTHS = (8, 16, 32, 64, 96, 112, 128)
DTYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "float": torch.float32}
NAMES = (
    *(f"hand_over<{stages}>" for stages in (1, 3, 4)),
    *(f"load_box<{rows}>" for rows in (8, 64, 256)),
    *(f"copy_small<{size}>" for size in (4, 8, 16)),
    *(f"multiply<{n}, {more}>" for n in WIDTHS for more in ("false", "true")),
    *(f"exchange<{size}>" for size in (2, 4)),
    *(f"convert_all<{out}>" for out in DTYPES),
    *("reverse_in_pairs", "trade_registers", "read_bias"),
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
    clusters = {"cluster_rank", "cluster_sync", "map_to_rank", "mbarrier_wait_cluster"}
    clusters.add("store_remote")  # for kernels that split K over a cluster; none does now
    for name in names - {"run"} - clusters:
        assert len(re.findall(rf"\b{name}\b", everything)) > 1, f"nothing uses {name}"
    tested = Path(SOURCE).read_text()
    inside = {"mbarrier_try_wait", "wgmma_descriptor"}  # used by those that are tested
    for name in names - {"run"} - inside:
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
        launch(f"load_box<{box}>", (described, out, *at), 128, shared=box * 128 + 2048)
        got = out.cpu()[place.flatten()].view(box, 128)
        assert torch.equal(got, wide[y : y + box, x : x + 128]), f"box at column {x}, row {y}"


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
@pytest.mark.parametrize("more", ("false", "true"))
@pytest.mark.parametrize("n", WIDTHS)
def test_wgmma(n, more, generator):
    a, b = codes((128, 128), generator), codes((n, 128), generator)
    a[3], b[5] = -128, -128
    there = a.cuda(), b.cuda()
    maps = [tensor_map.encode(t.data_ptr(), len(t), 128, 128, len(t), 128) for t in there]
    out = torch.full((128, n), -1, dtype=torch.int32, device="cuda")
    shared = (128 + n) * 128 + 2048
    launch(f"multiply<{n}, {more}>", (*maps, out), 128, shared=shared)
    want = a.int() @ b.int().T
    if more == "true":
        want = want + torch.arange(128 * n, dtype=torch.int32).view(128, n)
    assert torch.equal(out.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", (2, 4))
def test_cluster_exchange(size):
    clusters, rounds = 40, 7
    blocks = clusters * size
    out = torch.zeros(blocks, rounds, size, 64, dtype=torch.int32, device="cuda")
    launch(f"exchange<{size}>", (out, ctypes.c_int(rounds)), 64, blocks=blocks, cluster=size)
    block, turn = torch.arange(blocks)[:, None, None, None], torch.arange(rounds)[:, None, None]
    sender = block // size * size + torch.arange(size)[:, None]
    want = 1000000 * sender + 1000 * turn + 63 - torch.arange(64)
    assert torch.equal(out.cpu(), want.int())


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
