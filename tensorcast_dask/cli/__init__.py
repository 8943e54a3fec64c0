"""The `tensorcast` command."""

from __future__ import annotations

from tensorcast_dask.cli.main import main

__all__ = ["main"]
