from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tensorcast_dask.dataplane.auth import LINK, Answerer, server_tls
from tensorcast_dask.dataplane.framing import Frame, FrameStream
from tensorcast_dask.dataplane.link import Link, LinkCallbacks
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    Gone,
    InvalidArgument,
    Mismatch,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import ClusterId, Epoch, Generation
from tensorcast_dask.tensors.messages import (
    DoCancel,
    Fault,
    FromNode,
    Hello,
    Inventory,
    LinkRefused,
    LinkTarget,
    NodeHello,
    NodeWelcome,
    Proof,
    Renew,
    Renewed,
    ReplicaDropped,
    TaskProgress,
    TaskSeen,
    Tier,
    TlsFiles,
    ToNode,
)
from tests.kit.certificates import mint_certificates
from tests.kit.eventually import eventually
from tests.kit.holders import TOKEN, node_card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLUSTER = ClusterId("c")
WITHIN_S = 20.0


def progress(task: int) -> TaskProgress:
    return TaskProgress(task=task, done_bytes=0, total_bytes=1)


class Caller:
    """One accepted link, at the catalog's side."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream

    def hear(self) -> Any:
        frame: Frame[FromNode] = self.stream.receive(FromNode)  # type: ignore[arg-type]
        return frame.message

    def say(self, message: ToNode) -> None:
        self.stream.send(message)

    def welcome(self, ttl_s: float = 100.0) -> NodeHello:
        hello = self.hear()
        assert isinstance(hello, NodeHello)
        self.say(NodeWelcome(cluster=CLUSTER, epoch=Epoch(2), lease_ttl_s=ttl_s))
        return hello


class Catalog:
    """A listener that proves and asks for the token as the scheduler plugin does."""

    def __init__(self, token: bytes = TOKEN, tls: TlsFiles | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._token = token
        self._tls = server_tls(tls) if tls else None
        self.target = LinkTarget(
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            cluster=CLUSTER,
            token=TOKEN,
            epoch=Epoch(2),
            tls=tls,
        )
        self.callers: list[Caller] = []

    def accept(self, within_s: float = WITHIN_S) -> Caller:
        """Take the next link, after its proof."""
        self._listener.settimeout(within_s)
        sock, _ = self._listener.accept()
        sock.settimeout(WITHIN_S)
        if self._tls:
            sock = self._tls.wrap_socket(sock, server_side=True)
        caller = Caller(FrameStream(sock, stall_s=WITHIN_S))
        self.callers.append(caller)
        answerer = Answerer(token=self._token, purpose=LINK)
        hello = caller.hear()
        assert isinstance(hello, Hello)
        caller.stream.send(answerer.challenge(hello))
        proof = caller.hear()
        assert isinstance(proof, Proof)
        answerer.check(proof)
        return caller

    def close(self) -> None:
        self._listener.close()
        for caller in self.callers:
            caller.stream.close()


class Node:
    """A node's side: a link and what its callbacks were told."""

    def __init__(
        self,
        target: LinkTarget | None,
        *,
        renew: Callable[[int], Renew] | None = None,
        first: tuple[FromNode, ...] = (Inventory(replicas=()),),
    ) -> None:
        self.ups: queue.Queue[NodeWelcome] = queue.Queue()
        self.heard: queue.Queue[ToNode] = queue.Queue()
        self.downs: queue.Queue[TensorCastError] = queue.Queue()
        self.on_up: Callable[[], None] = lambda: None
        self.first = first
        self.link = Link(
            LinkCallbacks(
                hello=lambda: NodeHello(
                    card=node_card(), cluster=CLUSTER, epoch=Epoch(1)
                ),
                on_up=self._up,
                on_message=self._hear,
                on_down=self.downs.put,
                renew=renew,
            ),
            target=target,
            retry_s=0.02,
        )
        self.link.start()

    def _up(self, welcome: NodeWelcome) -> tuple[FromNode, ...]:
        self.on_up()
        self.ups.put(welcome)
        return self.first

    def _hear(self, message: ToNode) -> None:
        self.heard.put(message)
        if message == TaskSeen(task=13):
            raise Gone("the node refuses")


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    made = Catalog()
    yield made
    made.close()


@contextlib.contextmanager
def node_on(target: LinkTarget | None, **how: Any) -> Iterator[Node]:
    node = Node(target, **how)
    try:
        yield node
    finally:
        assert node.link.stop(within_s=10, flush=False)


def test_a_node_proves_itself_says_who_it_is_and_what_it_holds(
    catalog: Catalog, leaves_nothing: None
) -> None:
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        assert caller.welcome().card == node_card()
        assert caller.hear() == Inventory(replicas=())
        assert node.ups.get(timeout=WITHIN_S).epoch == 2
        assert node.link.up
    catalog.close()


def test_messages_keep_their_order_both_ways(catalog: Catalog) -> None:
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.welcome()
        caller.hear()
        for task in range(50):
            assert node.link.send(progress(task))
            caller.say(DoCancel(task=task))
        assert [caller.hear().task for _ in range(50)] == list(range(50))
        heard = [node.heard.get(timeout=WITHIN_S) for _ in range(50)]
        assert heard == [DoCancel(task=task) for task in range(50)]


