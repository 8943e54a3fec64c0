"""What `/metrics` of a real scheduler and a real worker tell, scraped over HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from distributed import LocalCluster
from prometheus_client.parser import text_string_to_metric_families

import tensorcast_dask as tc
from tensorcast_dask.metrics.families import OF_WORKERS
from tensorcast_dask.version import __version__
from tests.kit.local import local_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        TemporaryDirectory(prefix="tc-", dir="/tmp") as folder,  # short, for sockets
        local_cluster(Path(folder) / "run", n_workers=2) as cluster,
    ):
        yield cluster


def scrape(address: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        sample.name: {
            frozenset(one.labels.items()): one.value
            for one in family.samples
            if one.name == sample.name
        }
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tensorcast_")
    }


def test_a_scrape_agrees_with_what_the_catalog_says_of_itself(
    cluster: LocalCluster,
) -> None:
    with tc.connect(cluster) as cast:
        cast.put({"x": np.arange(1000)}, "first")
        cast.put({"x": np.arange(1000)}, "second")
        cast.destroy("second")
        scheduler = cluster.scheduler
        assert scheduler is not None
        told = scrape(f"http://127.0.0.1:{scheduler.http_server.port}")
        state = cast.debug_state()["catalog"]
        for name in ("artifacts", "versions", "replicas", "sessions", "epoch"):
            (value,) = told[f"tensorcast_{name}"].values()
            assert value == state[name], name
        assert list(told["tensorcast_node_up"].values()) == [1, 1]
        names = {dict(labels)["node"] for labels in told["tensorcast_node_up"]}
        assert names == {worker.name for worker in cast.workers()}
        events = {
            dict(labels)["event"]: value
            for labels, value in told["tensorcast_events_total"].items()
        }
        assert events["created"] == 2
        assert events["destroyed"] == 1
        (about,) = told["tensorcast_info"]
        assert about == {("cluster", state["cluster"]), ("version", __version__)}


def test_a_worker_tells_of_its_store(cluster: LocalCluster) -> None:
    worker = next(iter(cluster.workers.values()))
    told = scrape(f"http://{worker.ip}:{worker.http_server.port}")
    # Workers in one process share the registry: each is told by its name.
    assert told["tensorcast_worker_store_up"] == {
        frozenset({("worker", str(name))}): 1 for name in cluster.workers
    }
    assert {name.removesuffix("_total") for name in told} >= {
        family.name.removesuffix("_total") for family in OF_WORKERS
    }
