"""farro bench: time an operator, its floors and its peers on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPES = ("bfloat16", "float16", "float32")


def bench_command(
    operator: Annotated[
        str,
        typer.Argument(help="int8_gemm, nvfp4_group_mm, nvfp4_moe, ... (farro.bench.OPERATORS)"),
    ] = "int8_gemm",
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Named sets (default, heldout, cpu, models) or sizes NxK, comma separated "
            "[default: 'default' on a GPU, 'cpu' on a CPU]"
        ),
    ] = None,
    m: Annotated[str | None, typer.Option("--m", help="Values of M: 1,16,64-67")] = None,
    n: Annotated[int | None, typer.Option("--n", help="N of one shape, with --k")] = None,
    k: Annotated[int | None, typer.Option("--k", help="K of one shape, with --n")] = None,
    group_size: Annotated[str, typer.Option(help="Group sizes, comma separated")] = "256",
    variant: Annotated[
        str, typer.Option(help="Forms of an operator that has several, comma separated, or all")
    ] = "all",
    dtype: Annotated[str, typer.Option(help="Output dtype: bfloat16, float16, float32")] = (
        "bfloat16"
    ),
    backend: Annotated[
        str, typer.Option(help="all, or back ends, comma separated: auto,triton,cuda,reference")
    ] = "all",
    peers: Annotated[
        str,
        typer.Option(
            help="none, default, tuned (peers that have a tuner, tuned too), or names: "
            "bf16,int_mm,scaled_mm,triton,humming,deepgemm "
            "(grouped: bf16,scaled_grouped,deepgemm,humming)"
        ),
    ] = "default",
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu [default: a GPU]")] = None,
    cold: Annotated[
        bool | None,
        typer.Option("--cold/--warm", help="Flush caches between runs [default: GPU yes, CPU no]"),
    ] = None,
    dense_m: Annotated[
        bool, typer.Option("--dense-m", help="Also every M of 1..256, and its largest step")
    ] = False,
    quick: Annotated[bool, typer.Option(help="One shape, few M, short timings")] = False,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="Only what an operator's figures need: auto, replays of CUDA graphs, fewer runs",
        ),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            help="Processes that run all cases once beforehand, so that little is compiled between "
            "cases [default: with --brief on a GPU the number of CPUs, else none]"
        ),
    ] = -1,
    rounds: Annotated[int, typer.Option(help="How often all subjects are timed in turn")] = 2,
    budget_s: Annotated[
        float | None,
        typer.Option(
            help="Stop starting new cases after this many seconds; the most telling come first"
        ),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare with this earlier result; exit 1 on regressions")
    ] = None,
    margin: Annotated[float, typer.Option(help="How much slower --check allows")] = 0.1,
    check_auto: Annotated[
        bool, typer.Option("--check-auto", help="Exit 1 where auto is 5 % behind a back end")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the result here (JSON)")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write plots to this folder")] = None,
) -> None:
    """Time an operator against its floors and peers: medians, errors, a table, JSON, plots."""
    import torch

    from ..bench import adapter, results, runner
    from ..bench.case import Options
    from ..bench.peers import check_names
    from ..checks import BACKENDS
    from .environment import device_named

    where = device_named(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    found = adapter(operator)
    before = None if check is None else results.load(check)
    check_names(peers)
    asked = tuple(("auto" if brief and backend == "all" else backend).split(","))
    for name in asked:
        if name != "all" and name not in BACKENDS:
            raise ValueError(f"--backend: {name!r}; needed all, or some of {', '.join(BACKENDS)}")
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; needed 1 or more")
    options = _options(found, Options(where, 256, _dtype(dtype), peers), group_size, variant)
    plans = _plans(found, where, shapes, (m, n, k), options, dense_m, quick)
    torch.manual_seed(0)
    session = runner.open_session(
        found,
        where,
        ["farro", *sys.argv[1:]],
        cold,
        backends=asked,
        rounds=1 if quick else max(rounds, 3) if brief else rounds,
        quick=quick,
        brief=brief,
        jobs=_jobs(jobs, brief, where),
        say=lambda line: print(line, file=sys.stderr, flush=True),
        output=output,
        deadline=None if budget_s is None else time.monotonic() + budget_s,
    )
    result = runner.run(session, plans)
    _show(result, as_json, output, plots)
    lines = _verdicts(result, before, margin, check_auto)
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        raise typer.Exit(1)


def _jobs(jobs: int, brief: bool, where: Any) -> int:
    if jobs >= 0:
        return jobs
    return min(16, os.cpu_count() or 1) if brief and where.type == "cuda" else 0


def _plans(
    found: Any,
    where: Any,
    shapes: str | None,
    sizes: tuple[str | None, int | None, int | None],
    options: list[Any],
    dense_m: bool,
    quick: bool,
) -> list[Any]:
    from ..bench import plans

    m, n, k = sizes
    if k is not None:
        given = {"k": k} if n is None else {"n": n, "k": k}
        text = "x".join(str(value) for value in given.values())
        shapes = text if shapes is None else f"{shapes},{text}"
    elif n is not None:
        raise ValueError("--n needs --k")
    if shapes is None:
        shapes = "default" if where.type == "cuda" else "cpu"
    sets = plans.parse_shapes(found, shapes)
    rows = None if m is None else plans.parse_rows(m)
    dense = sets.pop("dense", ())
    listed = list(plans.cases(found, sets, rows, options, quick))
    if dense_m or dense:
        dense = dense or sets.get("given") or found.shapes["dense"]
        listed += plans.cases(found, {"dense": dense}, None, options, quick)
    return listed


def _options(found: Any, common: Any, group_size: str, variant: str) -> list[Any]:
    """One a form of the operator: its variants, or the group sizes."""
    from dataclasses import replace

    if not found.variants:
        if variant != "all":
            raise ValueError(f"--variant: {found.operator} has one form")
        return [replace(common, group_size=_group_size(text)) for text in group_size.split(",")]
    names = found.variants if variant == "all" else tuple(variant.split(","))
    unknown = [name for name in names if name not in found.variants]
    if unknown:
        known = ", ".join(found.variants)
        raise ValueError(f"--variant: no {unknown[0]!r} of {found.operator}; there are: {known}")
    return [replace(common, variant=name) for name in names]


def _group_size(text: str) -> int:
    from ..formats.int8_group import check_group_size

    if not text.strip().isdigit():
        raise ValueError(f"--group-size: {text!r} is not a number")
    check_group_size("--group-size", int(text))
    return int(text)


def _dtype(name: str) -> Any:
    import torch

    if name not in DTYPES:
        raise ValueError(f"--dtype: {name!r}; needed one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def _show(result: dict[str, Any], as_json: bool, output: Path | None, plots: Path | None) -> None:
    from rich.console import Console

    from ..bench import plots as drawing
    from ..bench import table

    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        console = Console()
        if not console.is_terminal:  # a log is not folded at 80 columns
            console = Console(width=150)
        table.show(result, console)
    if output is not None:
        print(f"wrote {output}", file=sys.stderr)
    if plots is not None:
        for path in drawing.draw(result, plots):
            print(f"wrote {path}", file=sys.stderr)


def _verdicts(
    result: dict[str, Any], before: dict[str, Any] | None, margin: float, check_auto: bool
) -> list[str]:
    """What fails the run: regressions against `before`, and auto behind a back end."""
    from ..bench import results

    failures = [f"failed: {line}" for line in result["failed"]]
    if before is not None:
        lines, compared = results.regressions(result, before, margin)
        print(f"--check: {compared} compared, {len(lines)} regressed", file=sys.stderr)
        if compared == 0:
            raise ValueError("--check: the earlier result has none of these measurements")
        failures += [f"slower: {line}" for line in lines]
    if check_auto:
        lines, compared = results.behind(result["rows"])
        print(f"--check-auto: {compared} cases, auto behind in {len(lines)}", file=sys.stderr)
        if compared == 0:
            raise ValueError("--check-auto: no case has auto beside a named back end")
        failures += [f"auto behind: {line}" for line in lines]
    return failures
