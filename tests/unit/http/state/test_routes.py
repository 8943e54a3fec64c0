"""What can be asked."""

from __future__ import annotations

import pytest

from tensorcast_dask.http.state.access import Need
from tensorcast_dask.http.state.routes import ROUTES, Asked, find
from tensorcast_dask.http.state.statuses import RefusedError


def refused(method: str, path: str, query: str = "") -> int:
    with pytest.raises(RefusedError) as failure:
        find(method, path, query)
    return failure.value.status


def test_what_acts_or_gives_bytes_needs_the_token() -> None:
    assert {r.name: r.need for r in ROUTES if r.need is not Need.LOOK} == {
        "read_tensor": Need.BYTES,
        "submit_plan": Need.ACT,
        "cancel_plan": Need.ACT,
    }
    assert all(r.need is Need.ACT for r in ROUTES if r.method != "GET")


@pytest.mark.parametrize(
    ("path", "name", "parts"),
    [
        ("/v1/artifacts", "list_artifacts", {}),
        ("/v1/artifacts/toy%2Fweights", "show_artifact", {"id": "toy/weights"}),
        ("/v1/artifacts/%C3%A9", "show_artifact", {"id": "\u00e9"}),
        ("/v1/artifacts/a%252F", "show_artifact", {"id": "a%2F"}),
        ("/v1/artifacts/..", "show_artifact", {"id": ".."}),
        (
            "/v1/artifacts/a/tensors/l.0%2Fw",
            "read_tensor",
            {"id": "a", "name": "l.0/w"},
        ),
        ("/v1/signals/stream", "watch_signals", {}),
        ("/v1/plans/roll-out/stream", "watch_plan", {"key": "roll-out"}),
    ],
)
def test_a_path_says_what_is_asked(path: str, name: str, parts: dict[str, str]) -> None:
    asked = find("GET", path, "")
    assert (asked.route.name, asked.path) == (name, parts)


def test_what_is_not_there_is_told_from_what_is_asked_wrongly() -> None:
    assert refused("GET", "/") == refused("GET", "/v2/artifacts") == 404
    assert (
        refused("GET", "/v1/artifacts/") == refused("GET", "/v1/artifacts/a/b") == 404
    )
    assert refused("POST", "/v1/artifacts") == refused("DELETE", "/v1/nodes") == 405
    assert refused("GET", "/v1/plans/k/cancel") == 405
    assert refused("GET", "/v1/artifacts/%FF") == 400
    assert find("HEAD", "/v1/nodes", "").route.name == "list_nodes"
    assert find("POST", "/v1/plans", "").route.name == "submit_plan"


def query(text: str) -> Asked:
    return find("GET", "/v1/artifacts", text)


def test_a_query_is_read_by_its_kinds_and_filled_with_defaults() -> None:
    asked = query("label=a%3Db&label=c%3Dd&limit=7&all_versions=true&prefix=a+b")
    assert asked.query == {
        "limit": 7,
        "all_versions": True,
        "prefix": "a b",
        "after": "",
    }
    assert asked.lists == {"label": ("a=b", "c=d")}
    assert (asked.whole("limit"), asked.text("prefix")) == (7, "a b")
    assert query("").query["limit"] == 100
    plain = find("GET", "/v1/artifacts/a", "")
    assert plain.whole("version") is None
    assert find("GET", "/v1/plans/k", "wait=1.5").number("wait") == 1.5


@pytest.mark.parametrize(
    "text",
    [
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=1.5",
        "limit=",
        "limit=x",
        "limit=\u0661",
        "limit=1&limit=2",
        "all_versions=1",
        "unknown=1",
        "token=secret",
        "prefix=%FF",
        "&".join(["label=a%3Db"] * 65),
    ],
)
def test_a_query_that_cannot_be_meant_is_refused(text: str) -> None:
    assert refused("GET", "/v1/artifacts", text) == 400


def test_numbers_stay_within_their_bounds() -> None:
    for text in ("wait=-1", "wait=61", "wait=nan", "wait=inf", "wait=1e1"):
        assert refused("GET", "/v1/plans/k", text) == 400
