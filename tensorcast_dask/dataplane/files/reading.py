"""Reading an open model into memory: every byte once, in parallel, checked as it passes.

Measured, in CPU seconds for a GB out of the page cache, hashing included: into memory that
is mapped and touched 0.14; into a memory file whose pages are there 0.34, by blocks of 1 MiB
through a small buffer (smaller ones cost more), hashed while they are in the core's cache;
into a map of it that nobody has touched 0.59; into fresh pages 0.60 by the file and 1.00 by a
map. Hence a descriptor for whatever is not mapped and touched already.

Rules:

1. A short read, or a file that is no longer the one that was opened, is FileChanged; a
   chunk that does not hash to what its file says is CorruptFile. Either way what the
   destination holds is not to be used.
2. Bytes of the segment that belong to no tensor are written as zeros: a recycled segment
   shows nothing of its past.
3. O_DIRECT is an offer: where the file system refuses it, the file is small, or the page
   cache has it already, the file is read through the cache.
4. Threads end before the call does, also when it fails.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from xxhash import xxh3_64

from tensorcast_dask.dataplane import faults, memory
from tensorcast_dask.dataplane.fileranges import write_all
from tensorcast_dask.dataplane.files.opening import system_errors
from tensorcast_dask.dataplane.files.pieces import (
    BLOCK_BYTES,
    IOV_MAX,
    bounce_buffer,
    overlap,
)
from tensorcast_dask.exceptions import CorruptFile, FileChanged, InvalidArgument
from tensorcast_dask.tensors.checksums import encode_sums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.files.model import Model, ModelFile

__all__ = ["CHUNK_BYTES", "ReadReport", "read_into", "segment_sums", "verify"]

#: Unit of a checksum and of a thread's work, where the file does not say otherwise.
CHUNK_BYTES: Final = 8 << 20

_PAGE: Final = 4096
_DIRECT_MIN_BYTES: Final = 64 << 20
_CACHE_SAMPLES: Final = 16


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How a model was read."""

    nbytes: int
    """Bytes of tensors."""
    direct: bool
    """Whether any file was read past the page cache."""
    verified: bool
    """Whether every file brought checksums, which were right."""
    chunk_bytes: int
    sums: tuple[int, ...] | None
    """xxh3 of each chunk of the segment, where the file's data are laid out as it is."""


