"""The typer application: commands loaded when they are run, errors in one line.

Exit codes: 0 for success, 1 where a command looked for faults and found some, 2 for wrong usage and
for what cannot run here, 3 where it found none and ended before everything was looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from ..errors import UnsupportedError
from . import COMMANDS

_EXTRAS = {
    "matplotlib": "cli",
    "rich": "cli",
    "transformers": "models",
    "safetensors": "models",
    "gguf": "models",
    "accelerate": "models",
    "sentencepiece": "models",
    "triton": "triton",
    "cuda": "cuda",
}


def _fail(message: str, command: str | None = None) -> typer.Exit:
    name = f"farro {command}" if command else "farro"
    typer.echo(f"{name}: {' '.join(message.split())}", err=True)
    return typer.Exit(2)


@contextlib.contextmanager
def _one_line_errors(context: Any) -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 2.

    FARRO_TRACEBACK=1 lets everything through, for whoever looks for a fault of farro's own.
    """
    try:
        yield
    except (ValueError, TypeError, UnsupportedError, OSError) as error:
        if os.environ.get("FARRO_TRACEBACK", "0") not in ("", "0") or isinstance(
            error, BrokenPipeError
        ):
            raise
        raise _fail(str(error) or type(error).__name__, context.invoked_subcommand) from None
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise _fail(
            f"needs {error.name}: pip install 'farro[{extra}]'", context.invoked_subcommand
        ) from None
    except Exception as error:
        # a usage error of typer's, whose class moved between its versions; no arguments at all
        # is one too, and shows the help
        shows_help = type(error).__name__ == "NoArgsIsHelpError"
        if shows_help or not hasattr(error, "format_message"):
            raise
        raise _fail(error.format_message(), context.invoked_subcommand) from None


def _exists(run: str) -> bool:
    return importlib.util.find_spec(f".{run.partition(':')[0]}", __package__) is not None


def _load(name: str) -> Any:
    """The typer command of COMMANDS[name], its module imported now."""
    module, _, function = COMMANDS[name].run.partition(":")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(getattr(importlib.import_module(f".{module}", __package__), function))
    return typer.main.get_command(alone)


class LazyGroup(typer.core.TyperGroup):
    """A group whose commands are known by name and help, and imported when run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, command in COMMANDS.items():
            if _exists(command.run):
                self.add_command(typer.core.TyperCommand(name, help=command.help), name)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the table's order

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        ctx.invoked_subcommand = name  # for the message, should the import fail
        return name, _load(name), rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _one_line_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _one_line_errors(ctx):
            return super().invoke(ctx)


def _version(value: bool) -> None:
    if value:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit()


def make_app() -> typer.Typer:
    """The application with every command of COMMANDS whose module exists."""
    app = typer.Typer(
        cls=LazyGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
        ] = False,
    ) -> None:
        """Low-precision GEMM kernels for LLM and MoE inference.

        Exit codes: 0 success, 1 faults found, 2 wrong usage, 3 ended early. FARRO_TRACEBACK=1 shows
        where an error was raised.
        """

    return app
