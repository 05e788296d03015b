"""The command line `lowbit`: quantize, export, inspect, eval, generate, estimate, bench, doctor.

`python -m lowbit` is the same. Its own packages, typer and rich, come with the extra `cli`. A warning or an error is
one line on stderr. After an error, which says the way out, the exit code is not 0; `--debug` shows the traceback.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from lowbit import optional
from lowbit.cli.errors import INTERRUPTED, exit_code, one_line, warnings_on_one_line


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit code.

    Args:
        arguments: those behind the program's name; None takes them from `sys.argv`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = "--debug" in given
    try:
        optional.check("the command line needs", ("typer", "rich"), "cli")
        from lowbit.cli.app import run

        with nullcontext() if shows_traceback else warnings_on_one_line():
            return run([argument for argument in given if argument != "--debug"])
    except KeyboardInterrupt:
        print("lowbit: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if shows_traceback:
            raise
        print(f"lowbit: {one_line(error, given)}", file=sys.stderr)
        return exit_code(error)
