"""A device in this process: the nine verbs, with the rules that hold for every kind.

Rules:

1. An error of the device is sticky: after it every call fails with DeviceError, whoever
   makes it. What was done before it stays done. No room (CapacityError) and a vanished owner
   (OwnerGone) are no errors of the device.
2. A device belongs to the process that opened it. After a fork every call in the child is
   refused: a CUDA context does not survive a fork.
3. Host buffers are held, and memory is neither freed nor closed, until the copies that use
   them are done: `free` and `close` wait for them.
4. A handle opens in other processes only; here it means the memory itself (`exported`). The
   same slab opened twice is one memory that is closed twice.
5. Any thread may call. Nobody waits for another's copies, except who opens a slab while
   another thread closes one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, Self

from tensorcast_dask.dataplane.devices.base import (
    ArrayMemory,
    Copy,
    DeviceRange,
    HostMemory,
    Listing,
    Memory,
    Role,
    Side,
    SlabHandle,
    process_token,
)
from tensorcast_dask.dataplane.memory import address
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    DeviceError,
    Gone,
    InvalidArgument,
    Mismatch,
    TensorCastError,
    UnsupportedPlatform,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorcast_dask.dataplane.devices.base import Driver, Ticket

__all__ = ["Device", "Event"]

_NOTHING: Final = contextlib.ExitStack()


class Event:
    """A point in a stream; made by `Device.copy` and `Device.event`.

    Parameters
    ----------
    device : Device
        Whose stream it is.
    ticket : Ticket
        What the driver gave.
    held : ExitStack
        Ends the hold on the host buffers of a copy.
    uses : tuple of Memory
        Memory that the copy touches.
    """

    __slots__ = ("_device", "_held", "settled", "ticket", "uses")

    def __init__(
        self,
        device: Device,
        ticket: Ticket,
        held: contextlib.ExitStack = _NOTHING,
        uses: tuple[Memory, ...] = (),
    ) -> None:
        self._device = device
        self._held = held
        self.ticket = ticket
        self.uses = uses
        #: True once it is known to have run or failed: buffers are free again.
        self.settled = False

    def of(self, device: Device) -> bool:
        """Say whether it is an event of `device`."""
        return self._device is device

    def done(self) -> bool:
        """Say whether it has run.

        Raises
        ------
        DeviceError
            When the device failed.
        OwnerGone
            When the process that owned the memory ended before the copy ran.
        """
        with self._device.driving(self):
            found = self.ticket.done()
        if found:
            self.settle()
        return found

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has run.

        Raises
        ------
        DeadlineExceeded
            When `timeout_s` passed first; the copy goes on.
        DeviceError, OwnerGone
            As `done` does.
        """
        with self._device.driving(self):
            found = self.ticket.wait(timeout_s)
        if not found:
            message = f"a copy on {self._device.id} is not done after {timeout_s:g} s; wait longer, and change neither side before"
            raise DeadlineExceeded(message)
        self.settle()

    def settle(self) -> None:
        """Note that it has run or failed."""
        with self._device.lock:
            if not self.settled:
                self.settled = True
                self.uses = ()
                self._held.close()


