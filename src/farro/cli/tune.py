"""farro tune: measure a kernel's configurations on this device and write a table of the best."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer


def tune_command(
    operator: Annotated[
        str, typer.Argument(help="int8_gemm, int8_quantize, fp8_quantize, fp8_linear, ...")
    ] = "int8_gemm",
    shapes: Annotated[
        str, typer.Option(help="Named sets (default, heldout) or sizes NxK, comma separated")
    ] = "default",
    m: Annotated[str | None, typer.Option("--m", help="Values of M: 1,16,64-67")] = None,
    group_size: Annotated[str, typer.Option(help="Group sizes, comma separated")] = (
        "256,128,64,32"
    ),
    variant: Annotated[
        str, typer.Option(help="Forms of an operator that has several, comma separated, or all")
    ] = "all",
    dtype: Annotated[str, typer.Option(help="Output dtype to tune with")] = "bfloat16",
    backend: Annotated[str, typer.Option(help="all, or back ends: triton,cuda")] = "all",
    device: Annotated[str, typer.Option(help="Device to tune")] = "cuda",
    budget_s: Annotated[float, typer.Option(help="Seconds; what is left is for the next run")] = (
        480.0
    ),
    jobs: Annotated[
        int, typer.Option(help="Processes that compile [default: the number of CPUs]")
    ] = -1,
    limit: Annotated[
        int, typer.Option(help="Configurations of each problem, a fair sample; 0 for all")
    ] = 0,
    fresh: Annotated[
        bool, typer.Option(help="Begin again: what log and table hold is replaced, all of it")
    ] = False,
    ship: Annotated[
        bool, typer.Option("--ship", help="Write farro's own table, not the user's")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write no table: only compare today's choice with the best"),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write all measurements here (JSON)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON")] = False,
) -> None:
    """Time each legal configuration for a set of problems, and keep the best in a table."""
    import torch

    from .. import tuning
    from ..arch import arch_of
    from ..bench import adapter, plans, tuner
    from ..bench.case import Options
    from .bench import _dtype, _options
    from .environment import device_named

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; tables are measured on the device itself")
    where = device_named(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    found = adapter(operator)
    slug = arch_of(where).device or "cpu"
    options = _options(found, Options(where, 256, _dtype(dtype), "none"), group_size, variant)
    sets = plans.parse_shapes(found, shapes)
    rows = None if m is None else plans.parse_rows(m)
    path = tuning.shipped_path if ship else tuning.user_path
    session = tuner.Tuner(
        found,
        where,
        slug,
        path(operator, slug),
        jobs=(os.cpu_count() or 1) if jobs < 0 else jobs,
        deadline=time.monotonic() + budget_s,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        progress=_progress(),
        backends=tuple(backend.split(",")),
        limit=limit,
        fresh=fresh,
        keep=not dry_run,
        # never inside the package, where it would be taken for a table and shipped too
        log=tuning.user_path(operator, slug).with_suffix(
            ".shipped.log.json" if ship else ".log.json"
        ),
    )
    entries = tuner.tune(session, list(plans.cases(found, sets, rows, options)))
    summary = _summary(session, entries)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(summary, indent=1) + "\n")
    if as_json:
        print(json.dumps(summary))
        return
    for line in _lines(summary):
        print(line)
    if entries and not dry_run:  # none where time was up before the first
        print(f"wrote {session.table}")


def _progress() -> Any:
    """A line every few seconds, rewritten in place on a terminal."""
    last = [0.0]

    def progress(what: str, done: int, total: int) -> None:
        terminal = sys.stderr.isatty()
        if done < total and time.monotonic() - last[0] < (0.2 if terminal else 15):
            return
        last[0] = time.monotonic()
        end = "\n" if done == total or not terminal else ""
        print(f"\r{what} {done}/{total}" if terminal else f"{what} {done}/{total}", end=end,
              file=sys.stderr, flush=True)  # fmt: skip

    return progress


def _summary(session: Any, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """How today's choice compares with the best of the search, problem by problem."""
    from ..bench import results

    rows = [
        {
            **entry["problem"],
            "set": entry["set"],
            "best_us": entry["best_us"],
            "chosen_us": entry["chosen_us"],
            "measured": entry["measured"],
            "best": entry["best"],
            "chosen": entry["chosen"],
        }
        for entry in entries
    ]
    result = results.empty(session.adapter.operator, session.device, ["farro", *sys.argv[1:]])
    kept = ("schema", "operator", "date", "command", "commit", "machine", "versions")
    return {**{name: result[name] for name in kept}, "kind": "search", "search": rows}


def _lines(summary: dict[str, Any]) -> list[str]:
    from ..bench.results import setting

    shares: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in summary["search"]:
        if row["chosen_us"] is not None:
            sizes = " ".join(f"{n.upper()}={row[n]}" for n in ("m", "n", "k") if n in row)
            where = f"{sizes} {setting(row)}"
            share = min(row["best_us"] / row["chosen_us"], 1.0)
            shares.setdefault((row["backend"], row["set"]), []).append((share, where))
    lines = []
    for (backend, group), values in shares.items():
        worst, where = min(values)
        mean = sum(share for share, _ in values) / len(values)
        lines.append(
            f"{backend}, {group}: the choice before this run has {mean:.3f} of the best's speed "
            f"on average, at least {worst:.3f} ({where})"
        )
    return lines
