"""farro info: versions, devices, and which back ends work here."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def info_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions, devices and probes, which back ends work here, and why the others do not.

    Paste its output into a bug report.
    """
    from .environment import backends, describe, environment

    found = environment()
    ends = backends()
    if as_json:
        typer.echo(json.dumps({**found, "backends": ends}, indent=2))
        return
    lines = [*describe(found), "back ends:"]
    for name, end in ends.items():
        verdict = f"works: {', '.join(end['kernels'])}" if end["works"] else end["reason"]
        lines.append(f"  {name:<10} {verdict}")
    typer.echo("\n".join(lines))
