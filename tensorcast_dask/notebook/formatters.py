"""Teaches a notebook to show values of floors that draw nothing: errors, signals, rows, nodes.

Rules:

1. Classes of this floor and above draw themselves (`_repr_html_`). Those below know nothing of HTML, so
   IPython is told here.
2. Nothing is imported for it: where IPython does not run, there is nobody to teach.
"""

from __future__ import annotations

import sys
from typing import Any

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.notebook.cards import (
    error_card,
    node_card,
    rows_card,
    signals_card,
)
from tensorcast_dask.tensors.messages import NodeState, Rows
from tensorcast_dask.tensors.signals import Signal

__all__ = ["teach"]


def teach() -> None:
    """Teach the shell in which this program runs, if it runs in one; again is no harm."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return
    html = shell.display_formatter.formatters["text/html"]
    html.for_type(TensorCastError, error_card)
    html.for_type(Signal, lambda signal: signals_card(signal.name, [signal]))
    html.for_type(Rows, rows_card)
    html.for_type(NodeState, node_card)
