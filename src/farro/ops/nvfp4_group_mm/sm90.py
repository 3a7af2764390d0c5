"""nvfp4_group_mm on SM90a: launches.

sm90.cu is the product, sm90_expand.cu the activations' way to 16 bits where tiles have many tokens;
sm90_configs.py chooses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...cuda import tensor_map
from ...cuda.fp8.gemm import Prepared
from ...cuda.launch import Launch, kernel_function, resident_clusters
from . import reference
from .sm90_configs import FEW, Config, shared_bytes

_FOLDER = "ops/nvfp4_group_mm"
_HALVES = {"mixed": 0, "blocks": 1, "halves": 2}  # `Halves` of sm90_tiles.cuh


class _Rows(ctypes.Structure):
    """`struct Rows` of nvfp4.cuh."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("experts", "capacity", "k", "ragged")),
    )


class _Problem(ctypes.Structure):
    """`struct Problem` of sm90_tiles.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("codes", "meta", "scales", "alphas", "x", "x_scales", "out")
        ),
        *((name, ctypes.c_int) for name in ("features", "raster", "contiguous")),
        *((name, ctypes.c_int) for name in ("out_vector", "scale_vector", "halves")),
    )


class _Gated(ctypes.Structure):
    """`struct Gated` of sm90_gated.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "gscale")),
        *((name, ctypes.c_int) for name in ("per_expert", "blocks", "interleaved")),
    )


@dataclass(frozen=True)
class Gate:
    """The gated activation and the quantizer as the result: what they read and write."""

    gscale: torch.Tensor
    interleaved: bool
    codes: torch.Tensor
    scales: torch.Tensor

    def parameters(self) -> _Gated:
        addresses = (t.data_ptr() for t in (self.codes, self.scales, self.gscale))
        shape = (int(self.gscale.shape[0] > 1), self.scales.shape[-1], int(self.interleaved))
        return _Gated(*addresses, *shape)

    def halves(self, consumers: int) -> int:
        """How the kernel copies the rows of gate and up."""
        if self.interleaved:
            return _HALVES["mixed"]
        whole = self.scales.shape[-1] % 2 == 0 and consumers % 2 == 0
        return _HALVES["blocks" if whole else "halves"]


def kernel_name(config: Config, bf16: bool, gated: bool = False) -> tuple[str, str]:
    """Source file and name expression."""
    c = config
    flags = ", ".join(str(flag).lower() for flag in (bf16, c.inside))
    sizes = f"{c.consumers}, {c.tokens}, {c.step}, {c.stages}, {c.ctas}, {c.split}, {c.pair}"
    if gated:
        return f"{_FOLDER}/sm90_gated.cu", f"nvfp4_gated<{flags}, {sizes}>"
    return f"{_FOLDER}/sm90.cu", f"nvfp4_group<{flags}, {sizes}>"


def expand_name(bf16: bool) -> tuple[str, str]:
    return f"{_FOLDER}/sm90_expand.cu", f"nvfp4_expand<{str(bf16).lower()}>"


def rows_of(out: torch.Tensor, counts: torch.Tensor, experts: int, k: int) -> _Rows:
    return _Rows(counts.data_ptr(), experts, out.shape[-2], k, int(out.dim() == 2))