def read_into(
    model: Model,
    dest: int | memoryview,
    *,
    offset: int = 0,
    threads: int = 2,
    direct: bool | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> ReadReport:
    """Fill a segment with a model.

    Parameters
    ----------
    model : Model
        An open model; its `index` says what the segment will hold.
    dest : int or memoryview
        A descriptor of a memory file, written with `pwrite`, or writable memory.
    offset : int
        Where in `dest` the segment begins.
    threads : int
        Most that read at a time.
    direct : bool, optional
        Whether to read past the page cache; by default what is likely faster.
    on_bytes : callable, optional
        Called with the bytes of each block that has arrived, from several threads, one at
        a time. What it raises ends the read.

    Raises
    ------
    FileChanged
        When a file was written to or cut since it was opened.
    CorruptFile
        When bytes do not match their checksum; the file and a tensor are named.
    CapacityError
        When the destination has no room.
    """
    target = _target(dest, offset, model.index.nbytes)
    for at, nbytes in model.index.gaps():
        target.zero(at, nbytes)
    return _run(model, target, threads=threads, direct=direct, on_bytes=on_bytes)


def verify(model: Model, *, threads: int = 2, direct: bool | None = None) -> ReadReport:
    """Read a model for its checksums alone; raises as `read_into`."""
    return _run(model, _NoTarget(), threads=threads, direct=direct, on_bytes=None)


def segment_sums(model: Model, chunk_bytes: int) -> bytes:
    """Read a model for the encoded sums of the segment that it would be.

    Where the file's own chunks are not the segment's it takes memory for all of it.
    """
    report = verify(model)
    if report.sums is not None and report.chunk_bytes == chunk_bytes:
        return encode_sums(report.sums)
    content = memory.private(model.index.nbytes)
    read_into(model, content)
    return encode_sums(memory.sums_of(content, chunk_bytes))


def _run(
    model: Model,
    target: _Target,
    *,
    threads: int,
    direct: bool | None,
    on_bytes: Callable[[int], None] | None,
) -> ReadReport:
    with ExitStack() as stack:
        files = [_OpenFile(file, stack, direct=direct) for file in model.files]
        _Work(files, target, on_bytes).run(threads)
    for file in model.files:
        file.identity.check(file.fd, path=file.path)
    first = files[0] if len(files) == 1 else None
    return ReadReport(
        nbytes=model.file_nbytes,
        direct=any(file.direct_fd is not None for file in files),
        verified=all(file.file.sums is not None for file in files),
        chunk_bytes=files[0].chunk_bytes if files else CHUNK_BYTES,
        sums=tuple(first.found) if first is not None and first.identical else None,
    )


# ---------------------------------------------------------------------- source


class _OpenFile:
    """One file, how it is read, and what its chunks hashed to."""

    def __init__(
        self, file: ModelFile, stack: ExitStack, *, direct: bool | None
    ) -> None:
        self.file = file
        self.begin = file.header.data_start
        self.end = file.header.file_size
        self.chunk_bytes = file.sums.chunk_bytes if file.sums else CHUNK_BYTES
        chunks = -(-(self.end - self.begin) // self.chunk_bytes)
        self.found: list[int] = [0] * chunks
        self.direct_fd: int | None = None
        if direct is True or (direct is None and self._is_cold()):
            with suppress(OSError):
                flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
                fd = os.open(f"/proc/self/fd/{file.fd}", flags)
                stack.callback(os.close, fd)
                self.direct_fd = fd
        if self.direct_fd is None:
            with suppress(OSError):
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @property
    def identical(self) -> bool:
        """Whether the data and the segment are the same bytes."""
        pieces = self.file.pieces
        whole = len(pieces) == 1 and pieces[0].segment_offset == 0
        return whole and pieces[0].nbytes == self.end - self.begin

    def _is_cold(self) -> bool:
        """Say whether the file is long and most of it is not in the page cache."""
        length = self.end - self.begin
        if length < _DIRECT_MIN_BYTES:
            return False
        cold = 0
        for n in range(_CACHE_SAMPLES):
            try:
                at = self.begin + length * n // _CACHE_SAMPLES
                os.preadv(self.file.fd, [bytearray(1)], at, os.RWF_NOWAIT)
            except BlockingIOError:
                cold += 1
            except OSError:
                return False  # this file system cannot tell
        return cold > _CACHE_SAMPLES // 2

    def read(self, buffers: list[memoryview], at: int, *, direct: bool) -> int:
        """Read at byte `at` of the file; return how much came."""
        with system_errors(self.file.path):
            if direct and self.direct_fd is not None:
                try:
                    return os.preadv(self.direct_fd, buffers, at)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct_fd = None  # the promise of open() did not hold
            return os.preadv(self.file.fd, buffers, at)

    def short(self) -> FileChanged:
        """Make the error of a file that ended too early."""
        message = f"{self.file.path} was cut while it was read; load it again when its writer is done"
        return FileChanged(message, {"file": self.file.path})

    def settle(self, chunk: int, value: int) -> None:
        """Keep a chunk's sum; raise when it is not what the file says."""
        self.found[chunk] = value
        sums = self.file.sums
        if sums is None or sums.values[chunk] == value:
            return
        path = self.file.path
        self.file.identity.check(self.file.fd, path=path)
        begin = chunk * self.chunk_bytes
        tensor = next(
            entry.name
            for entry in self.file.header.entries
            if entry.begin < begin + self.chunk_bytes and entry.end > begin
        )
        message = f"{path}, tensor {tensor!r} or a neighbour: its bytes do not match their checksum; get the file again"
        raise CorruptFile(message, {"file": path, "tensor": tensor, "chunk": chunk})


# ----------------------------------------------------------------- destination


class _Target(Protocol):
    def zero(self, at: int, nbytes: int) -> None:
        """Clear bytes of the segment."""

    def take(
        self, file: _OpenFile, begin: int, end: int, bounce: memoryview
    ) -> list[memoryview]:
        """Bring bytes of the file from `begin`, not beyond `end`; return them, some at least."""


def _target(dest: int | memoryview, offset: int, nbytes: int) -> _Target:
    if isinstance(dest, int):
        return _FdTarget(dest, offset)
    try:
        flat = dest.cast("B")
    except TypeError as error:
        message = f"the destination must be contiguous memory ({error})"
        raise InvalidArgument(message) from error
    if flat.readonly or len(flat) < offset + nbytes:
        message = (
            f"the destination must be writable and take {nbytes} bytes from {offset} on"
        )
        raise InvalidArgument(message)
    return _MemoryTarget(flat[offset : offset + nbytes])


def _fill(file: _OpenFile, begin: int, end: int, bounce: memoryview) -> memoryview:
    """Read the next block of the file into `bounce`; return the part from `begin` on."""
    direct = file.direct_fd is not None
    low = begin - begin % _PAGE if direct else begin
    high = min(end, low + BLOCK_BYTES)
    want = high - low
    got = file.read(
        [bounce[: -(-want // _PAGE) * _PAGE if direct else want]], low, direct=direct
    )
    if got <= begin - low:
        raise file.short()
    return bounce[begin - low : min(got, want)]


class _FdTarget:
    """A memory file, written block by block."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._offset = offset

    def zero(self, at: int, nbytes: int) -> None:
        while nbytes:
            step = min(nbytes, BLOCK_BYTES)
            self._write(memoryview(bytes(step)), at)
            at, nbytes = at + step, nbytes - step

    def take(
        self, file: _OpenFile, begin: int, end: int, bounce: memoryview
    ) -> list[memoryview]:
        block = _fill(file, begin, end, bounce)
        for piece in overlap(file.file.pieces, begin, begin + len(block)):
            low = piece.file_offset - begin
            self._write(block[low : low + piece.nbytes], piece.segment_offset)
        return [block]

    def _write(self, data: memoryview, at: int) -> None:
        with system_errors("the segment", need_bytes=len(data)):
            write_all(self._fd, data, self._offset + at)


class _MemoryTarget:
    """Memory of this process, read into directly unless O_DIRECT asks for a detour."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def zero(self, at: int, nbytes: int) -> None:
        self._memory[at : at + nbytes] = bytes(nbytes)

    def take(
        self, file: _OpenFile, begin: int, end: int, bounce: memoryview
    ) -> list[memoryview]:
        if file.direct_fd is not None:
            block = _fill(file, begin, end, bounce)
            for piece in overlap(file.file.pieces, begin, begin + len(block)):
                low = piece.file_offset - begin
                into = self._memory[
                    piece.segment_offset : piece.segment_offset + piece.nbytes
                ]
                into[:] = block[low : low + piece.nbytes]
            return [block]
        buffers: list[memoryview] = []
        for piece in overlap(file.file.pieces, begin, min(end, begin + BLOCK_BYTES)):
            buffers.append(
                self._memory[piece.segment_offset : piece.segment_offset + piece.nbytes]
            )
            if len(buffers) == IOV_MAX:
                break
        got = file.read(buffers, begin, direct=False)
        if not got:
            raise file.short()
        return list(_first(buffers, got))


class _NoTarget:
    """Nowhere: the bytes are only hashed."""

    def zero(self, at: int, nbytes: int) -> None:
        pass

    def take(
        self, file: _OpenFile, begin: int, end: int, bounce: memoryview
    ) -> list[memoryview]:
        return [_fill(file, begin, end, bounce)]


def _first(buffers: list[memoryview], nbytes: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if nbytes <= 0:
            return
        yield buffer[:nbytes]
        nbytes -= len(buffer)


# ------------------------------------------------------------------------ work


class _Work:
    """Chunks of files, taken by threads one at a time."""

    def __init__(
        self,
        files: list[_OpenFile],
        target: _Target,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._jobs = iter(
            [(file, chunk) for file in files for chunk in range(len(file.found))]
        )
        self._count = sum(len(file.found) for file in files)
        self._target = target
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._failed = False

    def run(self, threads: int) -> None:
        threads = min(threads, self._count)
        if threads <= 1:
            self._loop()
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="tensorcast-read") as pool:
            futures = [pool.submit(self._loop) for _ in range(threads)]
            try:
                for future in futures:
                    future.result()
            finally:
                self._failed = True  # whoever is still at work stops, also on Ctrl-C

    def _loop(self) -> None:
        bounce = bounce_buffer()
        done = False
        try:
            while not self._failed and (job := self._next()) is not None:
                self._chunk(*job, bounce)
            done = True
        finally:
            self._failed = self._failed or not done

    def _next(self) -> tuple[_OpenFile, int] | None:
        with self._lock:
            return next(self._jobs, None)

    def _chunk(self, file: _OpenFile, chunk: int, bounce: memoryview) -> None:
        faults.point("load.chunk", file.file.path)
        at = file.begin + chunk * file.chunk_bytes
        end = min(at + file.chunk_bytes, file.end)
        sum_ = xxh3_64()
        while at < end and not self._failed:
            arrived = 0
            for part in self._target.take(file, at, end, bounce):
                sum_.update(part)
                arrived += len(part)
            at += arrived
            if self._on_bytes is not None:
                with self._lock:
                    self._on_bytes(arrived)
        if at == end:
            file.settle(chunk, sum_.intdigest())