class Device:
    """One device, opened by this process.

    Parameters
    ----------
    driver : Driver
        What drives it.
    process : str
        The name of this process, for tests of several in one.
    """

    def __init__(self, driver: Driver, *, process: str = "") -> None:
        self.id = driver.id
        #: Array libraries that make arrays over its memory, for `wrap`.
        self.libraries = driver.libraries
        self.lock = threading.RLock()
        self._driver = driver
        self._process = process or process_token()
        self._pid = os.getpid()
        self._closed = False
        #: What went wrong first (rule 1).
        self._failure = ""
        #: All memory that is neither freed nor closed.
        self._memories: dict[Memory, contextlib.ExitStack] = {}
        #: Held while a slab is opened or closed: a driver counts a slab once.
        self._sharing = threading.Lock()
        #: Opened slabs by the driver's data.
        self._opened: dict[bytes, Memory] = {}
        #: What was exported here, by the driver's data and the place in it.
        self._exported: weakref.WeakValueDictionary[tuple[bytes, int], Memory] = (
            weakref.WeakValueDictionary()
        )
        #: Events of copies not known to be done, by stream, in order.
        self._flying: defaultdict[int, deque[Event]] = defaultdict(deque)

    # -------------------------------------------------------------- memory
    def allocate(self, nbytes: int) -> Memory:
        """Make a slab. Its bytes are whatever was there before.

        Raises
        ------
        CapacityError
            When the device has no room.
        """
        _some(nbytes, "a slab")
        with self.driving():
            found = self._driver.allocate(nbytes)
        return self._entered(found, nbytes, Role.OWNED)

    def free(self, memory: Memory) -> None:
        """Give a slab back once its copies are done.

        Where others have it open the device's room comes back when the last has closed it.
        """
        with self.lock:
            self._check(memory, Role.OWNED)
            memory.ended = True
        self._leave(memory)
        with self.driving():
            self._driver.free(memory.address)

    def export(self, memory: Memory) -> SlabHandle:
        """Make what another process needs to open memory that was allocated here.

        Raises
        ------
        UnsupportedPlatform, Unimplemented
            When memory of its allocator cannot be opened elsewhere; it names the setting.
        """
        self._check(memory, Role.OWNED, Role.BORROWED)
        with self.driving():
            found = self._driver.export(memory.address)
        with self.lock:
            self._exported[found.data, found.offset] = memory
        return SlabHandle(
            device=self.id.uuid,
            exporter=self._process,
            nbytes=found.nbytes,
            data=found.data,
            offset=found.offset,
        )

    def exported(self, handle: SlabHandle) -> Memory | None:
        """Give the memory that a handle is of, where it is of this process (rule 4)."""
        if handle.exporter != self._process:
            return None
        return self._exported.get((handle.data, handle.offset))

    def open(self, what: SlabHandle | HostMemory | ArrayMemory) -> Memory:
        """Open another process's slab, pin host memory, or take an array's memory as it is.

        What was last written to an array must have happened: the library's streams are not
        known here.

        Raises
        ------
        Mismatch
            When the handle is of another device, or was exported by this process.
        OwnerGone
            When the slab is no more.
        AlreadyExists
            When some of the host memory is pinned already.
        """
        if isinstance(what, HostMemory):
            return self._pin(what)
        if isinstance(what, ArrayMemory):
            return self._borrow(what)
        if what.device != self.id.uuid:
            message = f"the handle is of device {what.device}, this is {self.id.uuid}; open it on that device"
            raise Mismatch(message)
        if what.exporter == self._process:
            message = "a handle cannot be opened in the process that exported it; use the memory itself"
            raise Mismatch(message)
        with self._sharing:
            known = self._opened.get(what.data)
            if known is not None:
                self._check(known)
                known.opens += 1
                return known
            with self.driving():
                found = self._driver.open(what.data)
            memory = self._entered(found, what.nbytes, Role.OPENED)
            self._opened[what.data] = memory
            return memory

    def _pin(self, what: HostMemory) -> Memory:
        held = contextlib.ExitStack()
        try:
            at, nbytes = held.enter_context(address(what.buffer, writable=True))
            _some(nbytes, "pinned host memory")
            with self.driving():
                found = self._driver.open((at, nbytes))
        except BaseException:
            held.close()
            raise
        return self._entered(found, nbytes, Role.PINNED, held)

    def _borrow(self, what: ArrayMemory) -> Memory:
        _some(what.nbytes, "memory of an array")
        self._alive()
        held = contextlib.ExitStack()
        held.callback(id, what.keep)  # kept until the copies that use it are done
        return self._entered(what.address, what.nbytes, Role.BORROWED, held)

    def close(self, memory: Memory | None = None) -> None:
        """End one hold on what `open` gave, or the device itself with all that is left.

        Closing the device frees what this process owns on it. It never raises and may be
        repeated.
        """
        if memory is None:
            self._end()
            return
        with self._sharing:
            with self.lock:
                self._check(memory, Role.OPENED, Role.PINNED, Role.BORROWED)
                memory.opens -= 1
                if memory.opens:
                    return
                memory.ended = True
            self._opened = {d: m for d, m in self._opened.items() if m is not memory}
            held = self._leave(memory)
            if memory.role is Role.BORROWED:
                held.close()
                return
            with held, self.driving():
                self._driver.close(memory.address)

    def _end(self) -> None:
        with self.lock:
            if self._closed or os.getpid() != self._pid:
                return  # a forked child holds nothing
            self._closed = True
        self._driver.close(None)
        with self.lock:
            for memory, held in self._memories.items():
                memory.ended = True
                held.close()
            self._memories.clear()
            self._opened.clear()
            for flying in self._flying.values():
                for event in list(flying):
                    event.settle()
            self._flying.clear()

    # -------------------------------------------------------------- copies
    def copy(
        self,
        target: DeviceRange | Any,  # noqa: ANN401
        source: DeviceRange | Any,  # noqa: ANN401
        *,
        stream: int = 0,
        after: Sequence[Event] = (),
    ) -> Event:
        """Ask for a copy; it has happened when its event is done.

        Parameters
        ----------
        target, source : DeviceRange or buffer
            Ranges of this device's memory, or contiguous host buffers, of equal length.
            The source is read when the copy runs.
        stream : int
            Copies of one stream run in order.
        after : sequence of Event
            What must be done first, whatever stream it is of.

        Returns
        -------
        Event
            To be waited for before either side is used again.
        """
        held = contextlib.ExitStack()
        try:
            to, to_bytes = self._side(target, held, writable=True)
            origin, nbytes = self._side(source, held, writable=False)
            _agreed(to_bytes, nbytes)
            uses = tuple(
                s.memory for s in (target, source) if isinstance(s, DeviceRange)
            )
            tickets = self._tickets(after)
            with self.lock:
                for memory in uses:
                    self._check(memory)
                with self.driving():
                    ticket = self._driver.copy(
                        Copy(to, origin, nbytes, stream, tickets)
                    )
                event = Event(self, ticket, held, uses)
                flying = self._flying[stream]
                flying.append(event)
                self._prune(flying)
        except BaseException:
            held.close()
            raise
        return event

    def event(self, stream: int = 0, *, after: Sequence[Event] = ()) -> Event:
        """Mark the present end of a stream: done when all before it is, and `after`."""
        with self.driving():
            ticket = self._driver.event(stream, self._tickets(after))
        return Event(self, ticket)

    def wrap(self, place: DeviceRange, *, keep: object = None) -> object:
        """Make the library's own array of bytes over a range, without a copy.

        It is as long-lived as its memory, and keeps `keep` alive; dtypes and shapes are the
        caller's.
        """
        self._check(place.memory)
        with self.driving():
            return self._driver.wrap(place.memory, place.offset, place.nbytes, keep)

    def list(self) -> Listing:
        """Say what the device has and what this process has of it."""
        with self.driving():
            total, free = self._driver.list()
        with self.lock:
            held = dict.fromkeys(Role, 0)
            for memory in self._memories:
                held[memory.role] += memory.nbytes
            for flying in self._flying.values():
                self._prune(flying)
            return Listing(
                total_bytes=total,
                free_bytes=free,
                owned_bytes=held[Role.OWNED],
                opened_bytes=held[Role.OPENED],
                pinned_bytes=held[Role.PINNED],
                in_flight=sum(map(len, self._flying.values())),
            )

    # -------------------------------------------------------------- rules
    @contextlib.contextmanager
    def driving(self, event: Event | None = None) -> Iterator[None]:
        """Run a call of the driver; an error of the device becomes sticky (rule 1).

        `event` has done with its buffers when its call fails.
        """
        self._alive(event)
        try:
            yield
        except TensorCastError as error:
            if isinstance(error, DeviceError):
                self._failure = self._failure or error.message
            if event is not None:
                event.settle()
            raise

    def _alive(self, event: Event | None = None) -> None:
        if os.getpid() != self._pid:
            message = f"device {self.id} was opened before a fork and cannot be used in the child; start processes with spawn or forkserver"
            raise UnsupportedPlatform(message)
        if event is not None:
            return  # only its ticket knows whether buffers are still in use
        if self._closed:
            message = f"device {self.id} is closed; open it again"
            raise Gone(message)
        if self._failure:
            message = f"device {self.id} failed earlier and is of no more use to this process: {self._failure}"
            raise DeviceError(message)

    def _check(self, memory: Memory, *roles: Role) -> None:
        """Refuse memory that is not ours to use so."""
        self._alive()
        if memory.device != self.id or (
            memory not in self._memories and not memory.ended
        ):
            message = f"{memory!r} was not made by this device {self.id}; open its handle here first"
            raise Mismatch(message)
        if memory.ended:
            message = f"{memory!r} cannot be used any more"
            raise Gone(message)
        if roles and memory.role not in roles:
            message = f"{memory!r}: only {' and '.join(roles)} memory can be used so"
            raise InvalidArgument(message)

    def _entered(
        self,
        at: int,
        nbytes: int,
        role: Role,
        held: contextlib.ExitStack | None = None,
    ) -> Memory:
        memory = Memory(self.id, at, nbytes, role)
        with self.lock:
            self._memories[memory] = held or contextlib.ExitStack()
        return memory

    def _leave(self, memory: Memory) -> contextlib.ExitStack:
        """Strike memory out once its copies are done (rule 3)."""
        with self.lock:
            using = [
                event
                for flying in self._flying.values()
                for event in flying
                if memory in event.uses
                or memory.role is Role.PINNED  # a host buffer may lie in it
            ]
        for event in using:
            with contextlib.suppress(TensorCastError):
                event.wait()
        with self.lock:
            return self._memories.pop(memory)

    def _tickets(self, after: Sequence[Event]) -> Sequence[Ticket]:
        for event in after:
            if not event.of(self):
                message = f"an event of another device cannot be followed on {self.id}; wait for it first"
                raise InvalidArgument(message)
        return [event.ticket for event in after]

    def _side(
        self,
        place: Any,  # noqa: ANN401
        held: contextlib.ExitStack,
        *,
        writable: bool,
    ) -> tuple[Side, int]:
        if isinstance(place, DeviceRange):
            at = place.memory.address + place.offset
            on_device = place.memory.role is not Role.PINNED
            return Side(on_device, at), place.nbytes
        try:
            at, nbytes = held.enter_context(address(place, writable=writable))
        except (BufferError, TypeError) as error:
            what = "writable and contiguous" if writable else "contiguous"
            message = f"copy takes a range of the device or a {what} buffer of the host, not {type(place).__name__}"
            raise InvalidArgument(message) from error
        return Side(on_device=False, address=at), nbytes

    def _prune(self, flying: deque[Event]) -> None:
        while flying:
            event = flying[0]
            try:
                if not event.settled and not event.done():
                    return
            except TensorCastError:
                pass  # the event's own holder is told
            flying.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _some(nbytes: int, what: str) -> None:
    if nbytes < 1:
        message = f"{what} takes at least 1 byte, not {nbytes}"
        raise InvalidArgument(message)


def _agreed(to_bytes: int, nbytes: int) -> None:
    if to_bytes != nbytes:
        message = f"copy: a target of {to_bytes} bytes and a source of {nbytes}"
        raise InvalidArgument(message)