def test_what_the_node_holds_goes_before_what_others_send_meanwhile(
    catalog: Catalog,
) -> None:
    """A change between the inventory and its sending must not be lost, nor come first."""
    dropped = ReplicaDropped(generation=Generation(1), tier=Tier.HOST, why="spare")
    with node_on(catalog.target) as node:
        sent: list[bool] = []
        node.on_up = lambda: sent.append(node.link.send(dropped))
        caller = catalog.accept()
        caller.welcome()
        assert caller.hear() == Inventory(replicas=())
        assert caller.hear() == dropped
        assert sent == [True]


def test_while_the_link_is_down_nothing_is_queued(catalog: Catalog) -> None:
    with node_on(None) as node:
        assert not node.link.send(progress(1))
        node.link.aim(catalog.target)
        caller = catalog.accept()
        caller.welcome()
        assert caller.hear() == Inventory(replicas=())
        node.link.send(progress(2))
        assert caller.hear() == progress(2)


def test_a_lost_link_is_made_again_and_everything_said_anew(catalog: Catalog) -> None:
    with node_on(catalog.target) as node:
        for _ in range(3):
            caller = catalog.accept()
            caller.welcome()
            assert caller.hear() == Inventory(replicas=())
            caller.stream.close()
            assert isinstance(node.downs.get(timeout=WITHIN_S), PeerLost)


