"""What the store does with each request; called by the server's connection threads.

Rules:

1. This file decides nothing: it finds who carries a request out.
2. Adoption and the end are spoken over the unix socket only: the worker is on this host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.dataplane.transports.ucx_serving import UcxServing
from tensorcast_dask.exceptions import (
    InvalidArgument,
)
from tensorcast_dask.store.device_reads import DeviceReads
from tensorcast_dask.store.puts import Puts
from tensorcast_dask.store.reads import Reads
from tensorcast_dask.store.repeats import once
from tensorcast_dask.tensors.messages import (
    Abort,
    Adopt,
    Attach,
    AttachDevice,
    BeginLending,
    CallEnded,
    CallInstance,
    Changed,
    ChunkMapAsked,
    Commit,
    Dial,
    End,
    Fill,
    Hello,
    Lend,
    LetGo,
    Load,
    Mutating,
    NextOrder,
    Open,
    OrderOver,
    Part,
    Proof,
    ReadChunk,
    ReadRanges,
    Reserve,
    SendSlab,
    SessionIn,
    State,
    StateAsked,
    StoreRequest,
    SumsAsked,
    UcxOpen,
    Unlend,
    Write,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.ends import Ends
    from tensorcast_dask.store.instances import InstanceDesk
    from tensorcast_dask.store.movers import Movers
    from tensorcast_dask.store.sums import Sums

__all__ = ["Requests"]

_OF_INSTANCES: Final = (
    CallInstance,
    Dial,
    Attach,
    Changed,
    Load,
    CallEnded,
    SessionIn,
    BeginLending,
    Lend,
    Mutating,
    Unlend,
    Part,
)
_OfBytes: TypeAlias = (
    Reserve
    | Write
    | Fill
    | Commit
    | Abort
    | Open
    | ReadChunk
    | ReadRanges
    | UcxOpen
    | SendSlab
    | AttachDevice
    | NextOrder
    | OrderOver
    | ChunkMapAsked
    | SumsAsked
    | StateAsked
    | Adopt
    | LetGo
    | End
    | Hello
    | Proof
)


class Requests:
    """Carries the store protocol's requests out.

    Parameters
    ----------
    core : Core
        The state.
    sums : Sums
        Chunk sums.
    ends : Ends
        Adoption and the end.
    state : callable
        Makes `debug_state()` as JSON.
    movers : Movers
        Brings what lies in another tier of this node into memory.
    devices : Devices
        The device process beside this store.
    desk : InstanceDesk
        Instances of this node.
    ucx : callable
        Whether bytes may go over UCX.
    """

    def __init__(
        self,
        core: Core,
        *,
        sums: Sums,
        ends: Ends,
        state: Callable[[], bytes],
        movers: Movers,
        devices: Devices,
        desk: InstanceDesk,
        ucx: Callable[[], bool],
    ) -> None:
        self._desk = desk
        self._core = core
        self._devices = devices
        self._ends = ends
        self._state = state
        self._puts = Puts(core, sums, devices=devices)
        self._device_reads = DeviceReads(core, devices, ucx)
        self._reads = Reads(core, sums=sums, movers=movers, devices=self._device_reads)
        self._ucx = UcxServing(allowed=ucx)

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        """Carry one request out."""
        lending = self._desk.lending(peer.hello.node)
        if lending is not None:
            return lending.handle(request, peer)
        if isinstance(request, _OF_INSTANCES):
            return self._desk.handle(request, payload, peer)
        return self._ucx.answer(
            request, peer, lambda: self._of_bytes(request, payload, peer)
        )

    def _of_bytes(self, request: _OfBytes, payload: Payload, peer: Peer) -> Reply:
        match request:
            case Reserve() | Write() | Fill() | Commit() | Abort():
                return self._puts.handle(request, payload, peer)
            case Open() | ReadChunk() | ReadRanges():
                return self._reads.handle(request, peer)
            case UcxOpen() | SendSlab() | AttachDevice() | NextOrder() | OrderOver():
                return self._drive(request, peer)
            case ChunkMapAsked() | SumsAsked():
                if isinstance(request, SumsAsked):
                    self._reads.sums(request.generation, peer)
                return Reply(message=self._reads.chunk_map(request.generation))
            case _:
                return self._of_store(request, peer)

    def _of_store(
        self, request: StateAsked | Adopt | LetGo | End | Hello | Proof, peer: Peer
    ) -> Reply:
        match request:
            case StateAsked():
                return Reply(message=State(json=self._state()))
            case Adopt() | LetGo() | End():
                return self._end(request, peer)
            case Hello() | Proof():
                message = "the handshake is over; send requests"
                raise InvalidArgument(message)
            case _:
                assert_never(request)

    def _drive(
        self,
        request: UcxOpen | SendSlab | AttachDevice | NextOrder | OrderOver,
        peer: Peer,
    ) -> Reply:
        if isinstance(request, UcxOpen):
            return self._ucx.open(request, peer)
        if isinstance(request, SendSlab):
            return self._device_reads.send(request, peer)
        if not peer.unix:
            message = "a device is driven from this host, over the unix socket"
            raise InvalidArgument(message)
        return self._devices.handle(request, peer)

    def closed(self, peer: Peer) -> None:
        """Take back what the connection had reserved; tell the adoption."""
        self._devices.closed(peer)
        self._ucx.closed(peer)
        self._reads.give_back(peer)
        self._core.abandoned(peer.number, pid=peer.pid if peer.unix else 0)
        self._ends.connection_ended(peer.number)
        self._desk.closed(peer)

    def _end(self, request: Adopt | LetGo | End, peer: Peer) -> Reply:
        if not peer.unix:
            message = f"{type(request).__name__} is taken on this host only, over the unix socket"
            raise InvalidArgument(message)
        return once(self._core, request, lambda: self._ends.ask(request, peer))
