"""A study as JSON for programs, and as tables to read, made from that JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...bench.results import commit, machine, versions
from ..report import _versions
from .formats import ELEMENTS, SCALES
from .measure import Point, Study, measured_crossover, points
from .run import Result
from .theory import PAPER, crossover, predicted

SCHEMA = 1
_RIVALS = (("int8", "fp8"), ("int4", "fp4"))
_LABELS = {e.name: e.label for e in ELEMENTS} | {s.name: s.label for s in SCALES}
ROTATION_TEXT = {"none": "as it is", "block": "rotated in blocks", "row": "rotated along K"}


def as_dict(result: Result, command: Sequence[str]) -> dict[str, Any]:
    """Plain types only. A figure that is not finite is null."""
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(result.settings).items()
    }
    for name in ("model", "text"):
        settings[name] = None if settings[name] is None else str(settings[name])
    checkpoint, windows = result.checkpoint, result.windows
    return {
        "schema": SCHEMA,
        "kind": "qsnr",
        "date": result.date,
        "command": " ".join(command),
        "commit": commit(),
        "machine": machine(result.device),
        "versions": versions() | _versions(),
        "settings": settings,
        "model": {
            "name": checkpoint.name,
            "precision": checkpoint.precision,
            "precision_detail": checkpoint.detail,
            "loaded_dtype": str(result.dtype).removeprefix("torch."),
        },
        "text": {
            "name": result.text.name,
            "sha256": result.text.sha256,
            "windows": windows.ids.shape[0],
            "window_tokens": windows.ids.shape[1],
        },
        "paper": PAPER,
        "cells": _cells(result.study),
        "crest": _crests(result.study),
        "by_crest": _by_crest(result.study),
        "crossover": _crossovers(result.study),
        "notes": result.notes,
        "phase_seconds": result.seconds,
    }


def _finite(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _cells(study: Study) -> list[dict[str, Any]]:
    """dB over the tensors of each kind, format, scale, block size and rotation."""
    found = []
    for cell, tensors in study.db.items():
        worst = min(tensors, key=lambda name: tensors[name])
        found.append(
            {
                "of": cell.kind,
                "format": cell.element.name,
                "scale": cell.scale.name,
                "block": cell.block,
                "rotation": cell.rotation,
                "mean_db": _finite(study.mean(cell)),
                "worst_db": _finite(tensors[worst]),
                "worst": worst,
                "tensors": len(tensors),
            }
        )
    return found


def _crests(study: Study) -> list[dict[str, Any]]:
    """Crest factors: the median over tensors of each tensor's median, and the largest of these."""
    return [
        {
            "of": kind,
            "block": block,
            "rotation": rotation,
            "median": _finite(statistics.median(values)),
            "largest": _finite(max(values)),
        }
        for (kind, block, rotation), values in study.crests.items()
    ]


def _curve(found: list[Point]) -> dict[str, Any]:
    return {
        "crest": [round(c, 3) for c, _, _ in found],
        "db": [_finite(db) for _, db, _ in found],
        "blocks": [n for _, _, n in found],
    }


def _by_crest(study: Study) -> list[dict[str, Any]]:
    """Noise by crest factor: all block sizes with E8M0 scales, the largest with FP32 scales."""
    found = []
    for scale, blocks in (("e8m0", study.blocks), ("fp32", study.blocks[-1:])):
        bins = [study.bins[block] for block in blocks if block in study.bins]
        for element in study.elements:
            curve = points(bins, element.name, scale)
            if curve:
                about = {"format": element.name, "scale": scale, "blocks_of": list(blocks)}
                found.append({**about, **_curve(curve)})
    return found


