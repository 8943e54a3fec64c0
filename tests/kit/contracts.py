"""What every implementation of a contract must do, as classes to subclass.

Rules:

1. A subclass names the implementation and gives raw access to it that does not go through
   the code under test.
2. A promise is tested here once; a subclass adds only what its library alone can do.
"""

from __future__ import annotations

import abc
import array
import ctypes
import gc
import math
import os
import random
import struct

import pytest

from tensorcast_dask.dataplane.arrays import (
    RawTensor,
    canonical,
    copy_into,
    copy_out,
    materialise,
    resident_bytes,
    spans,
    write_into,
    zero_gaps,
)
from tensorcast_dask.exceptions import (
    CapacityError,
    InvalidArgument,
    InvalidName,
    Mismatch,
    NotFound,
    UnsupportedDtype,
)
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.specs import Index
from tensorcast_dask.tensors.views import View, s_
from tests.kit.segments import STALE, sealed_file, segment, stored, written

__all__ = ["ArraysContract", "noise"]

SHAPES = [(), (0,), (2, 0), (0, 3, 4), (1,), (1, 1), (7,), (3, 5), (2, 3, 4)]


def noise(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that hold NaNs of every payload, infinities and -0.0 of any dtype."""
    return random.Random(seed).randbytes(nbytes)


class ArraysContract(abc.ABC):
    """One array library, in and out of segments."""

    framework: str

    @abc.abstractmethod
    def dtypes(self) -> list[str]:
        """Names of the dtypes that the library can hold here."""

    @abc.abstractmethod
    def make(self, name: str, shape: tuple[int, ...], data: bytes) -> object:
        """An array in memory of its own with these canonical bytes."""

    @abc.abstractmethod
    def bits(self, value: object) -> bytes:
        """Canonical bytes of the logical values."""

    @abc.abstractmethod
    def meta(self, value: object) -> tuple[str, tuple[int, ...]]:
        """Name of the dtype, and shape."""

    @abc.abstractmethod
    def address(self, value: object) -> int:
        """Where the first element lies."""

    @abc.abstractmethod
    def owned_bytes(self, value: object) -> int:
        """Bytes that the library would save or send with this array."""

    @abc.abstractmethod
    def layouts(self, value: object) -> dict[str, object]:
        """Views of a 4 x 6 array that are not flat, or only a part of it."""

    @abc.abstractmethod
    def fill(self, value: object, number: int) -> None:
        """Assign one number to every element."""

    @abc.abstractmethod
    def rows(self, value: object) -> list[object]:
        """Views of the rows of a 2-d array."""

    @abc.abstractmethod
    def broadcast(self, value: object, shape: tuple[int, ...]) -> object:
        """One element seen at every place of a shape."""

    def array(
        self, shape: tuple[int, ...] = (4, 6), *, name: str = "float32", seed: int = 1
    ) -> object:
        return self.make(
            name, shape, noise(math.prod(shape) * dtype(name).itemsize, seed)
        )

    def read(self, memory: object, index: Index, **how: object) -> dict[str, object]:
        return materialise(memory, index, framework=self.framework, **how)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- P01, P03, P04
    def test_every_dtype_and_shape_comes_back_bit_for_bit(self) -> None:
        for name in self.dtypes():
            tensors = {
                f"{list(shape)}": self.array(shape, name=name, seed=at)
                for at, shape in enumerate(SHAPES)
            }
            memory, index = stored(tensors)
            made = self.read(memory, index)
            assert list(made) == list(tensors)
            for key, value in tensors.items():
                assert self.meta(made[key]) == self.meta(value), (name, key)
                assert self.bits(made[key]) == self.bits(value), (name, key)
                assert index.spec(key).shape == self.meta(value)[1]

    def test_what_is_stored_are_the_canonical_bytes(self) -> None:
        for name in self.dtypes():
            data = noise(24 * dtype(name).itemsize)
            memory, index = stored(self.make(name, (4, 6), data))
            assert memory[: index.nbytes] == data, name

    def test_every_layout_is_stored_by_its_logical_values(self) -> None:
        for name in self.dtypes():
            for layout, value in self.layouts(self.array(name=name)).items():
                memory, index = stored({layout: value})
                made = self.read(memory, index)[layout]
                assert self.meta(made) == self.meta(value), (name, layout)
                assert self.bits(made) == self.bits(value), (name, layout)

    def test_a_zero_size_tensor_takes_no_bytes_and_keeps_its_shape(self) -> None:
        memory, index = stored({"a": self.array((2, 0)), "b": self.array((0, 3, 4))})
        assert index.nbytes == 0
        assert [self.meta(a)[1] for a in self.read(memory, index).values()] == [
            (2, 0),
            (0, 3, 4),
        ]

    # -------------------------------------------------------------------- P05, P37
    def test_tied_tensors_are_stored_once_and_come_back_tied(self) -> None:
        w = self.array()
        memory, index = stored({"embed": w, "head": w, "row": self.rows(w)[0]})
        assert index.content_bytes == 96 + 24
        assert index.ties == (("embed", "head"),)
        made = self.read(memory, index)
        assert self.address(made["embed"]) == self.address(made["head"])
        assert self.bits(made["head"]) == self.bits(w)
        assert self.bits(made["row"]) == self.bits(self.rows(w)[0])
        self.fill(made["embed"], 3)
        assert self.bits(made["head"]) == self.bits(made["embed"])
        assert self.bits(made["row"]) == self.bits(self.rows(w)[0])

    def test_a_view_of_all_of_a_tensor_is_tied_to_it(self) -> None:
        w = self.array((1, 6))
        index, sources = canonical(
            {"w": w, "whole": self.rows(w)[0], "again": self.rows(w)[0]}
        )
        assert index.ties == (("whole", "again"),)  # another shape is another tensor
        assert len(sources) == len(index.sizes) == 2

    def test_equal_tensors_in_memory_of_their_own_are_not_tied(self) -> None:
        index, _ = canonical(
            {"a": self.array(), "b": self.array(), "c": self.array((0,))}
        )
        assert index.ties == ()

    def test_zero_size_tensors_are_tied_only_when_they_are_one(self) -> None:
        empty = self.array((0,))
        index, _ = canonical({"a": empty, "b": self.array((0,)), "c": empty})
        assert index.ties == (("a", "c"),)

    def test_a_thousand_views_of_one_tensor_occupy_it_once(self) -> None:
        big = self.make("float32", (1000, 256), noise(1000 * 1024))
        rows = {f"row {at}": row for at, row in enumerate(self.rows(big))}
        index, sources = canonical(rows)
        assert resident_bytes(sources) == 1000 * 1024
        assert index.content_bytes == 1000 * 1024
        both, sources = canonical(rows | {"whole": big})
        assert resident_bytes(sources) == 1000 * 1024
        assert both.content_bytes == 2 * 1000 * 1024

    def test_one_element_seen_a_thousand_times_occupies_one_element(self) -> None:
        many = self.broadcast(self.make("float32", (1,), noise(4)), (1000,))
        index, sources = canonical({"many": many})
        assert resident_bytes(sources) == 4
        assert index.nbytes == 4000  # its logical values

    def test_a_part_of_a_large_tensor_is_stored_as_that_part(self) -> None:
        row = self.rows(self.array((1000, 256)))[3]
        memory, index = stored(row)
        assert index.nbytes == 1024
        made = self.read(memory, index)["tensor"]
        assert self.owned_bytes(made) == 1024

    def test_nothing_occupies_nothing(self) -> None:
        assert resident_bytes([]) == 0
        assert resident_bytes(canonical(self.array((0,)))[1]) == 0

    # ------------------------------------------------------------- P06, P08, P09
    def test_later_writes_by_the_caller_do_not_show(self) -> None:
        value = self.array((64, 1024))
        before = self.bits(value)
        memory, index = stored(value)
        self.fill(value, 9)
        assert self.bits(self.read(memory, index)["tensor"]) == before

    def test_an_array_keeps_the_buffer_alive(self) -> None:
        value = self.array((64, 1024))
        memory, index = stored({"a": self.array(seed=2), "b": value})
        made = self.read(memory, index)["b"]
        del memory
        gc.collect()
        noise(1 << 20)
        assert self.bits(made) == self.bits(value)

    def test_a_buffer_cannot_be_closed_under_its_arrays(self) -> None:
        memory, index = stored(self.array())
        made = self.read(memory, index)
        with pytest.raises(BufferError):
            memory.close()
        assert made

    def test_an_edit_stays_within_its_tensor(self) -> None:
        tensors = {str(at): self.array(seed=at) for at in range(3)}
        memory, index = stored(tensors)
        made = self.read(memory, index)
        self.fill(made["1"], 0)
        assert self.bits(made["1"]) == bytes(96)
        assert self.bits(made["0"]) == self.bits(tensors["0"])
        assert self.bits(made["2"]) == self.bits(tensors["2"])

    # ---------------------------------------------------------------------- bytes
    def test_a_recycled_segment_shows_nothing_of_its_former_content(self) -> None:
        memory, index = stored({"a": self.array((3,)), "b": self.array((5,))})
        for offset, nbytes in index.gaps():
            assert memory[offset : offset + nbytes] == bytes(nbytes)
        assert STALE not in memory[12:64]

    def test_gaps_can_be_zeroed_alone(self) -> None:
        index = Index.of(
            [*canonical({"a": self.array((3,)), "b": self.array((5,))})[0].specs()]
        )
        memory = segment(index.nbytes)
        zero_gaps(memory, index)
        assert memory[:64] == bytes([STALE]) * 12 + bytes(52)

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_any_number_of_threads_copies_the_same_bytes(self, threads: int) -> None:
        shapes = [(3, 7), (1024, 1031), (5,), (640, 513), (1 << 20,), ()]
        tensors = {str(s): self.array(s, seed=at) for at, s in enumerate(shapes)}
        tensors["strided"] = self.layouts(self.array())["transposed"]
        memory, index = stored(tensors, threads=threads)
        for key, made in self.read(memory, index).items():
            assert self.bits(made) == self.bits(tensors[key])
        targets = {
            key: self.array(self.meta(v)[1], seed=99) for key, v in tensors.items()
        }
        copy_out(memory, index, targets, threads=threads)
        for key, target in targets.items():
            assert self.bits(target) == self.bits(tensors[key])

    def assorted(self) -> dict[str, object]:
        """Big and small, flat and not, side by side and with gaps."""
        shapes = [
            (3, 7),
            (1024, 300),
            (5,),
            *[(16,)] * 30,
            (700, 513),
            (),
            (0, 2),
            (9,),
        ]
        tensors = {
            f"{at}": self.array(shape, seed=at) for at, shape in enumerate(shapes)
        }
        tensors["strided"] = self.layouts(self.array())["transposed"]
        tensors["big and strided"] = self.layouts(self.array((640, 512)))["transposed"]
        tensors |= {f"kind {name}": self.array(name=name) for name in self.dtypes()}
        return tensors | {
            f"bool {at}": self.array((64,), name="bool") for at in range(20)
        }

    def test_a_file_gets_the_same_bytes_as_a_map(self) -> None:
        tensors = self.assorted()
        memory, index = stored(tensors)
        for name, value in tensors.items():
            entry = index.entry(name)
            assert memory[entry.offset : entry.offset + entry.nbytes] == self.bits(
                value
            )
        assert written(canonical(tensors)[1], index) == memory[: index.nbytes]

    def test_a_file_of_another_layout_gets_its_bytes_and_zeros_between(self) -> None:
        packed, sources = canonical(self.assorted())
        offsets, end = [0] * len(packed.sizes), 100
        for at in reversed(range(len(offsets))):
            offsets[at] = -(-end // 64) * 64
            end = offsets[at] + packed.sizes[at] + {0: 9 << 20, 1: 5000}.get(at % 10, 0)
        index = Index(
            packed.names,
            packed.dtypes,
            packed.shapes,
            entry_of=packed.entry_of,
            offsets=offsets,
            nbytes=end,
        )
        memory = segment(index.nbytes)
        copy_into(sources, index, memory)
        assert written(sources, index) == memory[: index.nbytes]
        for offset, nbytes in index.gaps():
            assert not any(memory[offset : offset + nbytes])

    def test_a_file_that_cannot_take_the_bytes_is_a_capacity_error(self) -> None:
        for value in (self.array(), self.layouts(self.array((640, 512)))["transposed"]):
            index, sources = canonical(value)
            fd = sealed_file(index.nbytes - 1)
            try:
                with pytest.raises(CapacityError):
                    write_into(sources, index, fd)
            finally:
                os.close(fd)

    def test_a_file_that_takes_only_a_part_is_a_capacity_error(self) -> None:
        tensors = {str(at): self.array((256,), seed=at) for at in range(100)}
        index, sources = canonical(tensors)
        fd = sealed_file(50 << 10)  # half of one call
        try:
            with pytest.raises(CapacityError):
                write_into(sources, index, fd)
            assert os.pread(fd, 1024, 0) == self.bits(tensors["0"])
        finally:
            os.close(fd)

    def test_spans_name_the_memory_of_what_is_flat(self) -> None:
        tensors = self.assorted()
        memory, index = stored(tensors)
        _, sources = canonical(tensors)
        table, others = spans(sources, index)
        found = bytearray(memory[: index.nbytes])
        covered = 0
        for offset, start, nbytes in struct.iter_unpack("<3Q", table):
            found[offset : offset + nbytes] = ctypes.string_at(start, nbytes)
            covered += nbytes
        assert found == memory[: index.nbytes]
        assert [index.names[at] for at in others] == ["strided", "big and strided"]
        assert covered + sum(index.sizes[at] for at in others) == index.content_bytes

    def test_tensors_that_already_lie_side_by_side_are_one_span(self) -> None:
        rows = self.rows(self.array((100, 16)))
        index, sources = canonical({str(at): row for at, row in enumerate(rows)})
        table, others = spans(sources, index)
        assert (len(table), others) == (24, [])

    def test_tensors_that_already_lie_side_by_side_are_copied_as_one(self) -> None:
        big = self.array((3000, 256))
        rows = {str(at): row for at, row in enumerate(self.rows(big))}
        first = dict(list(rows.items())[:1500])
        tensors = {
            **first,
            "between": self.array((5,)),
            **rows,
            "after": self.array((7,)),
        }
        memory, index = stored(tensors)
        for name, made in self.read(memory, index).items():
            assert self.bits(made) == self.bits(tensors[name])
        assert written(canonical(tensors)[1], index) == memory[: index.nbytes]
        again, same = stored(self.read(memory, index))
        assert same == index
        assert again[:] == memory[:]

    def test_an_address_is_as_good_as_a_buffer(self) -> None:
        index, sources = canonical(self.array(seed=3))
        room = self.array(seed=4)
        copy_into(sources, index, self.address(room))
        assert self.bits(room) == self.bits(self.array(seed=3))

    def test_a_buffer_that_is_too_small_or_read_only_is_refused(self) -> None:
        index, sources = canonical(self.array())
        for buffer in (bytearray(95), bytes(96)):
            with pytest.raises(InvalidArgument):
                copy_into(sources, index, buffer)
        with pytest.raises(InvalidArgument):
            self.read(bytearray(95), index)
        with pytest.raises(InvalidArgument):
            copy_out(bytearray(95), index, {"tensor": self.array()})

    # -------------------------------------------------------------- names and views
    def test_a_single_tensor_is_called_tensor(self) -> None:
        memory, index = stored(self.array())
        assert list(self.read(memory, index)) == ["tensor"]

    def test_no_tensors_at_all_come_back_as_none(self) -> None:
        memory, index = stored({})
        assert self.read(memory, index) == {}

    def test_names_choose_tensors_in_the_order_given(self) -> None:
        w = self.array()
        memory, index = stored({"a": w, "b": self.array(seed=2), "tied": w})
        made = self.read(memory, index, names=["tied", "a", "tied"])
        assert list(made) == ["tied", "a"]
        assert self.address(made["a"]) == self.address(made["tied"])
        assert self.read(memory, index, names=[]) == {}
        with pytest.raises(NotFound):
            self.read(memory, index, names=["a", "nobody"])

    def test_a_view_reads_the_part_that_it_describes(self) -> None:
        w = self.array()
        memory, index = stored({"w": w, "other": self.array(seed=2)})
        view = View.of({"w": s_[1:3]})
        made = self.read(memory, index, view=view)
        assert list(made) == ["w"]
        assert self.meta(made["w"])[1] == (2, 6)
        assert self.bits(made["w"]) == self.bits(w)[24:72]
        assert self.read(memory, index, view=view.resolve(index), names=[]) == {}
        with pytest.raises(NotFound):
            self.read(memory, index, view=view, names=["other"])

    def test_tied_parts_of_a_view_are_one_array(self) -> None:
        w = self.array()
        memory, index = stored({"a": w, "b": w})
        for key in (s_[1:], s_[::-1]):
            made = self.read(memory, index, view=View.of({"a": key, "b": key}))
            assert self.address(made["a"]) == self.address(made["b"])

    def test_raw_gives_bytes_without_the_library(self) -> None:
        w = self.array()
        memory, index = stored({"w": w, "zero": self.array((0, 2)), "again": w})
        made = materialise(memory, index, framework="raw")
        for name, shape in (("w", (4, 6)), ("zero", (0, 2)), ("again", (4, 6))):
            raw = made[name]
            assert isinstance(raw, RawTensor)
            assert (raw.spec.name, raw.spec.shape) == (name, shape)
            assert bytes(raw.data) == self.bits(w)[: math.prod(shape) * 4]
        part = materialise(
            memory, index, framework="raw", view=View.transpose({"w": None})
        )
        transposed = self.layouts(w)["transposed"]
        assert isinstance(part["w"], RawTensor)
        assert bytes(part["w"].data) == self.bits(transposed)

    def test_any_writable_buffer_can_be_read(self) -> None:
        w = self.array()
        memory, index = stored(w)
        content = memory[: index.nbytes]
        numbers = array.array("Q", content)
        exported = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)
        for buffer in (bytearray(content), memoryview(numbers), exported):
            assert self.bits(self.read(buffer, index)["tensor"]) == self.bits(w)
            raw = materialise(buffer, index, framework="raw")["tensor"]
            assert isinstance(raw, RawTensor)
            assert raw.data.cast("f").shape == (24,)
            target = self.array(seed=2)
            copy_out(buffer, index, {"tensor": target})
            assert self.bits(target) == self.bits(w)

    # ------------------------------------------------------------------- refusals
    @pytest.mark.parametrize(
        "value",
        [None, 1, 1.5, True, "text", b"bytes", [1, 2], (1, 2), object(), range(3)],
    )
    def test_what_is_no_array_is_refused(self, value: object) -> None:
        with pytest.raises(UnsupportedDtype):
            canonical({"fine": self.array(), "x": value})

    @pytest.mark.parametrize("name", ["", " ", "a\n", 3, None, "x" * 513])
    def test_what_is_no_name_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidName):
            canonical({"fine": self.array(), name: self.array(seed=2)})

    # ----------------------------------------------------------- a caller's own arrays
    def test_targets_of_any_layout_are_filled(self) -> None:
        for name in self.dtypes():
            value = self.array(name=name, seed=5)
            memory, index = stored(value)
            backing = self.array((6, 4), name=name, seed=6)
            target = self.layouts(backing)["transposed"]
            copy_out(memory, index, {"tensor": target})
            assert self.bits(target) == self.bits(value), name

    def test_targets_choose_which_tensors_are_read(self) -> None:
        memory, index = stored(
            {"a": self.array(), "b": self.array(seed=2), "z": self.array((0,))}
        )
        target = self.array(seed=3)
        copy_out(memory, index, {"b": target, "z": self.array((0,))})
        assert self.bits(target) == self.bits(self.array(seed=2))

    def test_targets_that_do_not_fit_are_all_named_before_a_byte_moves(self) -> None:
        memory, index = stored({n: self.array(seed=at) for at, n in enumerate("abcd")})
        fine = self.array(seed=9)
        before = self.bits(fine)
        shape = self.array((6, 4), seed=9)
        kind = self.array(name="int32", seed=9)
        element = self.make("float32", (1,), noise(4))
        wide = self.broadcast(element, (4, 6))
        with pytest.raises(Mismatch, match=r"'b'.*'c'.*'d'"):
            copy_out(memory, index, {"a": fine, "b": shape, "c": kind, "d": wide})
        assert self.bits(fine) == before
        assert self.bits(element) == noise(4)
        with pytest.raises(Mismatch, match="another target"):
            copy_out(memory, index, {"a": fine, "b": fine})
        with pytest.raises(NotFound):
            copy_out(memory, index, {"a": fine, "nobody": fine})
        assert self.bits(fine) == before

    def test_tied_tensors_may_fill_one_target(self) -> None:
        w = self.array()
        memory, index = stored({"a": w, "b": w})
        target = self.array(seed=2)
        copy_out(memory, index, {"a": target, "b": target})
        assert self.bits(target) == self.bits(w)