def test_a_catalog_that_is_not_there_is_tried_until_it_is(catalog: Catalog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    target = LinkTarget(
        host="127.0.0.1", port=port, cluster=CLUSTER, token=TOKEN, epoch=Epoch(2)
    )
    with node_on(target) as node:
        for _ in range(3):
            error = node.downs.get(timeout=WITHIN_S)
            assert isinstance(error, CatalogUnavailable)
        node.link.aim(catalog.target)
        catalog.accept().welcome()
        node.ups.get(timeout=WITHIN_S)


def test_a_catalog_without_the_token_gets_no_proof() -> None:
    false = Catalog(token=b"x" * 32)
    with node_on(false.target) as node:
        with pytest.raises(PeerLost):
            false.accept()
        assert isinstance(node.downs.get(timeout=WITHIN_S), WrongPeer)
        assert node.ups.empty()
    false.close()


@pytest.fixture(params=["plain", "tls"])
def silent(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[LinkTarget, socket.socket]]:
    """Where a listener takes connections and never says a word."""
    tls = mint_certificates() if request.param == "tls" else None
    catalog = Catalog(tls=tls)
    catalog._listener.settimeout(WITHIN_S)
    yield catalog.target, catalog._listener
    catalog.close()


def test_a_catalog_that_says_nothing_does_not_hold_up_the_end(
    silent: tuple[LinkTarget, socket.socket],
) -> None:
    target, listener = silent
    with node_on(target) as node:
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(1)  # the node has begun, and waits for an answer
            assert node.link.stop(within_s=5)


def test_a_catalog_that_says_nothing_does_not_hold_up_a_new_aim(
    silent: tuple[LinkTarget, socket.socket], catalog: Catalog
) -> None:
    target, listener = silent
    with node_on(target) as node:
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(1)
            node.link.aim(catalog.target)
            catalog.accept(within_s=5).welcome()
            node.ups.get(timeout=WITHIN_S)


def test_a_refused_node_tries_again(catalog: Catalog) -> None:
    refusal = LinkRefused(fault=Fault.of(CatalogUnavailable("recovering")))
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.hear()
        caller.say(refusal)
        assert isinstance(node.downs.get(timeout=WITHIN_S), CatalogUnavailable)
        catalog.accept().welcome()
        node.ups.get(timeout=WITHIN_S)


def test_a_node_refused_for_good_waits_for_another_catalog(catalog: Catalog) -> None:
    refusal = LinkRefused(fault=Fault.of(Mismatch("another cluster")), retry=False)
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.hear()
        caller.say(refusal)
        assert isinstance(node.downs.get(timeout=WITHIN_S), Mismatch)
        other = Catalog()
        node.link.aim(other.target)
        other.accept().welcome()
        node.ups.get(timeout=WITHIN_S)
        other.close()
        catalog._listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            catalog._listener.accept()


def test_a_new_aim_ends_the_present_link(catalog: Catalog) -> None:
    other = Catalog()
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.welcome()
        node.ups.get(timeout=WITHIN_S)  # else what is ended is an attempt, not a link
        node.link.aim(other.target)
        assert caller.hear() == Inventory(replicas=())
        with pytest.raises(PeerLost):
            caller.hear()
        other.accept().welcome()
        node.link.aim(None)
        eventually(lambda: not node.link.up, within_s=WITHIN_S)
    other.close()


def test_a_callback_that_refuses_a_message_does_not_end_the_link(
    catalog: Catalog,
) -> None:
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.welcome()
        caller.say(TaskSeen(task=13))
        caller.say(TaskSeen(task=14))
        assert node.heard.get(timeout=WITHIN_S) == TaskSeen(task=13)
        assert node.heard.get(timeout=WITHIN_S) == TaskSeen(task=14)
        assert node.link.up


def test_noise_from_the_catalog_ends_the_link_and_it_is_made_again(
    catalog: Catalog,
) -> None:
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.welcome()
        caller.stream.sock.sendall(b"noise that is no frame of ours")
        assert isinstance(node.downs.get(timeout=WITHIN_S), WrongPeer)
        catalog.accept().welcome()


def test_under_tls_the_same_is_said() -> None:
    catalog = Catalog(tls=mint_certificates())
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.welcome()
        assert caller.hear() == Inventory(replicas=())
        # Two frames in one TLS record: the second is not visible to a poll.
        caller.say(DoCancel(task=1))
        caller.say(DoCancel(task=2))
        for task in (1, 2):
            assert node.heard.get(timeout=WITHIN_S) == DoCancel(task=task)
        node.link.send(progress(3))
        assert caller.hear() == progress(3)
    catalog.close()


def test_broken_certificates_are_reported_and_tried_again() -> None:
    good = Catalog()
    broken = LinkTarget(
        host="127.0.0.1",
        port=good.target.port,
        cluster=CLUSTER,
        token=TOKEN,
        epoch=Epoch(2),
        tls=TlsFiles(ca="x", cert="x", key="x"),
    )
    with node_on(broken) as node:
        assert isinstance(node.downs.get(timeout=WITHIN_S), InvalidArgument)
    good.close()


# ------------------------------------------------------------------ leases
def renewal(seq: int) -> Renew:
    return Renew(seq=seq)


def test_the_lease_is_renewed_at_a_third_of_it(catalog: Catalog) -> None:
    with node_on(catalog.target, renew=renewal) as node:
        caller = catalog.accept()
        caller.welcome(ttl_s=0.6)
        assert caller.hear() == Inventory(replicas=())
        began_s = time.monotonic()
        for seq in (1, 2, 3):
            assert caller.hear() == Renew(seq=seq)
            caller.say(Renewed(seq=seq, lease_ttl_s=0.6))
        assert time.monotonic() - began_s < 5
        assert node.link.lease_left_s > 0
        assert node.heard.empty(), "the link keeps the lease by itself"


def test_a_lease_runs_from_when_its_renewal_was_sent(catalog: Catalog) -> None:
    with node_on(catalog.target, renew=renewal) as node:
        caller = catalog.accept()
        caller.welcome(ttl_s=0.3)
        caller.hear()
        assert caller.hear() == Renew(seq=1)
        sent_s = time.monotonic()
        time.sleep(0.5)  # scene: a catalog that answers late
        caller.say(Renewed(seq=1, lease_ttl_s=100.0))
        eventually(lambda: node.link.lease_left_s > 1, within_s=WITHIN_S)
        assert node.link.lease_left_s <= 100.0 - (time.monotonic() - sent_s)


def test_an_answer_to_no_renewal_extends_nothing(catalog: Catalog) -> None:
    with node_on(catalog.target, renew=renewal) as node:
        caller = catalog.accept()
        caller.welcome(ttl_s=5.0)
        caller.say(Renewed(seq=77, lease_ttl_s=1000.0))
        caller.say(DoCancel(task=1))
        assert node.heard.get(timeout=WITHIN_S) == DoCancel(task=1)
        assert node.link.lease_left_s <= 5.0


def test_a_node_that_renews_by_itself_hears_the_answers(catalog: Catalog) -> None:
    with node_on(catalog.target) as node:
        caller = catalog.accept()
        caller.welcome(ttl_s=0.01)
        caller.hear()
        node.link.send(Renew(seq=5))
        assert caller.hear() == Renew(seq=5)
        caller.say(Renewed(seq=5, lease_ttl_s=1.0))
        assert node.heard.get(timeout=WITHIN_S) == Renewed(seq=5, lease_ttl_s=1.0)


# ------------------------------------------------------------------ the end
def test_stopping_lets_out_what_is_queued(catalog: Catalog) -> None:
    node = Node(catalog.target)
    caller = catalog.accept()
    caller.welcome()
    caller.hear()
    for task in range(200):
        node.link.send(progress(task))
    stopper = threading.Thread(target=node.link.stop)
    stopper.start()
    assert [caller.hear().task for _ in range(200)] == list(range(200))
    with pytest.raises(PeerLost):
        caller.hear()
    stopper.join(10)
    assert not node.link.up


def test_a_link_that_waits_for_a_catalog_can_be_stopped(leaves_nothing: None) -> None:
    node = Node(None)
    assert node.link.stop(within_s=10)


def test_a_link_that_never_started_can_be_stopped() -> None:
    def hello() -> NodeHello:
        raise AssertionError("nobody asked")

    link = Link(LinkCallbacks(hello=hello, on_up=lambda _: ()))
    assert link.stop()
