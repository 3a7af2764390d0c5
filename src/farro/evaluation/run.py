"""The job behind `farro eval`: load, quantize, measure, generate."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .loading import (
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
from .metrics import (
    NoiseSummary,
    SignalAndNoise,
    kl_divergence,
    negative_log_likelihood,
    perplexity,
)
from .variants import (
    Variant,
    check_schemes,
    make_variant,
    quantized_layers,
    weight_matrix,
    with_yardstick,
)

LOADED = "loaded"
INPUT_WINDOWS = 4  # whose activations are measured; more move the medians by less than 0.1 dB
# (what is done, how many steps or None) -> context that gives a function to call after each step
Track = Callable[[str, "int | None"], AbstractContextManager[Callable[[], None]]]


def silent(description: str, total: int | None) -> AbstractContextManager[Callable[[], None]]:
    """A Track that shows nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class Settings:
    """What is asked of an evaluation; None is a default that depends on the model."""

    model: Path | None = None
    text: Path | None = None
    schemes: tuple[str, ...] | None = None
    windows: int = 32
    window_tokens: int = 512
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    backend: str = "auto"
    skip: tuple[str, ...] = ("lm_head",)
    prompt: str = "What is a matrix? Answer in one sentence."
    new_tokens: int = 48


@dataclass
class Row:
    """One line of the table. Signal-to-noise is None where nothing is quantized."""

    name: str
    perplexity: float
    kl: float  # nats a token, KL(loaded || this)
    layer_bytes: int
    model_bytes: int
    seconds: float  # median of a forward of one window
    weights: NoiseSummary | None = None
    inputs: NoiseSummary | None = None


@dataclass
class Evaluation:
    """Everything that was found; report.py shows it and as_dict makes it JSON."""

    settings: Settings
    checkpoint: Checkpoint
    text: Text
    windows: Windows
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    rows: list[Row]
    skipped: Mapping[str, str]
    prompt: str
    answers: Mapping[str, str]
    date: str
    seconds: dict[str, float]
    notes: list[str] = field(default_factory=list)


