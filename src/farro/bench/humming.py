"""Humming (humming-kernels) as a peer, in its default and in a tuned configuration.

It quantizes the weight that the codes stand for again, to its own layout with BF16 scales; the
error beside its time is against what it was given. Its default is its heuristic; "tuned" is the
best of what its heuristic picks for any M, and of the neighbours of those.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from .case import Missing, Options, Subject
from .kept import kept
from .peers import Form, fastest, product64

_CANDIDATES: dict[Any, list[str]] = {}
_MOST = 40


class Given(Protocol):
    """Codes with scales, as the values that they stand for."""

    @property
    def b(self) -> torch.Tensor: ...  # codes [N,K] of the weight

    @property
    def options(self) -> Options: ...

    @property
    def form(self) -> Form: ...

    def x(self, dtype: torch.dtype) -> torch.Tensor: ...

    def weight(self, dtype: torch.dtype) -> torch.Tensor: ...


def humming(operands: Given) -> Iterator[Subject | Missing]:
    name = f"Humming {operands.form.label}"
    if importlib.util.find_spec("humming") is None:
        yield Missing(name, "not installed: pip install humming-kernels")
        return
    try:
        layer, given = _layer(operands)
        x = operands.x(torch.bfloat16)
        codes, scale = _quantize(layer, x)
    except Exception as error:
        yield Missing(name, f"{type(error).__name__}: {error}"[:200])
        return
    truth = functools.cache(lambda: product64(x, given))
    yield Subject(name, "peer", lambda: layer(codes, input_scale=scale), truth=truth)
    if "tuned" not in operands.options.peers:
        return
    call = functools.partial(layer, codes, input_scale=scale)
    best = tuned(f"{name} tuned", layer, call, codes.device)
    if isinstance(best, Missing):
        yield best
        return
    yield Subject(
        *(f"{name} tuned", "peer"),
        lambda: layer(codes, input_scale=scale, tuning_config=best),
        truth=truth,
        config=best,
    )


def _quantize(layer: Any, x: torch.Tensor) -> Any:
    from humming.forward import may_quant_input

    return may_quant_input(layer.humming_config, x)


def _layer(operands: Given) -> tuple[Any, torch.Tensor]:
    """The layer of this weight and the weight that it was given; kept where there is room."""
    from humming.layer import HummingLayer

    (n, k), form = operands.b.shape, operands.form

    def make() -> tuple[Any, torch.Tensor]:
        weight = operands.weight(torch.bfloat16)
        with torch.cuda.device(operands.b.device):
            layer = HummingLayer(
                shape_n=n,
                shape_k=k,
                weight_config=dict(form.weight),
                input_config=dict(form.input),
                torch_dtype=torch.bfloat16,
            ).cuda()
            layer.load_from_unquantized(weight)
            layer.transform()
        return layer, weight

    key = ("humming", n, k, form.label, operands.b.device, operands.b.data_ptr())
    found: tuple[Any, torch.Tensor] = kept(key, make)
    return found


def tuned(
    name: str,
    layer: Any,
    call: Callable[..., Any],
    device: torch.device,
    compute: dict[str, str] | None = None,
) -> str | Missing:
    """The fastest candidate for these operands, as the JSON text that Humming takes.

    `call(tuning_config=text)` runs the layer; `compute` is what the call gives as compute_config.
    """
    config = layer.humming_config.to_str()
    key = config, str(compute)
    if key not in _CANDIDATES:
        _CANDIDATES.clear()
        try:
            _CANDIDATES[key] = _compiled(layer, config, device, compute)
        except Exception as error:
            return Missing(name, f"{type(error).__name__}: {error}"[:200])
    default = call()
    calls: dict[Any, Callable[[], Any]] = {}
    for text in _CANDIDATES[key]:
        candidate = functools.partial(call, tuning_config=text)
        try:
            close = torch.allclose(candidate().float(), default.float(), rtol=2e-2, atol=1e-2)
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            continue
        if close:
            calls[text] = candidate
    best, failed = fastest(calls, device)
    return Missing(name, f"no candidate runs: {failed}") if best is None else str(best)


def _compiled(
    layer: Any, config: str, device: torch.device, compute: dict[str, str] | None
) -> list[str]:
    """Candidate configurations that compile for this layer."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    kind = compute or {}  # of products, where they are grouped
    entries = get_heuristics_config(layer.humming_config, device=device, **kind)
    picked = [entry[2] for entry in entries]
    texts: dict[str, None] = {}
    for base in (*picked, *(near for one in picked for near in _neighbours(one))):
        texts.setdefault(json.dumps(base, default=lambda value: value.value))
    chosen = list(texts)[:_MOST]

    def build(text: str) -> str | None:
        try:
            with torch.cuda.device(device):
                HummingKernel.prepare_kernels(config, compute, text, device)
        except Exception:
            return None
        return text

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [text for text in pool.map(build, chosen) if text is not None]


def _neighbours(base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stages = base.get("num_stages", 2)
    yield from ({**base, "num_stages": s} for s in (stages - 1, stages + 1) if s >= 3)
    if base.get("use_stream_k", True):
        yield {**base, "use_stream_k": False}
    yield from ({**base, "raster_group_m": r} for r in (1, 8) if base.get("raster_group_m") != r)