def _crossovers(study: Study) -> list[dict[str, Any]]:
    """From which crest factor on floating point has less noise than integers, E8M0 scales."""
    by_name = {element.name: element for element in study.elements}
    e8m0 = next(scale for scale in SCALES if scale.name == "e8m0")
    bins = list(study.bins.values())
    found = []
    for low, high in _RIVALS:
        if low not in by_name or high not in by_name:
            continue
        theory = crossover(
            lambda c, e=by_name[low]: predicted(e, e8m0, c),  # type: ignore[misc]
            lambda c, e=by_name[high]: predicted(e, e8m0, c),  # type: ignore[misc]
            *(1.0, 100.0),
        )
        measured = measured_crossover(points(bins, low, "e8m0"), points(bins, high, "e8m0"))
        found.append(
            {
                "integer": low,
                "floating": high,
                "theory": _finite(theory),
                "measured": _finite(measured),
            }
        )
    return found


def columns(content: dict[str, Any]) -> list[tuple[str, str]]:
    """(format, scale) of the tables, in the order of the formats."""
    found = {(cell["format"], cell["scale"]) for cell in content["cells"]}
    return [(e.name, s.name) for e in ELEMENTS for s in SCALES if (e.name, s.name) in found]


def heading(column: tuple[str, str]) -> tuple[str, str]:
    return _LABELS[column[0]], _LABELS[column[1]]


def lines(content: dict[str, Any], kind: str) -> list[list[str]]:
    """Rotation, block size, and mean dB of each column; empty where a format has no such block."""
    by = {
        (c["rotation"], c["block"], c["format"], c["scale"]): c["mean_db"]
        for c in content["cells"]
        if c["of"] == kind
    }
    found = []
    for rotation in content["settings"]["rotations"]:
        for block in content["settings"]["blocks"]:
            values = [by.get((rotation, block, *column)) for column in columns(content)]
            if any(value is not None for value in values):
                cells = ["" if value is None else f"{value:.1f}" for value in values]
                found.append([ROTATION_TEXT[rotation], str(block), *cells])
    return found


def paper_line(content: dict[str, Any]) -> str:
    """What the paper found for E8M0 scales and blocks of 32, and what is found here."""
    here = []
    for kind in ("weights", "inputs"):
        values = [
            cell["mean_db"]
            for name in ("int8", "fp8")
            for cell in content["cells"]
            if (cell["of"], cell["format"], cell["scale"]) == (kind, name, "e8m0")
            and (cell["block"], cell["rotation"]) == (32, "none")
        ]
        if len(values) == 2 and None not in values:
            here.append(f"{kind} {values[0]:.2f} and {values[1]:.2f} dB")
    paper = content["paper"]
    told = f"INT8 and FP8, E8M0 scales, blocks of 32: the paper has {paper['int8']:.2f} and "
    told += f"{paper['fp8']:.2f} dB"
    return f"{told}; here {', '.join(here)}" if here else told


def crossover_lines(content: dict[str, Any]) -> list[str]:
    found = []
    for item in content["crossover"]:
        low, high = _LABELS[item["integer"]], _LABELS[item["floating"]]
        theory = "none" if item["theory"] is None else f"{item['theory']:.2f}"
        measured = "not reached" if item["measured"] is None else f"{item['measured']:.2f}"
        paper = f" (paper {content['paper']['crossover']})" if item["integer"] == "int8" else ""
        found.append(
            f"crest factor from which {high} beats {low}, E8M0 scales: theory {theory}{paper}, "
            f"measured {measured}"
        )
    return found


def print_report(content: dict[str, Any], console: Console) -> None:
    """A table for weights, one for inputs, the paper's figures and the notes."""
    model = content["model"]
    for kind in ("weights", "inputs"):
        table = Table(
            title=f"{escape(model['name'])} ({model['precision']}): {kind}, signal to noise in dB",
            caption="mean over the tensors; higher is better",
            title_style="bold",
        )
        table.add_column("\nvalues", no_wrap=True)
        table.add_column("\nblock", justify="right")
        for column in columns(content):
            table.add_column("\n".join(heading(column)), justify="right", no_wrap=True)
        before = None
        for line in lines(content, kind):
            if before not in (None, line[0]):
                table.add_section()
            table.add_row("" if line[0] == before else line[0], *line[1:])
            before = line[0]
        console.print(table)
    for line in (paper_line(content), *crossover_lines(content), *content["notes"]):
        console.print(f"[dim]- {escape(line)}[/]", highlight=False)
