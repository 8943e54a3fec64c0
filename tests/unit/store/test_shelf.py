from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorcast_dask.exceptions import CapacityError
from tensorcast_dask.store.shelf import LentFile, Shelf


def test_a_segment_is_ours_alone_until_somebody_has_a_description() -> None:
    shelf = Shelf()
    file = shelf.make(1, 4096)
    assert shelf.alone(1)
    assert not shelf.mapped(1)
    fd = file.read_description()
    assert shelf.mapped(1)
    assert not shelf.freeze(1)
    os.close(fd)
    assert shelf.freeze(1)
    shelf.close(1)
    shelf.settle()
    assert file.closed
    assert 1 not in shelf


def test_who_freezes_waits_for_descriptions_that_are_on_their_way() -> None:
    shelf = Shelf()
    shelf.make(1, 4096)
    assert shelf.sent(1)  # at once
    fd, done = shelf.lend_writer(1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(shelf.sent, 1)
        other, other_done = shelf.lend_writer(1)
        for last, said in ((other, other_done), (fd, done)):
            assert not waiting.done()
            os.close(last)
            said()
        assert waiting.result(timeout=10)
    assert shelf.freeze(1)
    shelf.close(1)


def test_files_are_refused_before_descriptors_run_out() -> None:
    shelf = Shelf(max_descriptors=2)
    shelf.make(1, 4096)
    fd = shelf.make(2, 4096).read_description()
    with pytest.raises(CapacityError, match="descriptors"):
        shelf.make(3, 4096)
    with pytest.raises(CapacityError):
        shelf.lend(4, fd, 4096)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)  # it was ours, and was closed
    shelf.close(1)
    shelf.make(3, 4096)
    assert len(shelf) == 2
    for segment in (2, 3):
        shelf.close(segment)
    shelf.settle()


def test_a_lent_file_is_read_and_handed_on_and_outlives_its_owner() -> None:
    owner, other = Shelf(), Shelf()
    file = owner.make(1, 4096)
    os.pwrite(file.fd, b"bytes", 0)
    other.lend(7, file.read_description(), 4096)
    owner.close(1)
    owner.settle()
    lent = other.get(7)
    assert isinstance(lent, LentFile)
    assert bytes(lent.map_shared().view[:5]) == b"bytes"
    fd = lent.read_description()
    assert os.pread(fd, 5, 0) == b"bytes"
    os.close(fd)
    with pytest.raises(OSError, match=r"not permitted|Permission|Bad file"):
        os.pwrite(lent.fd, b"x", 0)
    other.close(7)
    other.settle()
