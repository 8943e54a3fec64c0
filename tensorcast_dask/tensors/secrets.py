"""Which names speak of a secret: of labels, settings and fields whose values are not shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["HIDDEN", "is_secret", "labels_shown"]

#: A name that has one of these words, as `api-token` or `awsSecretKey` do.
_SECRET: Final = re.compile(
    r"(^|[^a-z])(secret|token|password|passwd|passphrase|credential|credentials|private|apikey|key|auth)([^a-z]|$)"
)
_HUMPS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: What stands in place of a value.
HIDDEN: Final = "(not shown)"


def is_secret(name: str) -> bool:
    """Tell whether what is called so may be a secret."""
    return _SECRET.search(_HUMPS.sub("-", name).lower()) is not None


def labels_shown(labels: Mapping[str, str]) -> dict[str, str]:
    """Give labels without the values of those that are secrets by their names."""
    return {name: HIDDEN if is_secret(name) else text for name, text in labels.items()}
