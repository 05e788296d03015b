"""The commands by name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import lowbit
from lowbit.cli import bench, convert, doctor, estimate, evaluate, generate, inspect
from lowbit.cli.errors import INTERRUPTED

app = typer.Typer(
    name="lowbit",
    rich_markup_mode=None,  # rich would wrap the examples of the help
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
app.command("quantize")(convert.quantize)
app.command("export")(convert.export)
app.command("inspect")(inspect.inspect)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("estimate")(estimate.estimate)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(lowbit.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; also after a command.")
    ] = False,
) -> None:
    """Quantize, convert, measure and run models in 8 bits and fewer."""


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. Raises what the command and the parser raise.

    typer turns an interruption into `Abort`, or, in later releases, into an exit code.
    """
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="lowbit", standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0
