"""A whole layer of experts in other grouped INT8 and FP8 products.

Tokens are quantized before they are timed, as moe_ffn's are. What is timed is the gather by the
routes, both products, silu(gate) * up with the quantizer of each library's format (compiled by
torch), and the weighted sum. The order of the routes is not: it is worked out beforehand, and where
rows are padded, so is their number, which a user's host would have to wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .case import Missing, Options, Subject
from .kept import kept
from .peers import fastest, wanted

_MASKED_BELOW = 64  # tokens an expert: DeepGEMM's layout for few
# rows, columns, warps, stages of the plain Triton product: for few rows an expert, and for many
_PLAIN_TILES = {
    False: ((16, 64, 4, 4), (16, 128, 4, 4), (32, 128, 4, 3)),
    True: ((64, 128, 8, 3), (128, 128, 8, 3), (128, 256, 8, 2)),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """x bf16 [T, H], routes [T, topk], and bf16 weights [E, 2I, H] and [E, H, I]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    experts: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    key: Hashable
    codes: tuple[torch.Tensor, ...] = ()  # INT8 of x, gate/up and down, each before its scales

    @functools.cached_property
    def order(self) -> torch.Tensor:
        """The routes to experts that are here, sorted by expert."""
        flat = self.ids.flatten()
        return flat.argsort(stable=True)[: int((flat < self.count).sum())]

    @functools.cached_property
    def count(self) -> int:
        return len(self.experts()[0])

    @functools.cached_property
    def counts(self) -> list[int]:
        here = self.ids[self.ids < self.count]
        sizes: list[int] = torch.bincount(here, minlength=self.count).tolist()
        return sizes

    @functools.cached_property
    def token(self) -> torch.Tensor:
        return self.order // self.ids.shape[1]

    def padded(self, multiple: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each expert's rows filled up to a multiple: the token and expert of each row, and where
        the routes' rows are."""
        sizes = [-(-count // multiple) * multiple for count in self.counts]
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        parts = [torch.arange(a, a + c) for a, c in zip(starts, self.counts)]
        place = torch.cat(parts).to(self.x.device)
        token = self.token.new_zeros(starts[-1])
        token[place] = self.token
        owner = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
        return token, owner.to(self.x.device), place

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """The weighted sum of rows in the order of `order`."""
        terms = rows * self.weights.flatten()[self.order].to(rows.dtype).unsqueeze(1)
        return torch.zeros_like(self.x).index_add_(0, self.token, terms)


def quantized_layers(layer: Layer, options: Options) -> Iterator[Subject | Missing]:
    """The peers of a quantized layer, in the order of the table."""
    if options.device.type != "cuda":
        return
    group_size = options.group_size
    for peer, name, make in (
        ("triton", "plain Triton fused MoE", functools.partial(_plain_triton, group_size)),
        ("humming", f"Humming INT8 G{group_size} layer", functools.partial(_humming, group_size)),
        ("deepgemm", "DeepGEMM FP8 block layer", _deep_gemm),
    ):
        if wanted(options, peer):
            yield _subject(name, make, layer)


def _subject(
    name: str, make: Callable[[Layer], Callable[[], torch.Tensor]], layer: Layer
) -> Subject | Missing:
    try:
        call = make(layer)
        call()
    except ModuleNotFoundError as error:
        return Missing(name, f"{error.name} is not installed")
    except Exception as error:  # an older library, or a shape that it does not take
        return Missing(name, f"{type(error).__name__}: {error}"[:200])
    return Subject(name, "peer", call, note="the order of the routes is not timed")


def _gated_int8(both: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 with a scale for each group of columns, nearly as quantize_int8_groups."""
    gate, up = both.chunk(2, -1)
    h = torch.nn.functional.silu(gate.float()) * up.float()
    blocks = h.view(h.shape[0], -1, group_size)
    scale = (blocks.abs().amax(-1) / 127).clamp_min(1e-12)
    return (blocks / scale.unsqueeze(-1)).round().to(torch.int8).view(h.shape), scale


def _gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(both.dtype)


def _gated_fp8(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with an FP32 scale for each 128 columns, as DeepGEMM takes them."""
    gate, up = both.chunk(2, -1)
    h = torch.nn.functional.silu(gate.float()) * up.float()
    blocks = h.view(*h.shape[:-1], -1, 128)
    scale = blocks.abs().amax(-1).clamp_min(1e-4) / 448
    codes = (blocks / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(h.shape), scale


@functools.lru_cache(maxsize=4)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if torch.cuda.is_available() else function


# --- plain Triton --------------------------------------------------------------------------------


def _plain_triton(group_size: int, layer: Layer) -> Callable[[], torch.Tensor]:
    """Both products by one simple kernel, the best of a few tiles; the rest compiled by torch."""
    if layer.experts()[1].shape[2] % group_size:
        raise ValueError(f"I is no multiple of {group_size}")
    many = len(layer.order) >= 32 * layer.count
    calls = {tile: _plain_layer(group_size, layer, tile) for tile in _PLAIN_TILES[many]}
    best, failed = fastest(calls, layer.x.device)
    if best is None:
        raise RuntimeError(f"no tile runs: {failed}")
    return calls[best]


def _plain_layer(
    group_size: int, layer: Layer, tile: tuple[int, int, int, int]
) -> Callable[[], torch.Tensor]:
    from .plain_experts_kernel import plain_experts

    x, of_x, up, of_up, down, of_down = layer.codes
    rows, columns, warps, stages = tile
    token, owner, place = layer.padded(rows)
    of_tile, itself = owner[::rows].contiguous(), torch.arange(len(token), device=x.device)
    gated = _compiled(_gated_int8)

    def product(a: Any, of_a: Any, w: Any, of_w: Any, source: torch.Tensor) -> torch.Tensor:
        n, k = w.shape[1:]
        out = torch.empty(len(token), n, dtype=torch.bfloat16, device=x.device)
        plain_experts[(len(of_tile), -(-n // columns))](
            *(a, of_a, w, of_w, source, of_tile, out, n, k, of_w.shape[1]),
            GROUP=group_size,
            BM=rows,
            BN=columns,
            num_warps=warps,
            num_stages=stages,
        )
        return out

    def call() -> torch.Tensor:
        h, of_h = gated(product(x, of_x, up, of_up, token), group_size)
        return layer.summed(product(h, of_h, down, of_down, itself)[place])

    return call


# --- Humming -------------------------------------------------------------------------------------


def _humming(group_size: int, layer: Layer) -> Callable[[], torch.Tensor]:
    from humming.forward import may_quant_input

    up, down = humming_experts(group_size, layer)
    codes, scale = may_quant_input(up.humming_config, layer.x)
    ends = torch.tensor([0, *layer.counts], device=layer.x.device).cumsum(0)
    how = {"gemm_type": "grouped_contiguous"}
    gated = _compiled(_gated)

    def call() -> torch.Tensor:
        rows = codes[layer.token], scale[layer.token]
        both = up(rows[0], input_scale=rows[1], expert_layout=ends, compute_config=how)
        h, of_h = may_quant_input(down.humming_config, gated(both))
        y = down(h, input_scale=of_h, expert_layout=ends, compute_config=how)
        return layer.summed(y)

    return call


def humming_experts(group_size: int, layer: Layer) -> tuple[Any, Any]:
    """Both projections, as Humming holds them."""
    experts = layer.experts
    made: tuple[Any, Any] = kept(
        ("humming int8", group_size, layer.key),
        lambda: tuple(_humming_layer(weight, group_size) for weight in experts()),
    )
    return made


def _humming_layer(weight: torch.Tensor, group_size: int) -> Any:
    from humming.layer import HummingLayer

    e, n, k = weight.shape
    config = {"dtype": "int8", "group_size": group_size}
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        num_experts=e,
        weight_config=dict(config),
        input_config=dict(config),
        torch_dtype=torch.bfloat16,
    ).to(weight.device)
    layer.load_from_unquantized(weight)
    layer.transform()
    return layer


# --- DeepGEMM ------------------------------------------------------------------------------------


def _blocks(layer: Layer) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Both weights in E4M3 with a scale for each 128 x 128."""
    from deep_gemm.utils.math import per_block_cast_to_fp8

    make = functools.partial(per_block_cast_to_fp8, use_ue8m0=False)

    def of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(parts) for parts in zip(*map(make, weight)))

    made: tuple[tuple[torch.Tensor, ...], ...] = kept(
        ("fp8 blocks", layer.key), lambda: tuple(of(weight) for weight in layer.experts())
    )
    return made


def _gathered(codes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)[index].view(codes.dtype)


def _deep_gemm(layer: Layer) -> Callable[[], torch.Tensor]:
    from deep_gemm.utils.math import per_token_cast_to_fp8

    tokens = per_token_cast_to_fp8(layer.x, use_ue8m0=False)
    few = len(layer.order) < _MASKED_BELOW * layer.count
    return (_deep_gemm_masked if few else _deep_gemm_contiguous)(layer, *tokens)


def _deep_gemm_contiguous(
    layer: Layer, codes: torch.Tensor, scale: torch.Tensor
) -> Callable[[], torch.Tensor]:
    import deep_gemm

    gate_up, down = _blocks(layer)
    token, owner, place = layer.padded(deep_gemm.get_mk_alignment_for_contiguous_layout())
    both = layer.x.new_empty(len(token), gate_up[0].shape[1])
    y = layer.x.new_empty(len(token), down[0].shape[1])
    gated = _compiled(_gated_fp8)
    product = deep_gemm.m_grouped_fp8_gemm_nt_contiguous

    def call() -> torch.Tensor:
        rows = _gathered(codes, token), scale[token]
        product(rows, gate_up, both, owner, disable_ue8m0_cast=True)
        product(gated(both), down, y, owner, disable_ue8m0_cast=True)
        return layer.summed(y[place])

    return call


def _deep_gemm_masked(
    layer: Layer, codes: torch.Tensor, scale: torch.Tensor
) -> Callable[[], torch.Tensor]:
    import deep_gemm

    gate_up, down = _blocks(layer)
    cap = max(64, -(-max(layer.counts) // 64) * 64)
    starts = torch.arange(layer.count).repeat_interleave(torch.tensor(layer.counts)) * cap
    within = torch.cat([torch.arange(count) for count in layer.counts])
    place = (starts + within).to(layer.x.device)
    token = layer.token.new_zeros(layer.count * cap)
    token[place] = layer.token
    token = token.view(layer.count, cap)
    counts = torch.tensor(layer.counts, dtype=torch.int32, device=layer.x.device)
    expected = max(1, len(layer.order) // layer.count)
    both = layer.x.new_empty(layer.count, cap, gate_up[0].shape[1])
    y = layer.x.new_empty(layer.count, cap, down[0].shape[1])
    gated = _compiled(_gated_fp8)
    # one name in sgl-deep-gemm, another in DeepGEMM
    named = ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")
    product: Any = next(getattr(deep_gemm, name) for name in named if hasattr(deep_gemm, name))

    def call() -> torch.Tensor:
        rows = _gathered(codes, token), scale[token]
        product(rows, gate_up, both, counts, expected, disable_ue8m0_cast=True)
        product(gated(both), down, y, counts, expected, disable_ue8m0_cast=True)
        return layer.summed(y.flatten(0, 1)[place])

    return call
