"""The tiers on a device: orders for the device process, and what becomes of them.

Rules:

1. The store never touches a device. A device process beside it holds the slabs and asks for
   orders; allocator, index, sums, generations and eviction are the store's, as for memory.
2. Each slab has a *tag*, an empty memory file. Who opens the slab holds a description of the
   tag for as long as it does, so the kernel says who is left, also of those who were killed:
   a slab is frozen, used again and freed as a segment of host memory is.
3. An order keeps leases on what it reads and writes until it has ended, whoever still waits.
4. When the device process is gone its copies are lost and said to be; the store goes on.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.exceptions import (
    AlreadyExists,
    DeadlineExceeded,
    Mismatch,
    NotFound,
)
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.state.orders import Order, Orders
from tensorcast_dask.store.state.tiers import TierRow
from tensorcast_dask.tensors.messages import (
    Act,
    AttachDevice,
    DeviceOrder,
    Done,
    NextOrder,
    OrderOver,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tensorcast_dask.store.core import Core, Reading
    from tensorcast_dask.store.media import Medium
    from tensorcast_dask.store.state.replicas import Copy
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import OrderEnded

__all__ = ["Devices"]

logger = logging.getLogger(__name__)

_IDLE_S: Final = 1.0
_WAIT: Final = DeviceOrder(number=0, act=Act.WAIT)


class Devices:
    """The device process of one store, as the store sees it.

    Parameters
    ----------
    core : Core
        The state.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._changed = threading.Condition(core.lock)
        self._orders = Orders()
        self._peer: Peer | None = None
        self._watch: PidWatch | None = None
        self._shares = False
        #: Lanes of its UCX; () where it has none.
        self._lanes: tuple[str, ...] = ()
        #: Handles of slabs by segment; b"" where nobody else can open them.
        self._handles: dict[int, bytes] = {}
        #: Leases on what orders read and write, by their number.
        self._leases: dict[int, list[Reading]] = {}
        #: Descriptions that go with orders, by their number.
        self._fds: dict[int, int] = {}
        #: What keeps the bytes of its tiers, under its orders.
        self.media: dict[Tier, Medium] = {}
        #: How long a device process waits for an order before it asks again.
        self.idle_s = _IDLE_S
        #: Told when a device comes or goes.
        self.changed: Callable[[], None] = _nothing

    @property
    def shares(self) -> bool:
        """Whether other processes can open slabs, and are seen to have done so."""
        return self._shares and self._core.shelf.leases

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes that the device process has to those of other nodes, the best first."""
        return self._lanes

    @property
    def device(self) -> str:
        """UUID of the device; "" where there never was one."""
        stock = self._core.table.tiers.get(Tier.DEVICE)
        return "" if stock is None else stock.row.device

    @property
    def pid(self) -> int:
        """Who is attached; 0 = nobody."""
        return 0 if self._peer is None else self._peer.pid

    # -------------------------------------------------------------- the process
    def handle(
        self, request: AttachDevice | NextOrder | OrderOver, peer: Peer
    ) -> Reply:
        """Carry a request of the device process out."""
        match request:
            case NextOrder():
                return self._next(request, peer)
            case AttachDevice():
                self._attach(request, peer)
            case OrderOver():
                self._over(request, peer)
        return Reply(message=Done())

    def _attach(self, request: AttachDevice, peer: Peer) -> None:
        core = self._core
        with core.lock:
            self.tick()
            if self._peer is not None:
                message = f"process {self._peer.pid} drives this node's device already"
                raise AlreadyExists(message)
            self._peer, self._watch = peer, PidWatch.of_peer(peer.stream.sock)
            self._orders.attached, self._shares = True, request.shares
            self._lanes = request.ucx
            for row in _rows(request, core.settings.host_memory_bytes):
                core.table.set_row(row)
            core.room.media |= self.media
        logger.info(
            "%s (%s) is attached: %d bytes, process %d",
            request.name,
            request.device,
            request.capacity_bytes,
            peer.pid,
        )
        self.changed()

    def _next(self, request: NextOrder, peer: Peer) -> Reply:
        with self._changed:
            if self._peer is not peer:
                message = "this process drives no device of this node; attach first"
                raise NotFound(message)
            if request.ended is not None:
                self._end(self._orders.ended(request.ended))
            order = self._orders.next()
            if order is None:
                self._changed.wait(self.idle_s)
                order = self._orders.next() if self._peer is peer else None
            if order is None:
                return Reply(message=_WAIT)
            fd = self._fds.pop(order.told.number, -1)
            return Reply(message=order.told, fds=() if fd < 0 else (fd,))

    def _over(self, request: OrderOver, peer: Peer) -> None:
        with self._changed:
            if peer.pid != self.pid:
                message = "this process drives no device of this node; attach first"
                raise NotFound(message)
            self._end(self._orders.ended(request.ended))

    def _end(self, order: Order) -> None:
        self._let_go(order.told.number)
        self._changed.notify_all()

    def _let_go(self, number: int) -> None:
        """Close and release what an order had."""
        fd = self._fds.pop(number, -1)
        if fd >= 0:
            os.close(fd)
        for held in self._leases.pop(number):
            self._core.release(held)

    def tick(self) -> None:
        """See whether the device process is gone (rule 4)."""
        with self._core.lock:
            if self._watch is not None and self._watch.is_gone():
                self._lose("its process has ended")

    def closed(self, peer: Peer) -> None:
        """Hear that a connection has ended."""
        with self._core.lock:
            if self._peer is peer:
                self._lose("its process closed the connection")

    def _lose(self, why: str) -> None:
        core = self._core
        peer, self._peer = self._peer, None
        self._lanes = ()
        assert peer is not None, "store: a device was lost twice"
        assert self._watch is not None, "store: a device process is watched"
        self._watch.close()
        self._watch = None
        why = f"the device of this node is lost: {why}"
        logger.warning("%s", why)
        for order in self._orders.detach(why):
            self._end(order)
        for tier, medium in self.media.items():
            held = [g for g, r in core.table.replicas.items() if r.copy(tier)]
            for generation in held:
                core.drop(generation, tier, why=why)
            stock = core.table.tiers[tier]
            core.table.set_row(stock.row.lost())
            for segment in stock.pool.trim(stock.pool.warm_bytes):
                medium.close(segment)
        self._handles.clear()
        self._changed.notify_all()
        self.changed()

    # -------------------------------------------------------------- orders
    def order(
        self,
        act: Act,
        segment: int,
        *,
        fd: int = -1,
        uses: Iterable[tuple[Generation, Copy]] = (),
        **more: Any,  # noqa: ANN401 - the other fields of a `DeviceOrder`
    ) -> Order:
        """Give an order; it keeps `fd`, and leases on the copies that it uses, until it ends.

        Raises
        ------
        DeviceError
            When there is no device.
        Gone
            When a copy was freed meanwhile.
        """
        with self._changed:
            orders = self._orders
            number = orders.number()
            leases = self._leases[number] = []
            if fd >= 0:
                self._fds[number] = fd
            try:
                for generation, copy in uses:
                    leases.append(self._core.hold(generation, copy))
                more.setdefault("chunk_bytes", self._core.settings.chunk_bytes)
                told = DeviceOrder(number=number, act=act, segment=segment, **more)
                order = orders.add(told)
            except BaseException:
                self._let_go(number)
                raise
            self._changed.notify_all()
            return order

    def wait(self, order: Order, until_s: float) -> OrderEnded:
        """Wait for an order; raise what went wrong.

        Raises
        ------
        DeadlineExceeded
            When it is not done in time: it goes on, or was taken back.
        DeviceError, CapacityError, Mismatch, OwnerGone
            As the device process said.
        """
        with self._changed:
            while order.outcome is None:
                left_s = until_s - now_s()
                if left_s <= 0:
                    if self._orders.take_back(order):
                        self._end(order)
                    message = f"the device did not {order.told.act} in time; wait longer, or use it less"
                    raise DeadlineExceeded(message)
                self._changed.wait(min(left_s, 60.0))
            outcome = order.outcome
        if outcome.fault is not None:
            raise outcome.fault.error()
        return outcome

    # -------------------------------------------------------------- slabs
    def allocated(self, segment: int, handle: bytes) -> None:
        """Note the handle of a slab."""
        with self._core.lock:
            self._handles[segment] = handle if self._core.shelf.leases else b""

    def freed(self, segment: int) -> None:
        """Forget a slab and have it freed."""
        with self._core.lock:
            known = self._handles.pop(segment, None)
            if known is not None and self._orders.attached:
                self.order(Act.FREE, segment)

    def has(self, segment: int) -> bool:
        """Say whether the device process that is attached has a slab."""
        return segment in self._handles

    def slab(self, segment: int) -> bytes:
        """Give the handle of a slab; b"" where it cannot be opened elsewhere."""
        return self._handles.get(segment, b"")

    # -------------------------------------------------------------- readers
    def reaches(self, peer: Peer, device: str) -> bool:
        """Say whether slabs of this node's device are handed to a peer that has it too."""
        return peer.unix and self.device == device and self.shares

    def read(
        self, held: Reading, until_s: float, *, fd: int = -1, into: Copy | None = None
    ) -> bytes:
        """Read a copy on the device and give its sums; with `fd` into that file, a copy's.

        Raises
        ------
        Mismatch
            When they are not what they were; the copy is given up.
        """
        replica = held.replica
        copies = [held.copy] if into is None else [into, held.copy]
        order = self.order(
            Act.CHECK if fd < 0 else Act.SAVE,
            held.copy.segment,
            nbytes=replica.nbytes,
            sums=replica.sums,
            fd=fd,
            uses=[(replica.generation, copy) for copy in copies],
        )
        try:
            return self.wait(order, until_s).sums
        except Mismatch as error:
            why = f"changed while shared: {error}"
            self._core.drop(replica.generation, Tier.DEVICE, why=why)
            raise


def _rows(request: AttachDevice, host_bytes: int) -> tuple[TierRow, TierRow]:
    """Describe the tiers of a device."""
    return (
        TierRow(
            tier=Tier.DEVICE,
            capacity_bytes=request.capacity_bytes,
            charges=False,
            spill=Tier.HOST,
            grain_bytes=request.grain_bytes,
            warm_bytes=request.capacity_bytes // 4,
            device=request.device,
        ),
        TierRow(
            tier=Tier.PINNED,
            capacity_bytes=host_bytes,
            proof=False,
            charges=False,
            over=Tier.HOST,
            device=request.device,
        ),
    )


def _nothing() -> None:
    """Do nothing; nobody listens yet."""