class _Clock:
    """Seconds of each phase, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Any:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start


@torch.no_grad()
def evaluate(settings: Settings, track: Track = silent) -> Evaluation:
    """Run an evaluation. EvaluationError says in one line what cannot be done."""
    _check(settings)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    clock = _Clock()
    notes: list[str] = []
    device = choose_device(settings.device)
    dtype, reason = choose_dtype(settings.dtype, device)
    with clock("load"):
        checkpoint = inspect_checkpoint(find_model(settings.model))
        text = load_text(settings.text)
        with track(f"loading {checkpoint.name}", None):
            model, tokenizer = load_model(checkpoint.path, dtype, device)
        windows = _windows(settings, model, tokenizer, text, notes)
    with clock("quantize"):
        variants = _variants(settings, model, dtype, track, notes)
        weights = _weight_noise(variants, track)
    with clock("inputs"):
        inputs = _input_noise(variants, windows.ids.to(device), track)
    with clock("forward"):
        rows = _measure(variants, windows, device, track)
    for row in rows:
        row.weights, row.inputs = weights.get(row.name), inputs.get(row.name)
    with clock("generate"):
        prompt, answers = _generate(settings, variants, tokenizer, device, track)
    return Evaluation(
        *(settings, checkpoint, text, windows, device, dtype, reason, rows),
        skipped=_skipped(variants),
        prompt=prompt,
        answers=answers,
        date=date,
        seconds=clock.seconds,
        notes=notes,
    )


def _check(settings: Settings) -> None:
    if settings.schemes is not None:
        check_schemes(settings.schemes)
    for name in ("windows", "new_tokens"):
        if getattr(settings, name) < 1:
            raise EvaluationError(f"{name} is {getattr(settings, name)}; needed at least 1")
    if settings.window_tokens < 2:
        raise EvaluationError(f"window_tokens is {settings.window_tokens}; needed at least 2")


def _windows(
    settings: Settings, model: Any, tokenizer: Any, text: Text, notes: list[str]
) -> Windows:
    length = settings.window_tokens
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and context < length:
        notes.append(f"windows are {context} tokens, the model's whole context, not {length}")
        length = context
    windows = cut_windows(tokenizer, text, length, settings.windows, settings.seed)
    count, tokens = windows.ids.shape
    if tokens < length:
        notes.append(f"the text has {windows.text_tokens} tokens: one window of {tokens}")
    elif count < settings.windows:
        notes.append(f"the text has {count} windows of {tokens} tokens, not {settings.windows}")
    return windows


def _variants(
    settings: Settings, model: Any, dtype: torch.dtype, track: Track, notes: list[str]
) -> list[Variant]:
    schemes, note = settings.schemes, None
    if schemes is None:
        schemes, note = with_yardstick(model, dtype)
    if note:
        notes.append(note)
    variants = [Variant(LOADED, model)]
    with track("quantizing", len(schemes)) as advance:
        for scheme in schemes:
            variants.append(make_variant(model, scheme, settings.skip, settings.backend))
            advance()
    for report in (variant.report for variant in variants):
        if report is not None and report.unmatched and report.unmatched != ("lm_head",):
            notes.append(f"skip patterns that matched nothing: {', '.join(report.unmatched)}")
            break
    return variants


def _skipped(variants: Iterable[Variant]) -> dict[str, str]:
    return {
        layer.name: layer.reason
        for variant in variants
        if variant.report is not None
        for layer in variant.report.skipped
    }


def _weight_noise(variants: list[Variant], track: Track) -> dict[str, NoiseSummary]:
    loaded, found = variants[0], {}
    with track("signal to noise of weights", len(variants) - 1) as advance:
        for variant in variants[1:]:
            layers = {}
            for name, layer in quantized_layers(variant).items():
                sums = SignalAndNoise()
                sums.add(weight_matrix(loaded.layer(name)), layer.dequantized_weight())
                layers[name] = sums.db
            if layers:
                found[variant.name] = NoiseSummary(layers)
            advance()
    return found


def _input_noise(
    variants: list[Variant], ids: torch.Tensor, track: Track
) -> dict[str, NoiseSummary]:
    """Hooks on the loaded model's layers see the exact inputs, which each scheme then rounds."""
    schemes = {variant.name: quantized_layers(variant) for variant in variants}
    sums = {
        (scheme, name): SignalAndNoise() for scheme, layers in schemes.items() for name in layers
    }
    # q, k and v (gate and up) get one tensor: what it gave is kept until another one comes
    last: dict[str, Any] = {"input": None}

    def hook(name: str) -> Callable[..., None]:
        def measure(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            if last["input"] is not x:
                last.clear()
                last["input"] = x
            rows = x.flatten(0, -2)
            for scheme, layers in schemes.items():
                if name not in layers:
                    continue
                if scheme not in last:
                    last[scheme] = SignalAndNoise()
                    last[scheme].add(rows, layers[name].dequantized_input(rows))
                sums[scheme, name].signal += last[scheme].signal
                sums[scheme, name].noise += last[scheme].noise

        return measure

    loaded = variants[0]
    handles = [
        loaded.layer(name).register_forward_pre_hook(hook(name))
        for name in dict.fromkeys(name for layers in schemes.values() for name in layers)
    ]
    try:
        used = ids[:INPUT_WINDOWS] if handles else ids[:0]
        with track("signal to noise of activations", len(used)) as advance:
            for window in used:
                loaded.model(window[None], use_cache=False)
                advance()
    finally:
        for handle in handles:
            handle.remove()
    # a layer that no window reached (an expert that nothing was routed to) has no figure
    return {
        scheme: NoiseSummary({n: sums[scheme, n].db for n in layers if sums[scheme, n].signal})
        for scheme, layers in schemes.items()
        if any(sums[scheme, name].signal for name in layers)
    }


def _measure(
    variants: list[Variant], windows: Windows, device: torch.device, track: Track
) -> list[Row]:
    """Perplexity, KL and time, window by window: only one window's logits are ever held."""
    nll = {variant.name: 0.0 for variant in variants}
    kl = dict(nll)
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    ids = windows.ids.to(device)
    with track("warming up", len(variants)) as advance:
        for variant in variants:
            variant.model(ids[:1], use_cache=False)
            advance()
    with track(f"windows of {ids.shape[1]} tokens", len(ids) * len(variants)) as advance:
        for window in ids:
            reference = None
            for variant in variants:
                logits, spent = _forward(variant.model, window, device)
                reference = logits if reference is None else reference
                seconds[variant.name].append(spent)
                nll[variant.name] += negative_log_likelihood(logits[:-1], window[1:])
                if logits is not reference:
                    kl[variant.name] += kl_divergence(reference, logits)
                advance()
    names = list(dict.fromkeys(name for variant in variants for name in quantized_layers(variant)))
    predicted, positions = len(ids) * (ids.shape[1] - 1), ids.numel()
    return [
        Row(
            variant.name,
            perplexity(nll[variant.name], predicted),
            kl[variant.name] / positions,
            variant.layer_bytes(names),
            variant.model_bytes,
            statistics.median(seconds[variant.name]),
        )
        for variant in variants
    ]


def _forward(model: Any, window: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, float]:
    """(logits [T, V], seconds)"""
    _wait(device)
    start = time.perf_counter()
    logits: torch.Tensor = model(window[None], use_cache=False).logits[0]
    _wait(device)
    return logits, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _generate(
    settings: Settings,
    variants: list[Variant],
    tokenizer: Any,
    device: torch.device,
    track: Track,
) -> tuple[str, dict[str, str]]:
    """(the prompt as the model gets it, answers of the loaded model and of one quantized model)."""
    prompt, special = settings.prompt, True
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        special = False  # the template wrote the start token itself
    ids = tokenizer(prompt, add_special_tokens=special, return_tensors="pt")["input_ids"].to(device)
    quantized = [variant for variant in variants if variant.report is not None]
    best = next((v for v in quantized if v.name == "int8-g256"), (quantized or variants)[-1])
    answers = {}
    chosen = {variant.name: variant for variant in (variants[0], best)}
    with track("generating", len(chosen)) as advance:
        for name, variant in chosen.items():
            out = variant.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
            answers[name] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            advance()
    return prompt, answers
