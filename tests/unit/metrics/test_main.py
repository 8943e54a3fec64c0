"""Who is told of in the registry that Dask's endpoints show, and until when."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import REGISTRY

from tensorcast_dask.metrics.main import tell, tell_of_worker
from tests.kit.catalogs import Desk

SCHEDULER: Any = None


def clusters(name: str = "tensorcast_info") -> set[str]:
    return {
        sample.labels.get("cluster", "")
        for family in REGISTRY.collect()
        if family.name == name
        for sample in family.samples
    }


def test_catalogs_of_one_process_are_told_side_by_side_each_until_its_end() -> None:
    first, second = Desk().catalog, Desk().catalog
    second.cluster = type(second.cluster)("another")
    end_first = tell(SCHEDULER, lambda: first)
    end_second = tell(SCHEDULER, lambda: second)
    end_third = tell(SCHEDULER, lambda: None)
    assert clusters() == clusters("tensorcast_epoch") == {first.cluster, "another"}
    end_first()
    assert clusters() == {"another"}
    assert clusters("tensorcast_epoch") == {""}
    assert REGISTRY.get_sample_value("tensorcast_sessions") == 0
    end_second()
    end_third()
    assert "tensorcast_info" not in {family.name for family in REGISTRY.collect()}


def test_a_catalog_is_read_in_its_own_thread_only() -> None:
    catalog = Desk().catalog
    ends: list[Any] = []
    other = threading.Thread(
        target=lambda: ends.append(tell(SCHEDULER, lambda: catalog))
    )
    other.start()
    other.join(20)
    assert clusters() == set()
    ends[0]()


def test_workers_of_one_process_are_told_by_their_names() -> None:
    class Named:
        name = 3

    worker: Any = Named()
    said = {"node": "n", "mapping": False, "adoptions": 2, "failures": 1}
    end = tell_of_worker(worker, lambda: said)
    assert REGISTRY.get_sample_value("tensorcast_worker_store_up", {"worker": "3"}) == 1
    adoptions = "tensorcast_worker_adoptions_total"
    assert REGISTRY.get_sample_value(adoptions, {"worker": "3"}) == 2
    end()
    assert REGISTRY.get_sample_value(adoptions, {"worker": "3"}) is None
