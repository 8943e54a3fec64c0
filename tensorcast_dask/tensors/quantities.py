"""Quantities as people write them: bytes, seconds, ports.

Rule: each function raises ValueError with the end of a sentence ("takes ...") whose
beginning the caller knows (which setting, which option).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

__all__ = [
    "BYTE_UNITS",
    "SECOND_UNITS",
    "human_bytes",
    "parse_bytes",
    "parse_ports",
    "parse_quantity",
    "parse_seconds",
]

BYTE_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
}
SECOND_UNITS: Final = {
    "": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
}
_WRITTEN: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_QUANTITY: Final = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*")


def parse_quantity(value: object, units: Mapping[str, float], example: str) -> float:
    """Read a number with a unit; raises ValueError that says what would do."""
    problem = f"takes a quantity such as {example!r}, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(problem)  # noqa: TRY004
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value.lower())
        if found is None or found[2] not in units:
            raise ValueError(problem)
        value = float(found[1]) * units[found[2]]
    if not math.isfinite(value) or value < 0:
        raise ValueError(problem)
    return float(value)


def parse_bytes(value: object) -> int:
    """Read a number of bytes: 1024, "1 KiB", "2GB".

    Raises
    ------
    ValueError
        When it is none.
    """
    return round(parse_quantity(value, BYTE_UNITS, "512 MiB"))


def parse_seconds(value: object) -> float:
    """Read a duration: 0.5, "500ms", "2 minutes".

    Raises
    ------
    ValueError
        When it is none, or zero.
    """
    seconds = parse_quantity(value, SECOND_UNITS, "30s")
    if seconds == 0:
        message = "takes a duration above zero"
        raise ValueError(message)
    return seconds


def parse_ports(value: object) -> tuple[int, int]:
    """Read a port or a range of ports: 0, 9100, "9100-9110"."""
    text = str(value).strip()
    low, _, high = text.partition("-")
    if (
        isinstance(value, bool)
        or not low.isdecimal()
        or (high and not high.isdecimal())
    ):
        message = f'takes a port, a range "9100-9110" or 0, not {value!r}'
        raise ValueError(message)
    ports = int(low), int(high or low)
    if not 0 <= ports[0] <= ports[1] <= 65535:
        message = f"takes ports from 0 to 65535, lowest first, not {value!r}"
        raise ValueError(message)
    return ports


def human_bytes(nbytes: float) -> str:
    """Give a byte count as people read it."""
    for unit in _WRITTEN:
        if nbytes < 1024 or unit == _WRITTEN[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable: the last unit always answers")  # noqa: EM101
