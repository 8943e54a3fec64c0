"""Long-lived tensors as first-class citizens of a Dask cluster."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
