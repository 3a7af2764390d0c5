"""The generated parts of docs/qsnr.md, from benchmarks/results/<device>/qsnr.json.

docs/generate.py calls this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from group_size import _markdown, about

from farro.evaluation.qsnr.plot import save_plot
from farro.evaluation.qsnr.report import columns, crossover_lines, heading, lines, paper_line


def studies(devices: Sequence[Path]) -> list[dict[str, Any]]:
    """Every result of `farro qsnr`."""
    paths = [device / "qsnr.json" for device in devices]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def tables(devices: Sequence[Path]) -> str:
    """For each study a table of weights and one of inputs, and the paper's figures beside them."""
    parts = []
    for content in studies(devices):
        model, text, settings = content["model"], content["text"], content["settings"]
        parts.append(
            f"**{model['name']}** (checkpoint in {model['precision']}, loaded as "
            f"{model['loaded_dtype']}), {settings['rows']} rows of each weight, "
            f"{settings['rows']} tokens of each input from {text['windows']} windows of "
            f"{text['window_tokens']} tokens of {text['name']}. {about(content)}\n"
        )
        head = ["values", "block", *(", ".join(heading(c)) for c in columns(content))]
        for kind in ("weights", "inputs"):
            parts += [f"{kind.capitalize()}, dB:\n", _markdown(head, lines(content, kind))]
        told = (paper_line(content), *crossover_lines(content), *content["notes"])
        parts.append("\n".join(f"- {_sentence(line)}" for line in told) + "\n")
    return "\n".join(parts) or "Not measured yet: no `benchmarks/results/<device>/qsnr.json`.\n"


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}."


def plot(devices: Sequence[Path], name: str) -> str:
    """The line of Markdown that shows the plot, where there is anything to draw."""
    text = "Signal to noise over crest factor and block size, measured and by theory"
    return f"![{text}]({name})\n" if studies(devices) else "No plot: not measured yet.\n"


def draw(devices: Sequence[Path], path: Path) -> None:
    """The first study's plot."""
    for content in studies(devices)[:1]:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plot(content, path)
