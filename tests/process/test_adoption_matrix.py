"""Who adopts which store, after every way in which a worker or a scheduler can go.

The table of what adopted what, and what was left, is `docs/adoption.md`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from tensorcast_dask.tensors.messages import NodeCard, NodeState
from tests.kit.baseline import no_lease_lost
from tests.kit.clusters import Cluster, Process, stopped
from tests.kit.eventually import eventually, never
from tests.kit.local import local_cluster, stores_in
from tests.kit.tasks import keep_the_gil, keep_the_process, remove_all_workers

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines
RELEASED_S = 3.0
#: Long for a busy machine, and well before the end of an orphan (60 s).
SOON_S = RELEASED_S + 25
LEASE_S = 0.5
NAMED = pytest.mark.parametrize("name", ["", "w"], ids=["unnamed", "named"])
NANNY = pytest.mark.parametrize("nanny", [True, False], ids=["nanny", "no-nanny"])
SETTINGS = {
    "LEASE__TTL": f"{LEASE_S}s",
    "STORE__RELEASED_TTL": f"{RELEASED_S}s",
    "STORE__ORPHAN_TTL": "60s",
    "NODE__HOST_MEMORY": "64MiB",
    "MEMORY__RESERVE_MIN": "1MiB",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One scheduler for the tests that leave it alone."""
    with Cluster(tmp_path_factory.mktemp("c"), SETTINGS) as cluster:
        cluster.start_scheduler()
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The shared scheduler, without workers and stores before and after."""
    before = list(shared.processes)
    yield shared
    for process in shared.processes:
        if process not in before:
            process.end()
    for card in shared.stores():
        os.kill(card.pid, signal.SIGKILL)
    eventually(lambda: not shared.stores(), within_s=10, what="no store left")
    shared.wait_for_nodes(0)


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A scheduler of the test's own, to be killed."""
    with Cluster(tmp_path_factory.mktemp("c"), SETTINGS) as cluster:
        cluster.start_scheduler()
        yield cluster


def adopted_again(
    cluster: Cluster, before: NodeCard, *, within_s: float = 30
) -> NodeCard:
    """Wait until the store of `before` has another worker."""

    def there() -> NodeCard | None:
        for card in cluster.stores():
            if card.node == before.node and card.incarnation > before.incarnation:
                return card if card.worker else None
        return None

    try:
        found = eventually(there, within_s=within_s, what="the store has a new worker")
    except AssertionError as error:
        message = f"{error}\n{cluster.account(before)}"
        raise AssertionError(message) from None
    assert found is not None
    return found


def unattended(cluster: Cluster, before: NodeCard) -> None:
    """Wait until the store of `before` lives on without a worker."""

    def there() -> bool:
        return any(c.node == before.node and not c.worker for c in cluster.stores())

    eventually(there, within_s=15, what="the store is unattended")


def gone(cluster: Cluster, before: NodeCard, *, within_s: float) -> None:
    """Wait until the store of `before` has ended; else show what it says of itself."""
    try:
        eventually(
            lambda: before.node not in {card.node for card in cluster.stores()},
            within_s=within_s,
            what="the store has ended",
        )
    except AssertionError as error:
        message = f"{error}\n{cluster.account(before)}"
        raise AssertionError(message) from None


