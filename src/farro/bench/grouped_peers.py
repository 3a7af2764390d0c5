"""What a user would run instead of grouped NVFP4 products, each optional.

All get BF16 of the dense weights that the codes stand for, and BF16 activations, and quantize both
as they need before they are timed; the error beside each time is against the product of what they
got.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .case import Missing, Options, Subject
from .humming import tuned
from .kept import kept
from .peers import wanted

_HUMMING: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "FP8 block": (
        {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
        {"dtype": "float8e4m3", "group_size": 128},
    ),
    "NVFP4 W4A16": ({"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"}, None),
    "MXFP4 W4A8": (
        {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
        {"dtype": "float8e4m3"},
    ),
}
_GROUPED = {"gemm_type": "grouped_contiguous"}
_MANY = 64  # tokens an expert from which the layout for prefill is timed too


@dataclass(frozen=True, eq=False)
class Experts:
    """x bf16 [E, cap, K], of each expert the first counts[e] rows tokens; weights bf16 [E, N, K].

    `key` names the weight: what a peer made of it is kept for the next problem.
    """

    x: torch.Tensor
    counts: tuple[int, ...]
    weight: Callable[[], torch.Tensor]
    key: Hashable

    @functools.cached_property
    def mine(self) -> torch.Tensor:
        """bool [E, cap]: the rows that are tokens."""
        ends = torch.tensor(self.counts, device=self.x.device).unsqueeze(1)
        return torch.arange(self.x.shape[1], device=self.x.device) < ends

    @functools.cached_property
    def truth(self) -> torch.Tensor:
        """float64 [tokens, N], sorted by expert."""
        pairs = zip(self.x, self.weight(), self.counts)
        return torch.cat([x[:count].double() @ w.double().T for x, w, count in pairs])

    def packed(self, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens sorted by expert, each expert's filled up with zeros to a multiple.

        Gives the rows, the ends int32 [E] of the experts, and where the tokens are.
        """
        device = self.x.device
        sizes = [-(-count // multiple) * multiple for count in self.counts]
        ends = torch.tensor(sizes).cumsum(0)
        starts = (ends - torch.tensor(sizes)).tolist()
        place = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, self.counts)]).to(device)
        rows = torch.zeros(sum(sizes), self.x.shape[2], dtype=self.x.dtype, device=device)
        rows[place] = self.x[self.mine]
        return rows, ends.to(device, torch.int32), place


Made = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]  # the call, and its tokens' rows


def grouped(experts: Experts, options: Options) -> Iterator[Subject | Missing]:
    """The peers of a grouped product, in the order of the table."""
    named: list[tuple[str, str, Callable[[Experts], Made]]]
    named = [("bf16", "torch _grouped_mm BF16", _grouped_mm)]
    if experts.x.is_cuda:
        named += [
            ("scaled_grouped", "torch _scaled_grouped_mm FP8 rows", _scaled_grouped_mm),
            ("deepgemm", "DeepGEMM FP8 block, masked", _deep_gemm_masked),
        ]
        if sum(experts.counts) >= _MANY * len(experts.counts):
            named.append(("deepgemm", "DeepGEMM FP8 block, contiguous", _deep_gemm_contiguous))
        for kind in _HUMMING:
            named.append(("humming", f"Humming {kind}", functools.partial(_humming, kind)))
    for peer, name, make in named:
        if not wanted(options, peer):
            continue
        found = _subject(name, make, experts)
        yield found
        if peer == "humming" and "tuned" in options.peers and isinstance(found, Subject):
            yield _tuned(found, experts)


def _tuned(default: Subject, experts: Experts) -> Subject | Missing:
    """Humming with the best of a few configurations."""
    name, call = f"{default.name} tuned", default.call
    assert isinstance(call, functools.partial)
    best = tuned(name, call.func, call, experts.x.device, _GROUPED)
    if isinstance(best, Missing):
        return best
    call = functools.partial(call, tuning_config=best)
    return dataclasses.replace(default, name=name, call=call, config=best)


def _subject(name: str, make: Callable[[Experts], Made], experts: Experts) -> Subject | Missing:
    try:
        call, value = make(experts)
        call()
    except ModuleNotFoundError as error:
        return Missing(name, f"{error.name} is not installed")
    except Exception as error:  # an older library, or a shape that it does not take
        return Missing(name, f"{type(error).__name__}: {error}"[:200])
    return Subject(name, "peer", call, value, truth=lambda: experts.truth)


