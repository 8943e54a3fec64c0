"""Which names speak of a secret: of labels, settings and fields whose values are not shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["HIDDEN", "is_secret", "labels_shown"]

#: A name that has one of these words, as `api-token` or `awsSecretKey` do. `tokens` are counted.
_SECRET: Final = re.compile(
    r"(^|[^a-z])((secret|password|passwd|pwd|passphrase|credential|apikey|key|cookie)s?|token|private|"
    r"auth|authorization|bearer|accesskey|secretkey|authtoken|accesstoken)([^a-z]|$)"
)
#: Where words meet, as in `dbPassword`, `DBPassword`.
_HUMPS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
#: What stands in place of a value.
HIDDEN: Final = "(not shown)"


def is_secret(name: str) -> bool:
    """Tell whether what is called so may be a secret."""
    return _SECRET.search(_HUMPS.sub("-", name).lower()) is not None


def labels_shown(labels: Mapping[str, str]) -> dict[str, str]:
    """Give labels without the values of those that are secrets by their names."""
    return {name: HIDDEN if is_secret(name) else text for name, text in labels.items()}
