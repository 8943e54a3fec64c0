"""What commands print: tables for people, JSON for programs.

Rules:

1. Results go to standard output, everything else to standard error.
2. With `--json` standard output carries one JSON value and nothing else; of a command that goes
   on, one a line.
3. Exit status: 0 done, 1 the service refused (the error's kind stands first on standard
   error), 2 wrong usage, 3 the service could not be reached in time, 130 interrupted.
4. JSON has every field, set or not; bytes are hexadecimal text, what is not finite is null.
   Generations, and integers that a double cannot hold, are text: many readers of JSON
   know no other number than a double.
5. A reader that went away (`tensorcast ls | head`) is no error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from tensorcast_dask.exceptions import ReachError, TensorCastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

__all__ = ["console", "plain", "run", "show_json", "show_table", "success"]

_PIPE_COLUMNS: Final = 10_000
_INTERRUPTED: Final = 130
#: What writing a file comes to, and no connection does.
_OF_FILES: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
#: The largest integer up to which a double holds all of them.
_EXACT: Final = (1 << 53) - 1


def plain(value: Any, name: str = "") -> Any:
    """Give what JSON can say (rule 4)."""
    said = value
    match value:
        case msgspec.Struct():
            fields = value.__struct_fields__
            said = {field: plain(getattr(value, field), field) for field in fields}
        case dict():
            said = {str(key): plain(each, str(key)) for key, each in value.items()}
        case list() | tuple():
            said = [plain(each, name) for each in value]
        case bytes():
            said = value.hex()
        case bool() | None:
            pass
        case int() if name.endswith("generation") or abs(value) > _EXACT:
            said = str(value)
        case float() if not math.isfinite(value):
            said = None
        case int() | float():
            pass
        case _:
            said = str(value)
    return said


def show_json(value: Any) -> None:
    """Print one JSON value."""
    click.echo(json.dumps(plain(value), sort_keys=True))


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # Into a pipe every row is one line, however long; text is shown as it is.
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    console(width=width, markup=False, highlight=False, emoji=False).print(table)


def console(**options: Any) -> Console:
    """Make what draws on standard output; to rich a reader that went away is an error (rule 5)."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - what it is called for

    return Screen(**options)


def success(text: str) -> None:
    """Say what was done, to people."""
    click.echo(text, err=True)


def run(action: Callable[[], None]) -> None:
    """Run a command's work and turn our errors into a sentence and an exit status."""
    try:
        action()
    except TensorCastError as error:
        click.echo(f"{error.kind}: {error.message}", err=True)
        sys.exit(3 if isinstance(error, ReachError) else 1)
    except BrokenPipeError:  # rule 5
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is not None or error.errno in _OF_FILES:
            click.echo(f"FileError: {error}", err=True)
            sys.exit(1)
        click.echo(f"CatalogUnavailable: {error}; is the address right?", err=True)
        sys.exit(3)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)
