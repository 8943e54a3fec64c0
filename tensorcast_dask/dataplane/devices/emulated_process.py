"""The helper process of one emulated device: it owns the memory, as a driver does.

Rules:

1. It starts with the first process that opens the device and ends with the last one; what is
   on the device ends with it. Nothing is left behind but an empty folder.
2. One unix socket with message boundaries; a request is answered in order. Memory travels as
   a descriptor of a memory file, once for each process and slab.
3. A client ends with its connection or with its process, whichever is seen first: a forked
   child may hold the connection open.
4. A page that all clients map (the *board*) holds one byte a slab, set when the slab is no
   more: so a copy that runs late finds that it is too late without asking.
5. No copy is made here: copies run in the process that asked for them, as with CUDA.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.devices.emulated_book import Book
from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.exceptions import CapacityError, TensorCastError

__all__ = [
    "BOARD_BYTES",
    "MAX_FRAME_BYTES",
    "REVOKED",
    "Allocate",
    "Close",
    "Count",
    "Counted",
    "Free",
    "Given",
    "Hello",
    "Open",
    "Refused",
    "Reply",
    "Request",
    "Welcome",
    "main",
]

MAX_FRAME_BYTES: Final = 1 << 16
#: The most slabs of one life.
BOARD_BYTES: Final = 1 << 20
REVOKED: Final = 1
#: How long it waits for the process that started it.
_FIRST_S: Final = 20.0
_RETRY_S: Final = 0.05


class Request(msgspec.Struct, frozen=True, tag=True):
    """Anything that a client asks."""


class Hello(Request, frozen=True):
    """First of all; answered by Welcome with the board."""


class Allocate(Request, frozen=True):
    """Make a slab; answered by Given with its memory."""

    nbytes: int


class Free(Request, frozen=True):
    """Free a slab of the client's own."""

    number: int


class Open(Request, frozen=True):
    """Open another's slab; answered by Given with its memory."""

    life: str
    number: int


class Close(Request, frozen=True):
    """End what Open began."""

    number: int


class Count(Request, frozen=True):
    """Ask for the device's memory; answered by Counted."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Anything that a client is answered; itself when there is nothing to say."""


class Welcome(Reply, frozen=True):
    """What there is to know of the device. A life is one run of this process."""

    life: str
    pid: int
    budget_bytes: int


class Given(Reply, frozen=True):
    """A slab; its memory comes with it."""

    number: int
    nbytes: int


class Counted(Reply, frozen=True):
    """The memory of the device."""

    total_bytes: int
    used_bytes: int


class Refused(Reply, frozen=True):
    """An error, by its kind."""

    kind: str
    message: str
    data: dict[str, str | int | float | bool | None]


_REQUESTS: Final = msgspec.msgpack.Decoder(
    Hello | Allocate | Free | Open | Close | Count
)


@dataclass(eq=False, slots=True)
class _Client:
    number: int
    sock: socket.socket
    watch: hosts.PidWatch


class _Server:
    def __init__(self, listener: socket.socket, lock_path: str, budget: int) -> None:
        self._book = Book(budget)
        self._life = secrets.token_hex(8)
        self._files: dict[int, MemoryFile] = {}
        self._clients: dict[int, _Client] = {}
        self._count = 0
        self._listener = listener
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._board_file = MemoryFile(BOARD_BYTES, name="tensorcast-board")
        self._board = self._board_file.map_shared().view
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Serve until the last client has gone."""
        pause_s = _FIRST_S
        while True:
            ready = self._selector.select(None if self._clients else pause_s)
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                else:
                    self._turn(key.data, hung_up=key.fileobj is key.data.watch)
            # A process that connects holds the lock until it is a client.
            if not self._clients and (self._count or not ready) and self._may_end():
                return
            pause_s = _RETRY_S if self._count else _FIRST_S

    def _may_end(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if hosts.peer_credentials(sock).uid != os.getuid():
            sock.close()
            return
        sock.settimeout(5.0)
        self._count += 1
        client = _Client(self._count, sock, hosts.PidWatch.of_peer(sock))
        self._clients[client.number] = client
        self._selector.register(sock, selectors.EVENT_READ, client)
        if client.watch.fileno() >= 0:
            self._selector.register(client.watch, selectors.EVENT_READ, client)

    def _turn(self, client: _Client, *, hung_up: bool) -> None:
        if client.number not in self._clients:
            return
        try:
            data = b"" if hung_up else client.sock.recv(MAX_FRAME_BYTES)
            if data:
                self._answer(client, data)
                return
        except (OSError, msgspec.DecodeError):
            pass
        self._leave(client)

    def _leave(self, client: _Client) -> None:
        del self._clients[client.number]
        self._selector.unregister(client.sock)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.watch)
        client.sock.close()
        client.watch.close()
        self._drop(self._book.leave(client.number))

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._board[number] = REVOKED
            self._files.pop(number).close()

    def _answer(self, client: _Client, data: bytes) -> None:
        fd = -1
        try:
            reply, fd = self._carry_out(client.number, _REQUESTS.decode(data))
        except TensorCastError as error:
            reply = Refused(error.kind, error.message, error.data)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            client.sock.sendmsg(
                [msgspec.msgpack.encode(reply)], rights if fd >= 0 else []
            )
        finally:
            if fd >= 0:
                os.close(fd)

    def _carry_out(self, client: int, request: Request) -> tuple[Reply, int]:
        book = self._book
        match request:
            case Hello():
                fd = self._board_file.read_description()
                return Welcome(self._life, os.getpid(), book.budget_bytes), fd
            case Allocate(nbytes):
                return self._allocate(client, nbytes)
            case Free(number):
                self._drop(book.free(client, number))
            case Open(life, number):
                nbytes = book.open(client, number if life == self._life else -1)
                return Given(number, nbytes), self._files[number].write_description()
            case Close(number):
                self._drop(book.close(client, number))
            case _:
                return Counted(book.budget_bytes, book.used_bytes), -1
        return Reply(), -1

    def _allocate(self, client: int, nbytes: int) -> tuple[Reply, int]:
        number = self._book.allocate(client, nbytes)
        try:
            file, fd = _memory(number, nbytes)
        except TensorCastError:
            self._book.free(client, number)
            raise
        self._files[number] = file
        return Given(number, nbytes), fd


def _memory(number: int, nbytes: int) -> tuple[MemoryFile, int]:
    """Make a slab's memory and a description of it for its owner."""
    if number >= BOARD_BYTES:
        message = "the emulated device has made a million slabs; close it everywhere and begin again"
        raise CapacityError(message)
    file = MemoryFile(nbytes, name="tensorcast-device")
    try:
        return file, file.write_description()
    except TensorCastError:
        file.close()
        raise


def main(arguments: list[str]) -> None:
    """Serve one device: listening descriptor, folder, budget in bytes."""
    fd, folder, budget = int(arguments[0]), Path(arguments[1]), int(arguments[2])
    listener = socket.socket(fileno=fd)
    listener.settimeout(0)
    server = _Server(listener, str(folder / "lock"), budget)
    server.serve()
    with contextlib.suppress(OSError):
        (folder / hosts.SOCKET_NAME).unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
