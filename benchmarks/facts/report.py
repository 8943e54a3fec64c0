"""How every fact is printed: a table for people, one line of JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence

__all__ = ["Row", "show", "skip"]

Row = Mapping[str, object]


def show(fact: str, rows: Sequence[Row], **notes: object) -> None:
    """Print the rows as a table and everything as one JSON line.

    Parameters
    ----------
    fact : str
        Name of the script.
    rows : sequence of mapping
        One mapping a line; the columns are the keys in order of appearance.
    **notes : object
        Further findings, printed below the table.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [
        max(len(text) for text in [column, *(line[at] for line in cells)])
        for at, column in enumerate(columns)
    ]
    for line in [columns, ["-" * width for width in widths], *cells]:
        texts = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        print("  ".join(texts).rstrip())
    for key, value in notes.items():
        print(f"{key}: {_cell(value)}")
    machine = {"kernel": platform.release(), "cores": os.cpu_count()}
    found = {"fact": fact, "rows": list(rows), **notes, "machine": machine}
    print(json.dumps(found, default=str), flush=True)


def skip(fact: str, reason: str) -> None:
    """Say that this machine cannot answer, and why.

    Parameters
    ----------
    fact : str
        Name of the script.
    reason : str
        What is missing.
    """
    print(f"{fact}: skipped, {reason}")
    print(json.dumps({"fact": fact, "skipped": reason}), flush=True)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
