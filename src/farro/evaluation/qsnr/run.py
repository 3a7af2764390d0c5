"""The job behind `farro qsnr`: load a model, sample weights and inputs of its layers, measure."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...quantize import _is_linear, _matches
from ..loading import (
    Checkpoint,
    EvaluationError,
    Text,
    Windows,
    choose_device,
    choose_dtype,
    cut_windows,
    find_model,
    inspect_checkpoint,
    load_model,
    load_text,
)
from ..run import Track, silent
from ..variants import weight_matrix
from .formats import ELEMENTS
from .measure import ROTATIONS, Study

BLOCKS = (16, 32, 64, 128, 256)
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Settings:
    """What is asked of a study."""

    model: Path | None = None
    text: Path | None = None
    formats: tuple[str, ...] = tuple(element.name for element in ELEMENTS)
    blocks: tuple[int, ...] = BLOCKS
    rotations: tuple[str, ...] = ROTATIONS
    rows: int = 64  # of a tensor
    windows: int = 2
    window_tokens: int = 512
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    skip: tuple[str, ...] = ("lm_head",)


@dataclass
class Result:
    """Everything that was found; report.py shows it and makes it JSON."""

    settings: Settings
    checkpoint: Checkpoint
    text: Text
    windows: Windows
    device: torch.device
    dtype: torch.dtype
    study: Study
    date: str
    seconds: dict[str, float]
    notes: list[str] = field(default_factory=list)


@torch.no_grad()
def measure(settings: Settings, track: Track = silent) -> Result:
    """Run a study. EvaluationError says in one line what cannot be done."""
    _check(settings)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    seconds: dict[str, float] = {}
    device = choose_device(settings.device)
    dtype, _ = choose_dtype(settings.dtype, device)
    with _timed(seconds, "load"):
        checkpoint = inspect_checkpoint(find_model(settings.model))
        text = load_text(settings.text)
        with track(f"loading {checkpoint.name}", None):
            model, tokenizer = load_model(checkpoint.path, dtype, device)
        context = getattr(model.config, "max_position_embeddings", settings.window_tokens)
        length = min(settings.window_tokens, context)
        windows = cut_windows(tokenizer, text, length, settings.windows, settings.seed)
    layers = _layers(model, settings.skip)
    elements = tuple(element for element in ELEMENTS if element.name in settings.formats)
    study = Study(settings.blocks, settings.rotations, elements, settings.seed)
    random = torch.Generator().manual_seed(settings.seed)
    with _timed(seconds, "weights"), track("weights", len(layers)) as advance:
        for name, layer in layers.items():
            study.add("weights", name, _some_rows(weight_matrix(layer), settings.rows, random))
            advance()
    with _timed(seconds, "inputs"):
        inputs = _inputs(model, layers, windows.ids.to(device), settings.rows, random, track)
        with track("inputs", len(inputs)) as advance:
            for name, x in inputs.items():
                study.add("inputs", name, x)
                advance()
    notes = _notes(checkpoint, study, len(layers), len(inputs))
    return Result(
        *(settings, checkpoint, text, windows, device, dtype, study, date, seconds, notes)
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def _check(settings: Settings) -> None:
    known = {
        "formats": tuple(element.name for element in ELEMENTS),
        "rotations": ROTATIONS,
    }
    for what, names in known.items():
        given = getattr(settings, what)
        unknown = [name for name in given if name not in names]
        if unknown or not given:
            wrong = repr(unknown[0]) if unknown else "empty"
            raise EvaluationError(f"{what}: {wrong}; needed some of {', '.join(names)}")
    for block in settings.blocks:
        if block < 2 or block & (block - 1):
            raise EvaluationError(f"blocks: {block}; needed powers of two, from 2 on")
    if not settings.blocks:
        raise EvaluationError("blocks: none given; needed powers of two, from 2 on")
    for name, least in (("rows", 1), ("windows", 1), ("window_tokens", 2)):
        if getattr(settings, name) < least:
            raise EvaluationError(f"{name} is {getattr(settings, name)}; needed {least} or more")


def _layers(model: Any, skip: tuple[str, ...]) -> dict[str, Any]:
    """The linear layers that quantize_ would swap, in the model's order."""
    found = {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and not any(_matches(pattern, name) for pattern in skip)
    }
    if not found:
        raise EvaluationError("the model has no linear layer that is not skipped")
    return found


def _some_rows(x: torch.Tensor, rows: int, random: torch.Generator) -> torch.Tensor:
    """At most `rows` rows of x [R, K], drawn at random."""
    drawn = torch.randperm(x.shape[0], generator=random)[:rows].sort().values
    return x[drawn.to(x.device)].float()


def _inputs(
    model: Any,
    layers: dict[str, Any],
    ids: torch.Tensor,
    rows: int,
    random: torch.Generator,
    track: Track,
) -> dict[str, torch.Tensor]:
    """Tokens drawn from the inputs of the layers; of layers that share one, the first."""
    found: dict[str, list[torch.Tensor]] = {}
    each = -(-rows // len(ids))
    last: list[torch.Tensor | None] = [None]

    def hook(name: str) -> Callable[..., None]:
        def sample(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            if x is not last[0]:  # q, k and v get one tensor
                last[0] = x
                found.setdefault(name, []).append(_some_rows(x.flatten(0, -2), each, random))

        return sample

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        with track("forward", len(ids)) as advance:
            for window in ids:
                model(window[None], use_cache=False)
                advance()
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(samples)[:rows] for name, samples in found.items()}


def _notes(checkpoint: Checkpoint, study: Study, layers: int, inputs: int) -> list[str]:
    notes = []
    if checkpoint.precision.upper() not in (*_FLOATS, "FLOAT32", "FLOAT16", "BFLOAT16"):
        notes.append(
            f"the checkpoint keeps weights in {checkpoint.precision}: they take few values in each "
            "of its blocks, so the figures of weights are not those of a model trained in BF16"
        )
    for kind, count in (("weights", layers), ("inputs", inputs)):
        cells = [names for cell, names in study.db.items() if cell.kind == kind]
        left = count - max(map(len, cells), default=0)
        if left:
            notes.append(f"{left} of {count} {kind} are not measured: too narrow, or not finite")
    return notes
