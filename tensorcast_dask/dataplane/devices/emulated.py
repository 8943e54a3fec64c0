"""Emulated devices: another kind of memory, with CUDA's rules that bite, on every machine.

It ships with the package, so that everything above devices is tested, and can be tried, where
there is none: `tensorcast.device: emulated:2x1GiB`.

Rules:

1. The memory belongs to a helper process a device (`emulated_process`), which all processes
   of one run directory share. It counts a budget, waits for openers, and sees who dies.
2. Copies are carried out by one thread of the process that asked for them, over its own map
   of the slab: near the speed of memcpy, and as with CUDA the queue dies with its process.
   (In the helper they would need `process_vm_readv`, at half the speed.)
3. Nobody but that thread learns where the map is, and UCX, which reaches memory of every kind
   and is told of which it is. An address of this module is one that no machine maps: host
   code that follows it ends at once, not later.
4. New memory is full of junk.
5. With `:pool` in its setting a process's memory cannot be exported, as that of
   cudaMallocAsync and of torch's expandable segments cannot.
6. The end of the helper is the loss of the device: DeviceError, sticky. The end of a slab's
   owner is OwnerGone for copies that run after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from tensorcast_dask.dataplane import faults, hosts, memory
from tensorcast_dask.dataplane.devices import emulated_process as wire
from tensorcast_dask.dataplane.devices.base import Exported, Side
from tensorcast_dask.dataplane.devices.engine import Engine, Work
from tensorcast_dask.dataplane.maps import SharedMap
from tensorcast_dask.dataplane.sockets import close_fds
from tensorcast_dask.exceptions import (
    AlreadyExists,
    DeviceError,
    InvalidArgument,
    Mismatch,
    OwnerGone,
    UnsupportedPlatform,
    error_from_wire,
)
from tensorcast_dask.tensors.devices import DeviceId, DeviceSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorcast_dask.dataplane.devices.base import Copy, Memory
    from tensorcast_dask.dataplane.devices.engine import Scheduler

__all__ = ["EmulatedArray", "EmulatedDriver", "find", "open_driver"]

JUNK: Final = 0xAA
_BASE: Final = 1 << 63  # no machine maps this half to a program
_SLAB_BITS: Final = 40
_WITHIN_S: Final = 30.0
_REPLIES: Final = msgspec.msgpack.Decoder(
    wire.Reply | wire.Welcome | wire.Given | wire.Counted | wire.Refused
)


class EmulatedArray:
    """Bytes of an emulated device, as an array that host code cannot read.

    Parameters
    ----------
    owner : Memory
        The slab, kept alive by this.
    offset, nbytes : int
        Where in it.
    keep : object
        Kept alive too.
    find : callable
        Gives the address of what it lies in, in this process.
    """

    def __init__(
        self,
        owner: Memory,
        offset: int,
        nbytes: int,
        *,
        keep: object,
        find: Callable[[Side], int],
    ) -> None:
        self.memory = owner
        self._find = find
        #: Where it is to the driver.
        self.address = owner.address + offset
        self._keep = keep
        self.offset = offset
        self.nbytes = nbytes

    @property
    def ucx_memory(self) -> tuple[int, str]:
        """Where it is to UCX in this process, and what kind of memory that is (rule 3)."""
        return self._find(Side(on_device=True, address=self.address)), "host"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        message = f"the array lies on {self.memory.device}: copy it to the host first"
        raise TypeError(message)

    __array__ = __len__ = __getitem__ = __iter__ = __bytes__ = __dlpack__ = _refuse

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes on {self.memory.device}>"


def find(spec: DeviceSpec, run_dir: str = "") -> tuple[DeviceId, ...]:
    """Return the devices that the setting makes; their helpers start when they are opened."""
    host = hosts.host_id(hosts.run_directory(run_dir))
    return tuple(
        DeviceId(f"EMU-{uuid.uuid5(uuid.NAMESPACE_URL, f'{host}/{n}')}", "emulated", n)
        for n in range(spec.count)
    )


def open_driver(
    device: DeviceId, spec: DeviceSpec, run_dir: str = ""
) -> EmulatedDriver:
    """Open one of the devices that `find` gave.

    Raises
    ------
    Mismatch
        When it runs with another budget.
    DeviceError
        When its helper does not come up.
    """
    return EmulatedDriver(device, spec.nbytes, run_dir, pool=spec.pool)


class EmulatedDriver:
    """One emulated device, in this process.

    Parameters
    ----------
    device : DeviceId
        Which.
    budget_bytes : int
        Its memory, all processes together.
    run_dir : str
        The run directory whose processes share it; "" = the user's own.
    pool : bool
        Whether this process's memory comes from a pool (rule 5).
    scheduler : callable, optional
        Chooses the stream whose next copy runs, in place of the thread; for tests.
    """

    def __init__(
        self,
        device: DeviceId,
        budget_bytes: int,
        run_dir: str = "",
        *,
        pool: bool = False,
        scheduler: Scheduler | None = None,
    ) -> None:
        if sys.platform != "linux":
            message = "emulated devices need Linux's memory files; use another machine"
            raise UnsupportedPlatform(message)
        self.id = device
        self.libraries: tuple[str, ...] = ()
        self.engine = Engine(scheduler)
        self._pool = pool
        self._lock = threading.Lock()
        self._slabs: dict[int, SharedMap] = {}
        self._pinned: dict[int, int] = {}
        folder = _folder(hosts.run_directory(run_dir), device.ordinal)
        with _connecting(folder):
            self._sock = _connect(folder, budget_bytes)
            welcome, fd = self._ask(wire.Hello())
        assert isinstance(welcome, wire.Welcome)
        self._board_map = SharedMap(fd, wire.BOARD_BYTES, writable=False)
        os.close(fd)
        self._board = self._board_map.view
        self._life = welcome.life
        #: The process whose end is the loss of the device.
        self.helper_pid = welcome.pid
        self._poll = select.poll()
        self._poll.register(self._sock, 0)  # POLLHUP is always reported
        if welcome.budget_bytes != budget_bytes:
            self.close(None)
            message = f"{device} runs with {welcome.budget_bytes} bytes, not {budget_bytes}; close it everywhere or use the same tensorcast.device"
            raise Mismatch(message)

    # -------------------------------------------------------------- memory
    def allocate(self, nbytes: int) -> int:
        """Make a slab, full of junk."""
        given, fd = self._ask(wire.Allocate(nbytes))
        assert isinstance(given, wire.Given)
        slab = self._map(given, fd)
        ctypes.memset(slab.address, JUNK, nbytes)  # this makes the pages, too
        return self._address(given.number)

    def free(self, address: int) -> None:
        """Unmap a slab and give it back."""
        number = self._number(address)
        self._slabs.pop(number).close()
        self._ask(wire.Free(number))

    def export(self, address: int) -> Exported:
        """Name the slab for other processes."""
        if self._pool:
            message = f"memory of {self.id} comes from a pool, which other processes cannot open: take :pool off tensorcast.device, or have it copied (copy=True)"
            raise UnsupportedPlatform(message)
        number = self._number(address)
        data = msgspec.msgpack.encode((self._life, number))
        offset = address - self._address(number)
        return Exported(data, offset, self._slabs[number].nbytes)

    def open(self, what: bytes | tuple[int, int]) -> int:
        """Map another process's slab, or note host memory as pinned."""
        if isinstance(what, tuple):
            return self._pin(*what)
        try:
            life, number = msgspec.msgpack.decode(what, type=tuple[str, int])
        except msgspec.DecodeError as error:
            message = f"these bytes name no slab of an emulated device ({error})"
            raise InvalidArgument(message) from error
        given, fd = self._ask(wire.Open(life, number))
        assert isinstance(given, wire.Given)
        self._map(given, fd).populate(write=True)
        return self._address(number)

    def _pin(self, at: int, nbytes: int) -> int:
        for other, length in self._pinned.items():
            if at < other + length and other < at + nbytes:
                message = "some of this host memory is pinned already; close that first"
                raise AlreadyExists(message)
        self._pinned[at] = nbytes
        return at

    def close(self, address: int | None) -> None:
        """End what `open` gave, or all of it."""
        if address is None:
            self.engine.end(f"device {self.id} was closed")
            self._sock.close()
            for slab in self._slabs.values():
                slab.close()
            self._slabs.clear()
            self._pinned.clear()
        elif self._pinned.pop(address, None) is None:
            number = self._number(address)
            self._slabs.pop(number).close()
            self._ask(wire.Close(number))

    def wrap(self, memory: Memory, offset: int, nbytes: int, keep: object) -> object:
        """Make an array that only `copy` can read."""
        return EmulatedArray(memory, offset, nbytes, keep=keep, find=self._resolve)

    def list(self) -> tuple[int, int]:
        """Total and free bytes."""
        counted, _ = self._ask(wire.Count())
        assert isinstance(counted, wire.Counted)
        return counted.total_bytes, counted.total_bytes - counted.used_bytes

    # -------------------------------------------------------------- copies
    def copy(self, copy: Copy) -> Work:
        """Queue a copy."""

        def run() -> None:
            faults.point("device.copy", str(self.id))
            self._check_helper()
            to, origin = self._resolve(copy.target), self._resolve(copy.source)
            memory.copy(to, origin, copy.nbytes, threads=1)

        return self.engine.submit(copy.stream, run, copy.after)

    def event(self, stream: int, after: Sequence[Work]) -> Work:
        """Queue a mark."""
        return self.engine.submit(stream, None, after)

    def _resolve(self, side: Side) -> int:
        """Turn one side of a copy into an address of this process."""
        if not side.on_device:
            return side.address
        number = self._number(side.address)
        if self._board[number] == wire.REVOKED:
            message = f"slab {number} of {self.id} ended with the process that owned it; read another replica"
            raise OwnerGone(message)
        return self._slabs[number].address + side.address - self._address(number)

    def _check_helper(self) -> None:
        if self._poll.poll(0):
            raise DeviceError(self._lost())

    def _lost(self) -> str:
        return f"the helper process of {self.id} has ended, and its memory with it; open the device again in a new process"

    # -------------------------------------------------------------- the helper
    @staticmethod
    def _address(number: int) -> int:
        return _BASE + (number << _SLAB_BITS)

    @staticmethod
    def _number(address: int) -> int:
        return (address - _BASE) >> _SLAB_BITS

    def _map(self, given: wire.Given, fd: int) -> SharedMap:
        try:
            slab = SharedMap(fd, given.nbytes, writable=True)
        finally:
            os.close(fd)
        self._slabs[given.number] = slab
        return slab

    def _ask(self, request: wire.Request) -> tuple[wire.Reply, int]:
        with self._lock:
            try:
                self._sock.send(msgspec.msgpack.encode(request))
                data, fds, _, _ = socket.recv_fds(
                    self._sock, wire.MAX_FRAME_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise DeviceError(self._lost()) from error
            except BaseException:  # an interrupt: the next reply would be this one's
                self._sock.shutdown(socket.SHUT_RDWR)
                raise
        if not data:
            raise DeviceError(self._lost())
        reply = _REPLIES.decode(data)
        if isinstance(reply, wire.Refused):
            close_fds(fds)
            raise error_from_wire(reply.kind, reply.message, reply.data)
        return reply, fds[0] if fds else -1


# ------------------------------------------------------------------ finding the helper
def _folder(run_dir: Path, ordinal: int) -> Path:
    folder = run_dir / f"emulated-{ordinal}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def _connecting(folder: Path) -> Iterator[None]:
    """Hold the lock under which a helper is started, found, or ends by itself."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(lock, folder)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile shares it
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    end_s = time.monotonic() + _WITHIN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end_s:
                message = f"another process holds {folder}/lock; find and end it"
                raise DeviceError(message) from None
            time.sleep(0.002)
        else:
            return


def _connect(folder: Path, budget_bytes: int) -> socket.socket:
    path = hosts.socket_path(folder)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(_WITHIN_S)
    try:
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            _start(folder, path, budget_bytes)
            sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _start(folder: Path, path: str, budget_bytes: int) -> None:
    """Start the helper on a socket that listens already: nobody waits for it."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        process = subprocess.Popen(  # noqa: S603  # this very package
            [
                sys.executable,
                "-m",
                wire.__name__,
                str(listener.fileno()),
                str(folder),
                str(budget_bytes),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    threading.Thread(target=process.wait, name="tensorcast-reap", daemon=True).start()
