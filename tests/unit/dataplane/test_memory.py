from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.dataplane import memory
from tensorcast_dask.tensors.checksums import chunk_count, chunk_range


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, (33 << 20) + 5, 64 << 20])
def test_a_copy_is_the_same_bytes(nbytes: int) -> None:
    source = (os.urandom(min(nbytes, 4099)) * (nbytes // 4099 + 1))[:nbytes]
    target = bytearray(nbytes)
    assert memory.copy(target, source, threads=3) == nbytes
    assert target == source


def test_a_copy_of_a_part_leaves_the_rest() -> None:
    target = bytearray(b"......")
    memory.copy(target, b"abcdef", 3)
    assert target == b"abc..."


def test_a_copy_takes_addresses() -> None:
    source, target = ctypes.create_string_buffer(b"abc", 3), bytearray(3)
    memory.copy(target, ctypes.addressof(source))
    assert target == b"abc"
    with memory.address(target, writable=True) as (at, nbytes):
        memory.copy(at, b"xyz", nbytes)
    assert target == b"xyz"


def test_a_copy_that_does_not_fit_is_refused_before_a_byte_moves() -> None:
    target = bytearray(3)
    with pytest.raises(ValueError, match="do not say"):
        memory.copy(target, b"abcd")
    with pytest.raises(ValueError, match="do not fit"):
        memory.copy(target, b"ab", 3)
    with pytest.raises(ValueError, match="do not say"):
        memory.copy(1, 2)
    assert target == bytes(3)


def test_a_read_only_target_is_refused() -> None:
    with pytest.raises(BufferError):
        memory.copy(b"abc", b"xyz")


def test_a_copy_lets_its_buffers_go() -> None:
    target = bytearray(10)
    memory.copy(target, bytes(10))
    target.extend(b"x")  # a held buffer could not be resized
    with pytest.raises(ValueError, match="do not fit"):
        memory.copy(target, b"", 5)
    target.extend(b"x")


@pytest.mark.parametrize(
    "buffer",
    [
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"abcd"),
        memoryview(b"abcd").cast("I"),
        (ctypes.c_ubyte * 4)(*b"abcd"),
        ctypes.c_uint32.from_buffer_copy(b"abcd"),
    ],
)
def test_flat_shows_the_bytes_of_any_contiguous_buffer(buffer: object) -> None:
    view = memory.flat(buffer)
    assert (view.format, view.ndim, view.tobytes()) == ("B", 1, b"abcd")


def test_flat_keeps_the_buffer_writable_and_alive() -> None:
    view = memory.flat((ctypes.c_ubyte * 4)())
    view[:] = b"abcd"
    assert bytes(view) == b"abcd"
    assert memory.flat((ctypes.c_ubyte * 0)()).nbytes == 0


@given(st.binary(max_size=300), st.integers(1, 64))
def test_chunk_sums_are_the_sums_of_the_chunks(data: bytes, chunk_bytes: int) -> None:
    sums = memory.sums_of(data, chunk_bytes)
    assert len(sums) == chunk_count(len(data), chunk_bytes)
    for chunk, found in enumerate(sums):
        at, n = chunk_range(chunk, len(data), chunk_bytes)
        assert n > 0
        assert found == xxhash.xxh3_64_intdigest(data[at : at + n])


def test_sums_in_threads_are_the_same() -> None:
    data = os.urandom(1 << 20) * 48
    assert (
        memory.sums_of(data, 1 << 20, threads=3)
        == [xxhash.xxh3_64_intdigest(data[: 1 << 20])] * 48
    )


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (5 << 20) + 3])
def test_a_summed_copy_is_a_copy_and_its_sum(nbytes: int) -> None:
    source, target = os.urandom(nbytes), bytearray(nbytes)
    assert memory.copy_summed(target, source) == xxhash.xxh3_64_intdigest(source)
    assert target == source


def test_the_first_error_of_parallel_jobs_is_raised_after_all_ran() -> None:
    ran: list[int] = []

    def job(number: int) -> None:
        ran.append(number)
        if number == 1:
            raise KeyError(number)

    jobs = [lambda n=n: job(n) for n in range(4)]
    with pytest.raises(KeyError):
        memory.run_parallel(jobs, threads=2)
    assert sorted(ran) == [0, 1, 2, 3]


def test_jobs_that_copy_in_pieces_themselves_do_not_wait_for_ever() -> None:
    source = bytes(40 << 20)
    targets = [bytearray(len(source)) for _ in range(4)]
    jobs = [lambda t=t: memory.copy(t, source, threads=2) for t in targets]
    memory.run_parallel(jobs, threads=2)
    assert all(target == source for target in targets)


def test_an_interrupt_returns_only_when_no_job_runs_any_more() -> None:
    started, release = threading.Barrier(3), threading.Event()
    ended: list[int] = []

    def job() -> None:
        started.wait(20)
        release.wait(20)
        ended.append(1)

    def interrupt() -> None:
        started.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        timer.start()

    timer = threading.Timer(0.1, release.set)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        memory.run_parallel([job, job], threads=2)
    assert len(ended) == 2
    thread.join()
    timer.join()


def test_long_hashes_and_copies_let_other_threads_run() -> None:
    """While the GIL were held, the other thread could not count at all."""
    data = bytearray(128 << 20)
    target = bytearray(len(data))
    counted: dict[str, int] = {}

    def count_during(name: str, work: object) -> None:
        stop = threading.Event()
        count = 0

        def counter() -> None:
            nonlocal count
            while not stop.is_set():
                count += 1

        thread = threading.Thread(target=counter)
        thread.start()
        work()  # type: ignore[operator]
        counted[name] = count
        stop.set()
        thread.join()

    count_during("hash", lambda: [memory.sum_of(data) for _ in range(3)])
    count_during("copy", lambda: [memory.copy(target, data) for _ in range(3)])
    # One switch interval is 5 ms; a held GIL would give none in the middle.
    assert min(counted.values()) > 1000, counted
