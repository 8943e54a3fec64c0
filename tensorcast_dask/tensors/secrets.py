"""Which names speak of a secret: of labels, settings and fields whose values are not shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["HIDDEN", "is_secret", "labels_shown"]

_SECRET: Final = re.compile(
    r"secret|token|passw|credential|api[-_.]?key|private[-_.]?key", re.IGNORECASE
)
#: What stands in place of a value.
HIDDEN: Final = "(not shown)"


def is_secret(name: str) -> bool:
    """Tell whether what is called so may be a secret."""
    return _SECRET.search(name) is not None


def labels_shown(labels: Mapping[str, str]) -> dict[str, str]:
    """Give labels without the values of those that are secrets by their names."""
    return {name: HIDDEN if is_secret(name) else text for name, text in labels.items()}