def _grouped_mm(experts: Experts) -> Made:
    x, ends, _ = experts.packed()
    weight = experts.weight().mT
    return lambda: torch._grouped_mm(x, weight, offs=ends), lambda result: result


def _by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one FP32 scale for each row of the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.squeeze(-1)


def _each(make: Callable[[torch.Tensor], Any], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stacked results of one expert at a time, whose wide intermediates are then small."""
    return tuple(torch.stack(parts) for parts in zip(*map(make, weight)))


def _scaled_grouped_mm(experts: Experts) -> Made:
    x, ends, place = experts.packed(16)
    (a, scale_a), key = _by_rows(x), ("rows", experts.key)
    b, scale_b = kept(key, lambda: _each(_by_rows, experts.weight()))

    def call() -> torch.Tensor:
        scales = (scale_a, scale_b)
        return torch._scaled_grouped_mm(
            *(a, b.mT, *scales), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return call, lambda result: result[place]


def _blocks(experts: Experts) -> tuple[torch.Tensor, ...]:
    from deep_gemm.utils.math import per_block_cast_to_fp8

    make = functools.partial(per_block_cast_to_fp8, use_ue8m0=False)
    made: tuple[torch.Tensor, ...]
    made = kept(("blocks", experts.key), lambda: _each(make, experts.weight()))
    return made


def _tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from deep_gemm.utils.math import per_token_cast_to_fp8

    codes, scales = per_token_cast_to_fp8(x.view(-1, x.shape[-1]), use_ue8m0=False)
    return codes.view(x.shape), scales.view(*x.shape[:-1], -1)


def _deep_gemm_masked(experts: Experts) -> Made:
    import deep_gemm

    e, cap, k = experts.x.shape
    x = torch.zeros(e, -(-cap // 64) * 64, k, dtype=torch.bfloat16, device=experts.x.device)
    x[:, :cap][experts.mine] = experts.x[experts.mine]
    a, b = _tokens(x), _blocks(experts)
    out = torch.empty(*x.shape[:2], b[0].shape[1], dtype=torch.bfloat16, device=x.device)
    counts = torch.tensor(experts.counts, dtype=torch.int32, device=x.device)
    expected = max(1, sum(experts.counts) // e)
    # one name in sgl-deep-gemm, another in DeepGEMM
    named = ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")
    function: Any = next(getattr(deep_gemm, name) for name in named if hasattr(deep_gemm, name))

    def call() -> torch.Tensor:
        function(a, b, out, counts, expected, disable_ue8m0_cast=True)
        return out

    return call, lambda result: result[:, :cap][experts.mine]


def _deep_gemm_contiguous(experts: Experts) -> Made:
    import deep_gemm

    x, ends, place = experts.packed(deep_gemm.get_mk_alignment_for_contiguous_layout())
    a, b = _tokens(x), _blocks(experts)
    out = torch.empty(x.shape[0], b[0].shape[1], dtype=torch.bfloat16, device=x.device)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    owner = torch.arange(len(ends), dtype=torch.int32, device=x.device).repeat_interleave(sizes)

    def call() -> torch.Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, owner, disable_ue8m0_cast=True)
        return out

    return call, lambda result: result[place]


def _humming(kind: str, experts: Experts) -> Made:
    if importlib.util.find_spec("humming") is None:
        raise ModuleNotFoundError("humming", name="humming-kernels")
    from humming.forward import may_quant_input

    layer = kept(("humming", kind, experts.key), lambda: _humming_layer(kind, experts.weight()))
    (x, ends, _), scale = experts.packed(), None
    if _HUMMING[kind][1]:
        x, scale = may_quant_input(layer.humming_config, x)
    offsets = torch.cat((ends.new_zeros(1), ends)).long()
    call = functools.partial(
        layer, x, input_scale=scale, expert_layout=offsets, compute_config=dict(_GROUPED)
    )
    return call, lambda result: result


def _humming_layer(kind: str, weight: torch.Tensor) -> Any:
    from humming.layer import HummingLayer

    (e, n, k), (weight_config, input_config) = weight.shape, _HUMMING[kind]
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        num_experts=e,
        weight_config=dict(weight_config),
        input_config=dict(input_config) if input_config else None,
        torch_dtype=torch.bfloat16,
    ).to(weight.device)
    layer.load_from_unquantized(weight)
    layer.transform()
    return layer
