"""Who may ask for what."""

from __future__ import annotations

import pytest

from tensorcast_dask.http.state.access import Asker, Need, is_loopback, refusal

TOKEN = "t" * 32


def status(need: Need = Need.LOOK, **facts: object) -> int:
    asker = Asker(**({"peer": "127.0.0.1", "host": "127.0.0.1:8787"} | facts))  # type: ignore[arg-type]
    refused = refusal(asker, need, TOKEN)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize("need", list(Need))
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7", "fd00::7", ""])
def test_the_token_opens_everything_from_everywhere(need: Need, peer: str) -> None:
    for word in ("Bearer", "bearer", "BEARER"):
        assert status(need, peer=peer, authorization=f"{word} {TOKEN}") == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        f"Bearer x {TOKEN}",
        "Bearer \u00e9",
    ],
)
@pytest.mark.parametrize("need", list(Need))
def test_another_token_opens_nothing_not_even_a_look(need: Need, header: str) -> None:
    assert status(need, authorization=header) == 401


def test_without_a_token_only_a_look_is_answered_and_only_on_the_loopback() -> None:
    assert status(Need.LOOK) == 200
    assert status(Need.LOOK, peer="::1", host="[::1]:8787") == 200
    assert status(Need.BYTES) == status(Need.ACT) == 401
    for peer in ("10.0.0.7", "192.168.0.1", "fd00::7", "", "128.0.0.1"):
        assert status(Need.LOOK, peer=peer) == 401


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LocalHost.:80", 200),
        ("127.0.0.1", 200),
        ("127.9.9.9:1", 200),
        ("[::1]", 200),
        ("[::1]:8787", 200),
        ("", 403),
        ("rebound.example", 403),
        ("rebound.example:8787", 403),
        ("localhost.rebound.example", 403),
        ("127.0.0.1.rebound.example", 403),
        ("127.0.0.1:8787.rebound.example", 403),
        ("127.0.0.1@rebound.example", 403),
        ("0.0.0.0", 403),
        ("10.0.0.7:8787", 403),
        ("[::2]:1", 403),
    ],
)
def test_a_name_that_was_bent_to_the_loopback_is_refused(
    host: str, expected: int
) -> None:
    assert status(Need.LOOK, host=host) == expected


@pytest.mark.parametrize("need", list(Need))
@pytest.mark.parametrize(
    "facts",
    [
        {"origin": "http://page.example"},
        {"origin": "https://127.0.0.1:9999"},
        {"origin": "null"},
        {"origin": "file://"},
        {"site": "cross-site"},
        {"site": "same-site"},
    ],
)
def test_a_page_of_somebody_else_is_refused_whatever_token_it_has(
    need: Need, facts: dict[str, str]
) -> None:
    assert status(need, **facts) == 403
    assert status(need, authorization=f"Bearer {TOKEN}", **facts) == 403


def test_a_page_of_the_same_origin_and_an_address_that_was_typed_may_look() -> None:
    assert status(origin="http://127.0.0.1:8787", site="same-origin") == 200
    assert status(site="none") == 200


def test_who_speaks_for_another_is_not_the_loopback() -> None:
    assert status(forwarded=True) == 401
    assert status(forwarded=True, authorization=f"Bearer {TOKEN}") == 200


def test_addresses_of_the_loopback_are_known_in_each_spelling() -> None:
    for yes in ("127.0.0.1", "127.255.0.9", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(yes)
    for no in ("", "127.0.0", "127.0.0.x", "1.127.0.0", "::2", "localhost"):
        assert not is_loopback(no)