def expand_launch(
    b_act: torch.Tensor, sfb: torch.Tensor | None, expanded: torch.Tensor, rows: _Rows
) -> Launch:
    """Activations to 16 bits in the order of compressed weights, valid rows alone."""
    device = b_act.get_device()
    function = kernel_function(*expand_name(sfb is None), "sm_90a", device, 0)
    pointers = (b_act.data_ptr(), 0 if sfb is None else sfb.data_ptr(), expanded.data_ptr())
    parameters = (*(ctypes.c_void_p(p) for p in pointers), rows)
    each = -(-rows.capacity * rows.k // 8 // 256) if not rows.ragged else 1 << 20
    blocks = max(1, min(each, 1 + 2112 // rows.experts))
    return Launch(device, function, (blocks, rows.experts, 1), 256, 0, 1, parameters)


def group_launch(
    config: Config,
    out: torch.Tensor | Gate,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    rows: _Rows,
    expanded: torch.Tensor | None = None,
) -> Launch:
    """The product; `expanded` holds what expand_launch made of x, unless that is done inside."""
    c, device, features, k = config, x.get_device(), parts[0].shape[1], rows.k
    gate = out if isinstance(out, Gate) else None
    size = shared_bytes(c, rows.experts, sfb is None, gate is not None)
    name = kernel_name(c, sfb is None, gate is not None)
    function = kernel_function(*name, "sm_90a", device, size)
    source = x if c.inside else expanded
    assert source is not None
    pitch = source.shape[-1] * source.element_size()
    count, at = source.numel() * source.element_size() // pitch, source.data_ptr()
    maps = [tensor_map.encode(at, count, pitch, pitch, box, 128) for box in (c.few, c.tokens)]
    words = sfb is not None and k % 128 == 0 and sfb.data_ptr() % 4 == 0
    to = 0 if isinstance(out, Gate) else out.data_ptr()
    problem = _Problem(
        *(t.data_ptr() for t in (*parts, alphas, x)),
        *(0 if sfb is None else sfb.data_ptr(), to),
        *(features, c.raster, int(c.tokens in FEW), int(to % 8 == 0), int(words)),
        0 if gate is None else gate.halves(c.consumers),
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    cluster, threads = c.split * c.pair, 128 * (c.consumers + 1)
    grid = processors * c.ctas // cluster * cluster
    if c.pair > 1:  # more would begin when others have ended
        crews = resident_clusters(device, function, threads, size, cluster, c.ctas)
        grid = crews * cluster
    parameters = (*maps, problem, rows, *([] if gate is None else [gate.parameters()]))
    return Launch(device, function, (grid, 1, 1), threads, size, cluster, parameters)


def launches(
    config: Config,
    out: torch.Tensor | Gate,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
    expanded: torch.Tensor | None,
) -> Any:
    """All that a product needs, in order."""
    rows = rows_of(x, counts, parts[0].shape[0], parts[0].shape[2] * 4)
    product = group_launch(config, out, parts, x, sfb, alphas, rows, expanded)
    if expanded is None:
        return product
    return _Both(expand_launch(x, sfb, expanded, rows), product)


def room_for(config: Config, x: torch.Tensor, k: int, coded: bool) -> torch.Tensor | None:
    """Where activations are expanded to 16 bits, or None."""
    if config.inside:
        return None
    kind = torch.float16 if coded else torch.bfloat16
    return torch.empty((*x.shape[:-1], k), dtype=kind, device=x.device)


class _Both:
    """Two launches, one after the other."""

    def __init__(self, *launches: Launch) -> None:
        self.launches = launches

    def on_current_stream(self) -> None:
        for launch in self.launches:
            launch.on_current_stream()


class _Bound:
    """run() for calls alike in all but addresses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared = Prepared()

    def __call__(
        self,
        out: torch.Tensor,
        a_comp: torch.Tensor,
        e_meta: torch.Tensor,
        sfa: torch.Tensor,
        b_act: torch.Tensor,
        sfb: torch.Tensor | None,
        alphas: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        if out.numel() == 0:
            return
        k = a_comp.shape[2] * 4
        operands = (a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
        if k == 0:  # sums over nothing
            reference.run(None, out, *operands)
            return
        expanded = room_for(self.config, b_act, k, sfb is not None)
        given = (self.config, out, (a_comp, e_meta, sfa), b_act, sfb, alphas, counts, expanded)
        self.prepared.run(out.device, (out, *operands, expanded), lambda: launches(*given))


def bind(config: Config) -> Callable[..., None]:
    """run() with its configuration, for calls alike in all but their tensors' addresses."""
    return _Bound(config)


def run(
    config: Config,
    out: torch.Tensor,
    a_comp: torch.Tensor,
    e_meta: torch.Tensor,
    sfa: torch.Tensor,
    b_act: torch.Tensor,
    sfb: torch.Tensor | None,
    alphas: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Write the experts' rows of out, launched on the current stream of its device."""
    bind(config)(out, a_comp, e_meta, sfa, b_act, sfb, alphas, counts)
