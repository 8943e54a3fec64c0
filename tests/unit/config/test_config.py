"""Settings: sources, precedence, refusals."""

from __future__ import annotations

import pickle
from pathlib import Path

import dask.config
import pytest
import yaml

from tensorcast_dask import config
from tensorcast_dask.config import Settings, hosts_own, local_tree, merged
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.ids import HostId

HERE = Path(config.__file__).parent


def keys_of(tree: object, prefix: str = "") -> set[str]:
    if not isinstance(tree, dict) or prefix == "node.labels.":
        return {prefix.rstrip(".")}
    return {
        key for name, sub in tree.items() for key in keys_of(sub, f"{prefix}{name}.")
    }


def test_every_setting_has_a_default_and_stands_in_the_schema() -> None:
    defaults = yaml.safe_load((HERE / "tensorcast.yaml").read_text())["tensorcast"]
    schema = yaml.safe_load((HERE / "tensorcast-schema.yaml").read_text())

    def described(node: dict[str, object], prefix: str = "") -> set[str]:
        properties = node.get("properties")
        if not isinstance(properties, dict):
            assert node.get("description"), prefix
            return {prefix.rstrip(".")}
        return {
            k
            for name, sub in properties.items()
            for k in described(sub, f"{prefix}{name}.")
        }

    assert keys_of(defaults) == set(config._READERS)
    assert described(schema["properties"]["tensorcast"]) == set(config._READERS)


def test_the_page_of_settings_lists_each_of_them() -> None:
    page = (HERE.parent / "docs" / "settings.md").read_text()
    listed = [
        line.split("`")[1] for line in page.splitlines() if line.startswith("| `")
    ]
    assert listed == list(config._READERS)


def test_the_defaults_are_a_frozen_whole_that_can_be_sent() -> None:
    settings = Settings.of({})
    assert settings.lease_ttl_s == 5.0
    assert settings.node.host_memory is None
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(AttributeError):
        settings.lease_ttl_s = 1.0  # type: ignore[misc]


def test_arguments_win_over_the_environment_and_that_over_dask_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with dask.config.set(
        {"tensorcast.lease.ttl": "1s", "tensorcast.drain.timeout": "9s"}
    ):
        assert Settings.read().lease_ttl_s == 1.0
        monkeypatch.setenv("TENSORCAST_LEASE__TTL", "2s")
        assert Settings.read().lease_ttl_s == 2.0
        assert Settings.read({"lease": {"ttl": "3s"}}).lease_ttl_s == 3.0
        assert Settings.read({"lease": {"ttl": "3s"}}).drain_timeout_s == 9.0


def test_keys_may_be_written_with_either_dash() -> None:
    assert Settings.of({"node": {"host_memory": "1 GiB"}}).node.host_memory == 1 << 30
    assert Settings.of({"node": {"host-memory": 0.25}}).node.host_memory == 0.25


def test_a_variable_of_another_room_or_a_strange_one_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TENSORCAST_FAULTS", "x=kill")
    monkeypatch.setenv("TENSORCAST_LEESE__TTL", "2s")
    monkeypatch.setenv("TENSORCAST_RUN_DIR", "/somewhere")
    tree = local_tree()
    assert tree["run-dir"] == "/somewhere"
    assert "faults" not in tree
    assert "TENSORCAST_LEESE__TTL" in caplog.text
    assert "FAULTS" not in caplog.text


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"leese": {"ttl": 1}}, r"did you mean tensorcast\.lease\.ttl"),
        ({"lease": {"ttl": 0}}, r"tensorcast\.lease\.ttl takes"),
        ({"lease": {"ttl": "0.1s"}}, r"at least 500ms"),
        ({"node": {"host-memory": -1}}, r"tensorcast\.node\.host-memory takes"),
        ({"node": {"host-memory": True}}, r"tensorcast\.node\.host-memory takes"),
        ({"on-close": "perhaps"}, r"end"),
        ({"journal": None}, r"tensorcast\.journal takes"),
        ({"link": {"ports": "9-8"}}, r"tensorcast\.link\.ports takes"),
        ({"transfer": {"connections": 0}}, r"at least 1"),
        ({"memory": {"reserve": 1.5}}, r"below 1"),
        ({"segment": {"own-bytes": "1 GiB"}}, r"slab-bytes"),
        ({"device": "rocm"}, r"tensorcast\.device takes"),
        ({"store": 3}, r"no setting tensorcast\.store"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    tree: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Settings.of(tree)


def test_a_host_decides_for_itself_what_is_its_own() -> None:
    own = {"node": {"disk-dir": "/d"}, "run-dir": "/r", "device": "cupy"}
    assert hosts_own({**own, "lease": {"ttl": 1}}) == own


def test_merging_keeps_what_a_later_tree_leaves_out() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    labels = merged({"node": {"labels": {"a": "1"}}}, {"node": {"labels": {"b": "2"}}})
    assert labels["node"]["labels"] == {"b": "2"}


@pytest.mark.parametrize(
    ("tree", "ends"),
    [
        ({}, True),
        ({"journal": ":memory:"}, True),
        ({"journal": "/j.duckdb"}, False),
        ({"journal": "/j.duckdb", "on-close": "end"}, True),
        ({"on-close": "keep"}, False),
    ],
)
def test_a_clean_stop_ends_stores_unless_it_is_a_planned_restart(
    tree: dict[str, object], ends: bool
) -> None:
    assert Settings.of(tree).ends_stores is ends


def test_a_store_is_told_its_part() -> None:
    settings = Settings.of({"node": {"labels": "zone=a", "data-host": "10.0.0.1"}})
    told = settings.for_store(
        host_memory_bytes=7, cluster_name="c", host=HostId("h"), data_host="127.0.0.1"
    )
    assert (told.host_memory_bytes, told.cluster_name, told.host) == (7, "c", "h")
    assert told.data_host == "10.0.0.1"
    assert told.labels == {"zone": "a"}
