"""What an emulated device has given to whom."""

from __future__ import annotations

import pytest

from tensorcast_dask.dataplane.devices.emulated_book import Book
from tensorcast_dask.exceptions import CapacityError, OwnerGone

OWNER, READER, OTHER = 1, 2, 3


def test_the_budget_is_filled_to_the_last_byte() -> None:
    book = Book(100)
    first = book.allocate(OWNER, 60)
    book.allocate(OTHER, 40)
    with pytest.raises(CapacityError) as caught:
        book.allocate(OWNER, 1)
    assert caught.value.data == {"tier": "device", "needed": 1, "free": 0}
    assert book.free(OWNER, first) == [first]
    assert book.used_bytes == 40
    assert book.allocate(OWNER, 60) != first


def test_only_the_owner_frees_and_once() -> None:
    book = Book(100)
    slab = book.allocate(OWNER, 10)
    assert book.free(OTHER, slab) == []
    assert book.free(OWNER, slab) == [slab]
    assert book.free(OWNER, slab) == []
    assert book.used_bytes == 0


def test_room_comes_back_with_the_last_opener() -> None:
    book = Book(100)
    slab = book.allocate(OWNER, 10)
    assert book.open(READER, slab) == book.open(OTHER, slab) == 10
    assert book.free(OWNER, slab) == []
    with pytest.raises(OwnerGone):
        book.open(4, slab)
    assert book.close(READER, slab) == []
    assert book.used_bytes == 10
    assert book.leave(OTHER) == [slab]
    assert book.used_bytes == 0


def test_closing_does_not_free() -> None:
    book = Book(100)
    slab = book.allocate(OWNER, 10)
    book.open(READER, slab)
    assert book.close(READER, slab) == []
    assert book.close(READER, 99) == []
    assert book.slabs == (slab,)


def test_the_end_of_an_owner_ends_its_slabs_for_everybody() -> None:
    book = Book(100)
    mine, others = book.allocate(OWNER, 10), book.allocate(OTHER, 20)
    book.open(READER, mine)
    book.open(OWNER, others)
    assert book.leave(OWNER) == [mine]
    assert book.used_bytes == 20
    with pytest.raises(OwnerGone):
        book.open(READER, mine)
    assert book.close(READER, mine) == []
    assert book.free(OTHER, others) == [others]
