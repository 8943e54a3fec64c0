"""What a request may say, checked before anything is looked up or changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tensorcast_dask.exceptions import InvalidArgument, InvalidName
from tensorcast_dask.tensors.ids import MAX_NAME_BYTES, check_name

__all__ = ["check_count", "check_labels", "check_name", "check_seconds", "check_size"]

MAX_BYTES: Final = 1 << 62
MAX_LABELS: Final = 64
#: Longer than any run of a scheduler; keeps sums of times finite.
MAX_S: Final = 1e9


def check_seconds(value_s: float, *, what: str) -> float:
    """Return a duration that is not negative or NaN; infinity becomes very long.

    Raises
    ------
    InvalidArgument
        When it is not.
    """
    if math.isnan(value_s) or value_s < 0:
        message = f"{what} must be 0 or more seconds, not {value_s}"
        raise InvalidArgument(message)
    return min(value_s, MAX_S)


def check_size(nbytes: int, *, what: str) -> int:
    """Return a number of bytes that can be.

    Raises
    ------
    InvalidArgument
        When it is negative or absurd.
    """
    if not 0 <= nbytes <= MAX_BYTES:
        message = f"{what} must be 0 to {MAX_BYTES} bytes, not {nbytes}"
        raise InvalidArgument(message)
    return nbytes


def check_count(value: int, *, least: int, most: int, what: str) -> int:
    """Return a number that lies in a range.

    Raises
    ------
    InvalidArgument
        When it is outside.
    """
    if not least <= value <= most:
        message = f"{what} must be {least} to {most}, not {value}"
        raise InvalidArgument(message)
    return value


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels that are legal: few, with legal keys and short values.

    Raises
    ------
    InvalidName, InvalidArgument
        When they are not.
    """
    check_count(len(labels), least=0, most=MAX_LABELS, what="the number of labels")
    for key, value in labels.items():
        check_name(key, what="label")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError as error:
            message = f"the value of label {key!r} is not valid Unicode text"
            raise InvalidName(message) from error
        if size_bytes > MAX_NAME_BYTES:
            message = (
                f"the value of label {key!r} takes more than {MAX_NAME_BYTES} bytes"
            )
            raise InvalidName(message)
    return labels
