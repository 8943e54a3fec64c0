"""Small tables for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["html_table"]


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Give a table of two columns; empty values are left out, all text is escaped."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{escape(key)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for key, value in rows.items()
        if value not in ("", None)
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"