def oom_score(pid: int) -> int:
    """How much likelier than others the kernel takes a process when memory runs out."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def one_worker(cluster: Cluster, *, name: str, nanny: bool) -> tuple[Process, NodeCard]:
    process = cluster.start_worker(name=name, nanny=nanny)
    (card,) = cluster.wait_for_stores(1)
    cluster.wait_for_workers(1)
    return process, card


# ------------------------------------------------------------------ one worker, one store
@NAMED
def test_a_killed_workers_successor_under_its_nanny_adopts_its_store(
    cluster: Cluster, name: str
) -> None:
    nanny, card = one_worker(cluster, name=name, nanny=True)
    os.kill(nanny.worker_pid(), signal.SIGKILL)
    again = adopted_again(cluster, card)
    assert (again.name == "w") == (name == "w")
    assert len(cluster.stores()) == 1
    cluster.wait_for_nodes(1, attended=1)


@NAMED
def test_a_killed_worker_without_nanny_leaves_a_store_for_the_next_one(
    cluster: Cluster, name: str
) -> None:
    worker, card = one_worker(cluster, name=name, nanny=False)
    worker.kill()
    unattended(cluster, card)
    cluster.wait_for_nodes(1, attended=0)
    cluster.start_worker(name="other", nanny=False)
    assert adopted_again(cluster, card).name == "other"
    cluster.wait_for_nodes(1, attended=1)


def test_a_store_that_was_left_is_adopted_before_its_former_workers_process_ends(
    own: Cluster,
) -> None:
    """A worker that lost its scheduler closes at once, and its process when it can."""
    worker, card = one_worker(own, name="a", nanny=False)
    with Client(own.address) as client:
        client.run(keep_the_process, 60)
    own.scheduler.kill()
    own.scheduler.wait()
    unattended(own, card)
    own.start_scheduler()
    own.start_worker(name="b", nanny=False)
    assert adopted_again(own, card).name == "b"
    assert worker.alive


@NAMED
@pytest.mark.parametrize("both", [False, True], ids=["nanny", "both"])
def test_a_killed_nanny_takes_its_worker_along_and_leaves_the_store(
    cluster: Cluster, both: bool, name: str
) -> None:
    nanny, card = one_worker(cluster, name=name, nanny=True)
    pid = nanny.worker_pid()
    nanny.kill()
    if both:
        os.kill(pid, signal.SIGKILL)
    unattended(cluster, card)
    cluster.start_worker(name=name, nanny=False)
    adopted_again(cluster, card)


@NAMED
@NANNY
def test_an_interrupted_worker_releases_its_store_which_ends_in_time(
    cluster: Cluster, nanny: bool, name: str
) -> None:
    worker, card = one_worker(cluster, name=name, nanny=nanny)
    worker.kill(signal.SIGINT)
    worker.wait()
    gone(cluster, card, within_s=SOON_S)
    cluster.wait_for_nodes(0)


def test_a_worker_that_is_interrupted_while_it_starts_releases_its_store_too(
    cluster: Cluster,
) -> None:
    worker = cluster.start_worker(name="w", nanny=False)
    (card,) = cluster.wait_for_stores(1, attended=False)
    with stopped(cluster.scheduler.pid):  # the worker waits for the catalog's word
        eventually(lambda: [one for one in cluster.stores() if one.worker], within_s=20)
        worker.kill(signal.SIGINT)
        worker.wait()
    gone(cluster, card, within_s=SOON_S)
    cluster.wait_for_nodes(0)


def test_a_released_store_is_adopted_by_whoever_comes_in_time(cluster: Cluster) -> None:
    worker, card = one_worker(cluster, name="w", nanny=False)
    next_one = cluster.start_worker(name="next", nanny=False)
    (other,) = [c for c in cluster.wait_for_stores(2) if c.node != card.node]
    worker.kill(signal.SIGINT)
    worker.wait()
    next_one.kill()
    cluster.start_worker(name="third", nanny=False)
    eventually(
        lambda: [c.name for c in cluster.stores() if c.worker] == ["third"], within_s=20
    )
    assert {c.node for c in cluster.stores()} <= {card.node, other.node}


@NAMED
@NANNY
def test_a_retired_workers_store_ends(cluster: Cluster, nanny: bool, name: str) -> None:
    _, first = one_worker(cluster, name=name, nanny=nanny)
    cluster.start_worker(name="b", nanny=nanny)
    cluster.wait_for_nodes(2, attended=2)
    with Client(cluster.address) as client:
        client.retire_workers([first.worker])
    gone(cluster, first, within_s=10)
    (left,) = cluster.wait_for_nodes(1, attended=1)
    assert left.card.name == "b"


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_restarting_workers_keeps_each_store(cluster: Cluster, named: bool) -> None:
    for name in ("a", "b", "c"):
        cluster.start_worker(name=name if named else "")
    before = {card.node: card for card in cluster.wait_for_stores(3)}
    cluster.wait_for_workers(3)
    with Client(cluster.address) as client:
        client.restart()
    for card in before.values():
        adopted_again(cluster, card)
    assert {card.node for card in cluster.wait_for_stores(3)} == set(before)


def test_a_worker_that_goes_soon_after_a_restart_releases_its_store_as_ever(
    cluster: Cluster,
) -> None:
    nanny, card = one_worker(cluster, name="w", nanny=True)
    with Client(cluster.address) as client:
        client.restart()
    again = adopted_again(cluster, card)
    cluster.wait_for_nodes(1, attended=1)
    nanny.kill(signal.SIGINT)
    nanny.wait()
    gone(cluster, again, within_s=SOON_S)


def test_three_killed_workers_share_their_stores_out_again(cluster: Cluster) -> None:
    nannies = [cluster.start_worker() for _ in range(3)]
    before = {card.node: card for card in cluster.wait_for_stores(3)}
    cluster.wait_for_workers(3)
    for pid in [nanny.worker_pid() for nanny in nannies]:
        os.kill(pid, signal.SIGKILL)
    for card in before.values():
        adopted_again(cluster, card)
    after = cluster.wait_for_stores(3)
    assert {card.node for card in after} == set(before)
    assert len({card.worker for card in after}) == 3


def test_what_befalls_one_worker_of_three_befalls_its_store_alone(
    cluster: Cluster,
) -> None:
    """The rest of the table with three workers on the host, one misfortune after the other."""
    nannies = {name: cluster.start_worker(name=name) for name in ("a", "b", "c")}
    before = {card.name: card for card in cluster.wait_for_stores(3)}
    cluster.wait_for_workers(3)
    cluster.wait_for_nodes(3, attended=3)

    def others_kept(*names: str) -> None:
        now = {card.node: card for card in cluster.stores()}
        for name in names:
            kept = now[before[name].node]
            assert (kept.incarnation, kept.name) == (before[name].incarnation, name)

    # Its nanny is killed, then nanny and worker at once: the next worker has its store.
    for both, heir in ((False, "a2"), (True, "a3")):
        pid = nannies["a"].worker_pid()
        nannies["a"].kill()
        if both:
            os.kill(pid, signal.SIGKILL)
        unattended(cluster, before["a"])
        nannies["a"] = cluster.start_worker(name=heir)
        before["a"] = adopted_again(cluster, before["a"])
        assert before["a"].name == heir
        others_kept("b", "c")
    cluster.wait_for_workers(3)
    # It stands still for longer than its lease: nothing.
    nodes = cluster.wait_for_nodes(3, attended=3)
    with Client(cluster.address) as client, no_lease_lost(client, nodes):
        with stopped(nannies["b"].worker_pid()):
            never(lambda: len(cluster.nodes()) != 3, for_s=3 * LEASE_S)
        others_kept("b", "c")
        # It is retired: its store ends.
        client.retire_workers([before["b"].worker])
    gone(cluster, before["b"], within_s=20)
    others_kept("c")
    # It is interrupted: its store goes in its time.
    nannies["c"].kill(signal.SIGINT)
    nannies["c"].wait()
    gone(cluster, before["c"], within_s=SOON_S)
    (left,) = cluster.wait_for_nodes(1, attended=1)
    assert left.card.node == before["a"].node


def test_scaling_nannies_down_to_one_leaves_one_store(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run_dir = tmp_path_factory.mktemp("c") / "r"
    with local_cluster(run_dir, n_workers=3, processes=True) as cluster:
        eventually(
            lambda: sum(bool(card.worker) for card in stores_in(run_dir)) == 3,
            within_s=90,
            what="three attended stores",
        )
        before = {card.node for card in stores_in(run_dir)}
        with Client(cluster) as client:
            cluster.scale(1)
            eventually(lambda: len(stores_in(run_dir)) == 1, within_s=60)
            (left,) = stores_in(run_dir)
            assert left.worker
            told = [event for _, event in client.get_events("tensorcast")]
        ended = {one["node"] for one in told if one.get("topic") == "node_ended"}
        assert ended == before - {left.node}


def test_restarting_leaves_the_store_of_a_worker_without_nanny_for_the_next(
    cluster: Cluster,
) -> None:
    """Dask has nobody to start such a worker again: it ends it, and its store is for the next."""
    worker, card = one_worker(cluster, name="w", nanny=False)
    with Client(cluster.address) as client:
        client.restart(wait_for_workers=False)
    worker.wait(60)
    unattended(cluster, card)
    cluster.start_worker(name="next", nanny=False)
    assert adopted_again(cluster, card).name == "next"


@NAMED
def test_of_two_workers_that_race_for_one_orphan_one_adopts_it(
    cluster: Cluster, name: str
) -> None:
    worker, card = one_worker(cluster, name=name, nanny=False)
    worker.kill()
    unattended(cluster, card)
    cluster.start_worker(name="left", nanny=False)
    cluster.start_worker(name="right", nanny=False)
    after = cluster.wait_for_stores(2)
    assert {c.name for c in after} == {"left", "right"}
    (heir,) = [c for c in after if c.node == card.node]
    assert heir.incarnation == card.incarnation + 1


@NAMED
def test_a_stopped_worker_that_was_replaced_is_refused_when_it_runs_again(
    cluster: Cluster, name: str
) -> None:
    first, card = one_worker(cluster, name=name, nanny=False)
    with stopped(first.pid), Client(cluster.address) as client:
        # A stopped process keeps its sockets: Dask learns of it by its own ways only.
        client.run_on_scheduler(remove_all_workers)
        cluster.start_worker(name="heir", nanny=False)
        heir = adopted_again(cluster, card)
        assert heir.name == "heir"
    eventually(lambda: not first.alive, within_s=20, what="the former worker has ended")
    (now,) = [c for c in cluster.stores() if c.node == card.node]
    assert (now.incarnation, now.name) == (heir.incarnation, "heir")
    cluster.wait_for_nodes(1, attended=1)


@pytest.mark.slow  # the time must be long for a worker that only starts slowly
@NANNY
def test_a_stopped_worker_that_dask_itself_removes_is_replaced(
    tmp_path_factory: pytest.TempPathFactory, nanny: bool
) -> None:
    """By `scheduler.worker-ttl`; a nanny then kills the worker and starts another."""
    with Cluster(tmp_path_factory.mktemp("c"), SETTINGS) as cluster:
        cluster.start_scheduler({"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "15s"})
        first, card = one_worker(cluster, name="w", nanny=nanny)
        with stopped(first.worker_pid() if nanny else first.pid):
            with Client(cluster.address) as client:
                eventually(
                    lambda: card.worker not in client.scheduler_info()["workers"],
                    within_s=60,
                    what="Dask has removed the worker",
                )
            if not nanny:
                cluster.start_worker(name="heir", nanny=False)
            heir = adopted_again(cluster, card)
        if not nanny:
            eventually(lambda: not first.alive, within_s=20, what="it has ended")
        (now,) = cluster.stores()
        assert (now.node, now.incarnation) == (card.node, heir.incarnation)
        cluster.wait_for_nodes(1, attended=1)


def test_a_worker_that_stands_still_for_long_keeps_its_store_and_its_lease(
    cluster: Cluster,
) -> None:
    worker, card = one_worker(cluster, name="w", nanny=False)
    cluster.wait_for_nodes(1, attended=1)
    with stopped(worker.pid):
        never(lambda: [n.attended for n in cluster.nodes()] != [True], for_s=2)
    (now,) = cluster.stores()
    assert (now.node, now.incarnation) == (card.node, card.incarnation)


def test_a_scheduler_that_stood_still_finds_no_lease_lapsed(cluster: Cluster) -> None:
    _, card = one_worker(cluster, name="w", nanny=False)
    nodes = cluster.wait_for_nodes(1, attended=1)
    with Client(cluster.address) as client, no_lease_lost(client, nodes):
        with stopped(cluster.scheduler.pid):
            never(lambda: not cluster.stores(), for_s=4 * LEASE_S)
        (after,) = cluster.wait_for_nodes(1, attended=1)
        assert after.card.incarnation == card.incarnation


@NAMED
@NANNY
def test_a_store_that_dies_is_replaced_under_the_same_worker(
    cluster: Cluster, nanny: bool, name: str
) -> None:
    worker, card = one_worker(cluster, name=name, nanny=nanny)
    pid = worker.worker_pid() if nanny else worker.pid
    score = oom_score(card.pid)
    os.kill(card.pid, signal.SIGKILL)

    def replaced() -> bool:
        after = [c for c in cluster.stores() if c.node != card.node]
        return [c.worker for c in after] == [card.worker]

    eventually(replaced, within_s=20, what="another store")

    def listed() -> NodeState | None:
        (node,) = cluster.wait_for_nodes(1, attended=1)
        return node if node.card.node != card.node else None

    node = eventually(listed, within_s=20, what="the catalog knows the new store")
    assert node is not None
    assert oom_score(node.card.pid) == score < oom_score(pid)


def test_a_call_that_keeps_the_gil_for_seconds_loses_no_short_lease(
    cluster: Cluster,
) -> None:
    one_worker(cluster, name="w", nanny=False)
    nodes = cluster.wait_for_nodes(1, attended=1)
    with Client(cluster.address) as client, no_lease_lost(client, nodes):
        future = client.submit(keep_the_gil, 3, pure=False)
        assert future.result(timeout=30) is True


# ------------------------------------------------------------------ the scheduler
def test_stores_outlive_a_killed_scheduler_and_are_linked_again_without_a_worker(
    own: Cluster,
) -> None:
    workers = [
        own.start_worker(),
        own.start_worker(name="b", nanny=False),
        own.start_worker(name="c", nanny=False),
    ]
    before = {card.node: card for card in own.wait_for_stores(3)}
    own.wait_for_nodes(3, attended=3)
    own.scheduler.kill()
    for worker in workers:
        worker.end()
    for card in before.values():
        unattended(own, card)
    own.start_scheduler()
    found = own.wait_for_nodes(3, attended=0)
    assert {node.card.node for node in found} == set(before)
    own.start_worker(name="a")
    own.wait_for_nodes(3, attended=1)
    assert {card.node for card in own.stores()} == set(before)


def test_a_named_cluster_finds_its_stores_from_another_port(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Cluster(
        tmp_path_factory.mktemp("c"), SETTINGS | {"CLUSTER": "ours"}
    ) as cluster:
        cluster.start_scheduler()
        worker, before = one_worker(cluster, name="a", nanny=False)
        cluster.wait_for_nodes(1, attended=1)
        cluster.scheduler.kill()
        worker.end()
        cluster.move()
        cluster.start_scheduler()
        cluster.wait_for_nodes(1, attended=0)
        cluster.start_worker(name="b", nanny=False)
        assert adopted_again(cluster, before).name == "b"
        cluster.wait_for_nodes(1, attended=1)


def test_a_scheduler_that_stops_cleanly_ends_the_stores(own: Cluster) -> None:
    own.start_worker(name="a")
    own.wait_for_nodes(1, attended=1)
    own.scheduler.kill(signal.SIGINT)
    own.scheduler.wait()
    eventually(lambda: not own.stores(), within_s=5, what="no store left")
