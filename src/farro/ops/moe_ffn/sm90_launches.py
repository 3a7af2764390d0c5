"""The launches of moe_ffn on SM90a: what each kernel is given, and the memory between them."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from ...cuda import tensor_map
from ...cuda.launch import Launch, kernel_function, resident_clusters
from ...formats.int8_group import group_count
from .sm90_configs import Config, Tile, cluster_of, shared_bytes

_PRODUCTS, _ROUTES = "ops/moe_ffn/sm90.cu", "ops/moe_ffn/sm90_route.cu"
_OUT = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "float"}
_ID = {torch.int32: "int", torch.int64: "long long"}
_PLAN_THREADS = 1024
_PLAN_CLUSTER = 8  # CTAs that share the routes where there are many
_MANY_TOKENS = 1024  # from here on a CTA of the sum has eight
_OVERLAPS = True  # launches begin before the one ahead has ended


class _Routes(ctypes.Structure):
    """`struct Routes` of sm90_route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "offsets", "row_of", "source", "taken")),
        *((name, ctypes.c_int64) for name in ("ids_token", "ids_slot")),
        *((name, ctypes.c_int) for name in ("routes", "topk", "experts")),
    )


class _Sum(ctypes.Structure):
    """`struct Sum` of sm90_route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "row_of", "weights", "out")),
        *((name, ctypes.c_int64) for name in ("weights_token", "weights_slot")),
        *((name, ctypes.c_int) for name in ("topk", "h")),
    )


class _Gather(ctypes.Structure):
    """`struct Gather` of sm90_route.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "x_scale", "offsets", "source", "rows", "scales")
        ),
        *((name, ctypes.c_int64) for name in ("x_pitch", "x_scale_row", "x_scale_group")),
        *((name, ctypes.c_int) for name in ("experts", "groups", "routes", "pitch")),
    )


class _Problem(ctypes.Structure):
    """`struct Problem` of sm90_layout.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "x_scale", "source", "offsets", "taken"),
                *("w_scale", "out", "out_scale"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("x_pitch", "x_scale_row", "x_scale_group"),
                *("w_scale_expert", "w_scale_group", "w_scale_column"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                *("experts", "features", "k", "out_pitch", "interleaved", "w_scale_vector"),
                *("out_vector", "raster"),
            )
        ),
    )


class Scratch:
    """Where each part of the scratch memory of some routes begins."""

    def __init__(self, routes: int, experts: int, h: int, i: int, group_size: int) -> None:
        self.pitch = -(-i // 16) * 16  # of codes: TMA reads them
        self.groups = group_count(i, group_size)
        self.parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "offsets": (torch.int32, (experts + 1,)),
            "taken": (torch.int32, (2,)),
            "row_of": (torch.int32, (routes,)),
            "source": (torch.int32, (routes,)),
            "codes": (torch.int8, (routes, self.pitch)),
            "scale": (torch.float32, (routes, self.groups)),
            "y": (torch.bfloat16, (routes, h)),
        }
        self.at: dict[str, int] = {}
        self.bytes = 0
        for name in self.parts:
            self.at[name] = self.bytes
            self.bytes += -(-self._size(name) // 256) * 256

    def _size(self, name: str) -> int:
        dtype, shape = self.parts[name]
        return dtype.itemsize * math.prod(shape)

    def part(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """One of `parts`, of the bytes that all lie in."""
        dtype, shape = self.parts[name]
        at = self.at[name]
        return memory[at : at + self._size(name)].view(dtype).view(shape)


def kernel_name(tile: Tile, gated: bool, group_size: int) -> tuple[str, str]:
    """Source file and name expression of a product."""
    t, name = tile, "moe_gate_up" if gated else "moe_down"
    if tile.gathered:
        name = "moe_gate_up_gathered"
    sizes = f"{t.routes}, {t.warpgroups}, {t.waves}, {t.stages}, {t.ctas}"
    return _PRODUCTS, f"{name}<{group_size}, {sizes}>"


def plan_name(dtype: torch.dtype, cluster: int) -> tuple[str, str]:
    return _ROUTES, f"moe_plan<{_ID[dtype]}, {cluster}>"


GATHER = _ROUTES, "moe_gather<256>"


def sum_name(dtype: torch.dtype, vector: int) -> tuple[str, str]:
    return _ROUTES, f"moe_sum<{_OUT[dtype]}, {vector}>"


def sum_many_name(dtype: torch.dtype) -> tuple[str, str]:
    return _ROUTES, f"moe_sum_many<{_OUT[dtype]}>"


def _step(tensor: torch.Tensor, dimension: int) -> int:
    """A stride in bytes as TMA takes it: that of a single element counts for nothing."""
    return tensor.stride(dimension) if tensor.shape[dimension] > 1 else 16


def _together(scale: torch.Tensor, features: int) -> bool:
    """Whether four neighbours of a group's scales [E, groups, columns] are one aligned read."""
    steps = [scale.stride(d) for d in (0, 1) if scale.shape[d] > 1]
    aligned = scale.data_ptr() % 16 == 0 and all(step % 4 == 0 for step in steps)
    return aligned and scale.stride(2) == 1 and features % 4 == 0


