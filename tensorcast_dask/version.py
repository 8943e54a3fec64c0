"""The release, for every floor; the build reads it here."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
