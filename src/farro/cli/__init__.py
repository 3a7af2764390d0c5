"""The command line: `farro info|explain|verify|bench|eval|qsnr|tune`, one module for each command.

Only the module of the command that is run is imported, so `farro info` needs neither transformers
nor matplotlib. To add a command: one file with its function, and one line in COMMANDS.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    run: str  # "module:function" in this folder
    help: str


COMMANDS = {
    "info": Command("info:info_command", "Versions, devices, and which back ends work here."),
    "explain": Command("explain:explain_command", "Which kernel would run a problem, and why."),
    "verify": Command("verify:verify_command", "Every kernel that works here against its formula."),
    "bench": Command("bench:bench_command", "Measure an operator against its peers."),
    "eval": Command("eval:eval_command", "Quantize a language model and measure what it costs."),
    "qsnr": Command("qsnr:qsnr_command", "Compare number formats on a model's values."),
    "tune": Command("tune:tune_command", "Measure the best configurations on this device."),
}


def main() -> None:
    """Entry point of `farro` and of `python -m farro`."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"farro: the command line needs {error.name}: pip install 'farro[cli]'", file=sys.stderr
        )
        raise SystemExit(2) from None
    from .lazy import make_app

    make_app()(prog_name="farro")


def __getattr__(name: str) -> Any:
    """`farro.cli.app`, the typer application, made when first asked for."""
    if name != "app":
        raise AttributeError(f"module 'farro.cli' has no attribute {name!r}")
    from .lazy import make_app

    globals()["app"] = app = make_app()
    return app