def plan_launch(topk_ids: torch.Tensor, experts: int, scratch: Scratch, base: int) -> Launch:
    device, routes = topk_ids.get_device(), topk_ids.numel()
    cluster = _PLAN_CLUSTER if routes > 4 * _PLAN_THREADS else 1
    size = 8 * experts
    function = kernel_function(*plan_name(topk_ids.dtype, cluster), "sm_90a", device, size)
    given = _Routes(
        topk_ids.data_ptr(),
        *(base + scratch.at[n] for n in ("offsets", "row_of", "source", "taken")),
        *(*topk_ids.stride(), routes, topk_ids.shape[1], experts),
    )
    return Launch(device, function, (cluster, 1, 1), _PLAN_THREADS, size, cluster, (given,))


def _product(
    tile: Tile, gated: bool, group_size: int, device: int, parameters: tuple[Any, ...], rows: int
) -> Launch:
    """Persistent: as many CTAs as run at a time; each expert may begin a tile of its own."""
    problem = parameters[-1]
    cluster = cluster_of(tile, gated, group_size)
    size = shared_bytes(tile, gated, group_size, problem.experts)
    function = kernel_function(*kernel_name(tile, gated, group_size), "sm_90a", device, size)
    together = tile.rows * cluster // (2 if gated else 1)
    tiles = rows // tile.routes + min(problem.experts, rows)
    tiles *= -(-problem.features // together)
    crews = min(resident_clusters(device, function, tile.threads, size, cluster, tile.ctas), tiles)
    grid = (max(crews, 1) * cluster, 1, 1)
    return Launch(device, function, grid, tile.threads, size, cluster, parameters, _OVERLAPS)


def _gathered_at(scratch: Scratch, base: int, routes: int, h: int) -> tuple[int, int]:
    """Rows of routes and their scales [groups][routes] lie where BF16 rows will come later."""
    rows = base + scratch.at["y"]
    return rows, rows + routes * h


def gather_launch(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    experts: int,
    routes: int,
    scratch: Scratch,
    base: int,
) -> Launch:
    device, h = x.get_device(), x.shape[1]
    given = _Gather(
        *(x.data_ptr(), scale_x.data_ptr(), base + scratch.at["offsets"]),
        *(base + scratch.at["source"], *_gathered_at(scratch, base, routes, h)),
        *(x.stride(0), *scale_x.stride(), experts, scale_x.shape[1], routes, h),
    )
    function = kernel_function(*GATHER, "sm_90a", device, 0)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    grid = (min(4 * count, -(-routes // 8)), 1, 1)
    return Launch(device, function, grid, 256, 0, 1, (given,), _OVERLAPS)


def gate_up_launch(
    tile: Tile,
    x: torch.Tensor,
    scale_x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    routes: int,
    scratch: Scratch,
    base: int,
    group_size: int,
    interleaved: bool,
) -> Launch:
    experts, h, twice = w.shape
    i, at = twice // 2, scratch.at
    # bytes from a feature's gate to the next one's, and to its up
    step, up = (2, 1) if interleaved else (1, i)
    row = _step(w, 2)
    steps = (_step(w, 0), step * row, up * row)
    box = tile.rows // 16
    weights = tensor_map.encode_pairs(w.data_ptr(), (experts, i, h), steps, box)
    read: tuple[Any, ...] = (x.data_ptr(), scale_x.data_ptr(), base + at["source"])
    steps_x = (x.stride(0), *scale_x.stride())
    parameters: tuple[Any, ...] = (weights,)
    if tile.gathered:
        rows, scales = _gathered_at(scratch, base, routes, h)
        read, steps_x = (rows, scales, 0), (h, 1, routes)
        parameters += (tensor_map.encode(rows, routes, h, h, _box(tile), 128),)
    problem = _Problem(
        *(*read, base + at["offsets"], base + at["taken"]),
        *(scale_w.data_ptr(), base + at["codes"], base + at["scale"]),
        *(*steps_x, *scale_w.stride()),
        *(experts, i, h, scratch.pitch, int(interleaved), int(_together(scale_w, i)), 1),
        tile.raster,
    )
    return _product(tile, True, group_size, x.get_device(), (*parameters, problem), routes)


def _box(tile: Tile) -> int:
    """Rows that TMA brings together: T::BOX of sm90_layout.cuh."""
    return 32 if tile.routes > 32 else 8


def down_launch(
    tile: Tile,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    routes: int,
    scratch: Scratch,
    base: int,
    group_size: int,
) -> Launch:
    (experts, i, h), at = w.shape, scratch.at
    steps = (_step(w, 0), _step(w, 2))
    weights = tensor_map.encode_experts(w.data_ptr(), (experts, h, i), steps, tile.rows)
    codes = tensor_map.encode(base + at["codes"], routes, i, scratch.pitch, _box(tile), 128)
    # eights of rows of 64 features, where rows of results are whole pieces of 16 bytes
    sent = h % 8 == 0
    results = tensor_map.encode(base + at["y"], routes, 2 * h, 2 * h, 8, 128) if sent else codes
    problem = _Problem(
        *(base + at["codes"], base + at["scale"], 0, base + at["offsets"], base + at["taken"] + 4),
        *(scale_w.data_ptr(), base + at["y"], 0),
        *(scratch.pitch, scratch.groups, 1, *scale_w.stride()),
        *(experts, h, i, h, 0, int(_together(scale_w, h)), 2 if sent else int(h % 4 == 0)),
        tile.raster,
    )
    parameters = (weights, codes, results, problem)
    return _product(tile, False, group_size, w.get_device(), parameters, routes)


def sum_launch(
    topk_weights: torch.Tensor, out: torch.Tensor, scratch: Scratch, base: int
) -> Launch:
    device, (tokens, topk), h = out.get_device(), topk_weights.shape, out.shape[1]
    vector = 8 if h % 8 == 0 and out.data_ptr() % 16 == 0 else 1
    given = _Sum(
        *(base + scratch.at["y"], base + scratch.at["row_of"], topk_weights.data_ptr()),
        *(out.data_ptr(), *topk_weights.stride(), topk, h),
    )
    blocks = -(-h // 1024)  # of columns, of 128 threads
    if vector == 8 and tokens >= _MANY_TOKENS and topk <= 32 and blocks <= 65535:
        function = kernel_function(*sum_many_name(out.dtype), "sm_90a", device, 0)
        many = (-(-tokens // 8), blocks, 1)
        count = ctypes.c_int(tokens)
        return Launch(device, function, many, 128, 0, 1, (given, count), _OVERLAPS)
    threads = 256 if tokens * -(-h // (256 * vector)) >= 264 else 64
    while h > threads * vector * 65535:  # a grid's second dimension ends there
        threads *= 2
    function = kernel_function(*sum_name(out.dtype, vector), "sm_90a", device, 0)
    grid = (tokens, -(-h // (threads * vector)), 1)
    return Launch(device, function, grid, threads, 0, 1, (given,), _OVERLAPS)


def launches(
    config: Config,
    given: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    scratch: Scratch,
    base: int,
    group_size: int,
    interleaved: bool,
) -> tuple[Launch, ...]:
    """Plan, what brings rows together, both products and the sum, in order.

    Without intermediate features there are no products. `given` are moe_ffn's tensors, `base` the
    address of the scratch memory.
    """
    x, scale_x, w_gate_up, scale_gate_up, w_down, scale_down, topk_ids, topk_weights = given
    (experts, i, _), routes = w_down.shape, topk_ids.numel()
    plan = plan_launch(topk_ids, experts, scratch, base)
    total = sum_launch(topk_weights, out, scratch, base)
    if not i:
        return plan, total
    first = (config.gate_up, x, scale_x, w_gate_up, scale_gate_up)
    gate_up = gate_up_launch(*first, routes, scratch, base, group_size, interleaved)
    down = down_launch(config.down, w_down, scale_down, routes, scratch, base, group_size)
    if not config.gate_up.gathered:
        return plan, gate_up, down, total
    gather = gather_launch(x, scale_x, experts, routes, scratch, base)
    return plan, gather, gate_up, down, total
