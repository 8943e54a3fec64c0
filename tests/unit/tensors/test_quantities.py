"""Quantities as people write them."""

from __future__ import annotations

import math

import pytest

from tensorcast_dask.tensors.quantities import parse_bytes, parse_ports, parse_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1024, 1024),
        ("2048", 2048),
        ("1 KiB", 1024),
        ("1.5MiB", 3 << 19),
        ("2 GB", 2_000_000_000),
        ("1e3", 1000),
        (0, 0),
    ],
)
def test_bytes_are_read_as_people_write_them(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "wrong", [None, True, -1, "-2", "1 XB", "", math.nan, math.inf, []]
)
def test_what_is_no_number_of_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="takes a quantity"):
        parse_bytes(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2 minutes", 120.0), (3, 3.0), ("1h", 3600.0)],
)
def test_durations_are_read_with_their_unit(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


def test_a_duration_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        parse_seconds("0s")


@pytest.mark.parametrize(
    ("text", "ports"),
    [(0, (0, 0)), ("9100", (9100, 9100)), ("9100-9110", (9100, 9110))],
)
def test_ports_are_one_or_a_range(text: object, ports: tuple[int, int]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize("wrong", [None, True, "a", "9110-9100", "70000", -1])
def test_what_is_no_port_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="takes"):
        parse_ports(wrong)
