"""Parts of an artifact, described and not copied.

Rules:

1. A `View` is what a caller wrote: a chain of steps, each naming the tensors it keeps and
   how each is cut (basic slicing: ints, slices, one ellipsis) and then transposed.
2. `resolve` binds a view to an index and checks all of it. A `ResolvedView` is the normal
   form: per name one box of the base tensor in base order, and the strides with which the
   result reads it. Equivalent chains resolve to equal values, in the base's put order.
3. A view's id follows from the base's generation and the normal form alone: two callers who
   describe the same view get the same id, in every process.
4. The bytes of a view are its boxes; a transpose or a reversal moves none. `packed` is the
   index of a segment that holds just the boxes, with the view that reads it back.
5. Tied names that are cut alike stay tied; cut differently they are tensors of their own.
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Final, SupportsIndex

import msgspec

from tensorcast_dask.exceptions import CorruptFile, InvalidArgument, NotFound
from tensorcast_dask.tensors.boxes import (
    Box,
    Runs,
    box_runs,
    c_strides,
    whole,
)
from tensorcast_dask.tensors.ids import ArtifactId, check_name
from tensorcast_dask.tensors.specs import Index, Shape, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import EllipsisType

    from tensorcast_dask.tensors.dtypes import DType
    from tensorcast_dask.tensors.ids import Generation

    _Bound = SupportsIndex | None
    #: What may stand between the brackets.
    Part = SupportsIndex | slice[_Bound, _Bound, _Bound] | EllipsisType
    Key = Part | tuple[Part, ...]

__all__ = ["Brackets", "Cut", "ResolvedView", "View", "ViewTensor", "s_", "view_id"]

_FORMAT: Final = 1
_LIMIT: Final = 1 << 62  # beyond any shape; keeps bounds in 64 bits

#: A slice.
Bounds = tuple[int | None, int | None, int | None]
#: An int, a slice, or None for the ellipsis.
Item = int | Bounds | None
#: What a step does to one tensor: items, then axes.
_Step = tuple[tuple[Item, ...], tuple[int, ...] | None]


class Brackets:
    """`s_[...]` is the key that stands between the brackets."""

    def __getitem__(self, key: Key) -> Key:
        """Return the key."""
        return key


s_: Final = Brackets()


class Cut(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How one tensor is cut, then transposed.

    Attributes
    ----------
    name : str
        Of the tensor, in the view so far.
    items : tuple
        What stands between the brackets.
    axes : tuple of int or None
        Order of the axes afterwards, as for numpy's `transpose`; None keeps it.
    """

    name: str
    items: tuple[Item, ...] = ()
    axes: tuple[int, ...] | None = None


class _Wire(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: int
    steps: tuple[tuple[Cut, ...], ...]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Wire)


def _bound(value: SupportsIndex | None, what: str) -> int | None:
    if value is None:
        return None
    try:
        return max(-_LIMIT, min(_LIMIT, operator.index(value)))
    except TypeError as error:
        message = f"a slice's {what} must be an integer or left out, not {value!r}"
        raise InvalidArgument(message) from error


def _item(part: object) -> Item:
    """Translate what stands between the brackets, or refuse it."""
    if part is Ellipsis:
        return None
    if isinstance(part, slice):
        step = _bound(part.step, "step")
        if step == 0:
            message = "a slice's step cannot be 0"
            raise InvalidArgument(message)
        return _bound(part.start, "start"), _bound(part.stop, "stop"), step
    # A bool is a mask to numpy and a new axis to torch, None is a new axis to both.
    if isinstance(part, SupportsIndex) and not isinstance(part, bool):
        try:
            at = operator.index(part)
        except (
            TypeError
        ):  # an array that offers the method and has more than one element
            at = _LIMIT
        if -_LIMIT < at < _LIMIT:
            return at
    message = (
        f"a view is cut with integers, slices and one ellipsis, not with {part!r}; "
        "take the tensor and index it there"
    )
    raise InvalidArgument(message)


_ALL: Final = (None, None, None)


def _items(key: object) -> tuple[Item, ...]:
    parts = key if isinstance(key, tuple) else (key,)
    items = tuple(map(_item, parts))
    if items == (_ALL,) and not isinstance(key, tuple):  # also of what has no axes
        return ()
    if items.count(None) > 1:
        message = "only one ellipsis can stand between the brackets"
        raise InvalidArgument(message)
    return items


class View(msgspec.Struct, frozen=True):
    """A chain of cuts; the view of everything when there are none.

    Attributes
    ----------
    steps : tuple of tuple of Cut
        Each step keeps the tensors that it names.
    """

    steps: tuple[tuple[Cut, ...], ...] = ()

    @classmethod
    def of(cls, keys: Mapping[str, Key]) -> View:
        """Keep the named tensors, each cut by its key.

        Raises
        ------
        InvalidArgument
            For a key that is not basic slicing, or no names at all.
        InvalidName
            For what cannot be a tensor's name.
        """
        cuts = [Cut(_name(name), _items(key)) for name, key in keys.items()]
        return cls(_step(cuts))

    @classmethod
    def select(cls, names: Iterable[str]) -> View:
        """Keep the named tensors whole; refusals as for `of`."""
        return cls(_step([Cut(_name(name)) for name in dict.fromkeys(names)]))

    @classmethod
    def transpose(cls, axes: Mapping[str, tuple[int, ...] | None]) -> View:
        """Keep the named tensors with their axes in another order; None reverses them.

        Refusals as for `of`; whether the axes fit is seen when the view is resolved.
        """
        cuts = [
            Cut(_name(name), (), _REVERSED if order is None else _axes(order))
            for name, order in axes.items()
        ]
        return cls(_step(cuts))

    def then(self, other: View) -> View:
        """Return the view that `other` describes of this one's tensors."""
        return View(self.steps + other.steps)

    def encode(self) -> bytes:
        """Return the view as bytes, as the caller wrote it."""
        return _ENCODER.encode(_Wire(_FORMAT, self.steps))

    @classmethod
    def decode(cls, data: bytes) -> View:
        """Read what `encode` wrote.

        Raises
        ------
        CorruptFile
            When the bytes are not a view.
        """
        try:
            wire = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = f"these bytes are not a view: {error}"
            raise CorruptFile(message) from error
        if wire.format != _FORMAT:
            message = f"view format {wire.format} is not known to this release"
            raise CorruptFile(message)
        return cls(wire.steps)

    def resolve(self, index: Index) -> ResolvedView:
        """Bind the view to an index; everything is checked here.

        Raises
        ------
        NotFound
            For a name that is not there, or no longer.
        InvalidArgument
            For a cut or an order of axes that does not fit its tensor.
        """
        chains = self._chains(index)
        # Tensors of one shape that are cut alike, as those of many layers, are worked out once.
        known: dict[tuple[Shape, tuple[_Step, ...]], _Part] = {}
        tensors: list[ViewTensor] = []
        for name in index.names if len(chains) > 1 else chains:
            chain = chains.get(name)
            if chain is None:
                continue
            key = (index.shapes[index.position(name)], chain)
            part = known.get(key)
            if part is None:
                part = known[key] = _Part.of(key[0], chain, name)
            tensors.append(part.tensor(index, name))
        return ResolvedView(tuple(tensors))

    def _chains(self, index: Index) -> dict[str, tuple[_Step, ...]]:
        """List what is done, in turn, to each tensor that is kept."""
        if not self.steps:
            return dict.fromkeys(index.names, ())
        kept: dict[str, tuple[_Step, ...]] = {}
        for number, step in enumerate(self.steps):
            before, kept = kept, {}
            for cut in step:
                if number and cut.name not in before:
                    message = f"an earlier step of the view has left out {cut.name!r}"
                    raise NotFound(message)
                kept[cut.name] = (*before.get(cut.name, ()), (cut.items, cut.axes))
        for name in kept:
            index.position(name)
        return kept


#: Stands for "all axes, last first" until the number of axes is known.
_REVERSED: Final = (-1, -1)


def _name(name: str) -> str:
    return check_name(name, what="tensor name")


def _axes(order: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        axes = tuple(map(operator.index, order))
    except TypeError as error:
        message = f"the order of axes must be integers, not {order!r}"
        raise InvalidArgument(message) from error
    if len(set(axes)) != len(axes) or any(not -64 <= axis < 64 for axis in axes):
        message = f"{axes} is not an order of axes"
        raise InvalidArgument(message)
    return axes


def _step(cuts: list[Cut]) -> tuple[tuple[Cut, ...], ...]:
    if not cuts:
        message = "a view keeps at least one tensor; name one"
        raise InvalidArgument(message)
    return (tuple(cuts),)


class _Axis(msgspec.Struct, frozen=True):
    """One axis of a result: elements start, start + step, ... of one axis of the base."""

    base: int
    start: int
    step: int
    count: int

    def cut(self, item: Bounds) -> _Axis:
        if item[2] == 0:
            message = "a slice's step cannot be 0"
            raise InvalidArgument(message)
        start, stop, step = slice(*item).indices(self.count)
        count = len(range(start, stop, step))
        # Normal form: an axis of at most one element has step 1, an empty one start 0.
        return _Axis(
            self.base,
            self.start + start * self.step if count else 0,
            self.step * step if count > 1 else 1,
            count,
        )

    def pick(self, at: int, name: str) -> int:
        if not -self.count <= at < self.count:
            message = (
                f"index {at} is out of range for an axis of {self.count} of {name!r}"
            )
            raise InvalidArgument(message)
        return self.start + (at % self.count) * self.step


class _Part(msgspec.Struct):
    """Part of some tensor of a shape, after so many steps."""

    base_shape: Shape
    axes: tuple[_Axis, ...]
    #: Base axis -> the one index of it that was picked.
    picked: tuple[tuple[int, int], ...]
    #: What `_form` gives, once it was asked for.
    form: tuple[Box, int, tuple[int, ...], Shape, Shape] | None = None

    @classmethod
    def of(cls, shape: Shape, chain: tuple[_Step, ...], name: str) -> _Part:
        part = cls(shape, tuple(_Axis(at, 0, 1, n) for at, n in enumerate(shape)), ())
        for step in chain:
            part = part.cut(step, name)
        return part

    def cut(self, step: _Step, name: str) -> _Part:
        axes: list[_Axis] = []
        picked = list(self.picked)
        items, order = step
        for axis, item in zip(
            self.axes, _full(items, len(self.axes), name), strict=True
        ):
            if isinstance(item, int):
                picked.append((axis.base, axis.pick(item, name)))
            else:
                axes.append(axis.cut(item))
        if order is not None:
            axes = [axes[at] for at in _order(order, len(axes), name)]
        return _Part(self.base_shape, tuple(axes), tuple(sorted(picked)))

    def tensor(self, index: Index, name: str) -> ViewTensor:
        at = index.position(name)
        if self.form is None:
            self.form = self._form()
        box, first, axes, strides, shape = self.form
        dtype = index.dtypes[at]
        return ViewTensor(
            spec=TensorSpec(name, dtype, shape),
            entry=at,
            base_offset=index.offsets[at],
            base_shape=self.base_shape,
            box=box,
            offset=index.offsets[at] + first * dtype.itemsize,
            axes=axes,
            strides=strides,
        )

    def _form(self) -> tuple[Box, int, tuple[int, ...], Shape, Shape]:
        """Box, first element, and axes, strides and shape of the result."""
        box = list(whole(self.base_shape))
        strides = c_strides(self.base_shape)
        for base, at in self.picked:
            box[base] = range(at, at + 1)
        for axis in self.axes:
            last = axis.start + (axis.count - 1) * axis.step
            low, high = sorted((axis.start, last))
            axis_box = range(low, high + 1, abs(axis.step))
            box[axis.base] = axis_box if axis.count else range(0)
        first = sum(at * strides[base] for base, at in self.picked) + sum(
            axis.start * strides[axis.base] for axis in self.axes
        )
        shape = tuple(axis.count for axis in self.axes)
        return (
            tuple(box),
            first if all(shape) else 0,
            tuple(axis.base for axis in self.axes),
            tuple(axis.step * strides[axis.base] for axis in self.axes),
            shape,
        )


def _full(items: tuple[Item, ...], dims: int, name: str) -> list[int | Bounds]:
    """One item an axis: the ellipsis, also the one left out at the end, spelt out."""
    if None not in items:
        items = (*items, None)
    missing = dims - len(items) + 1
    if missing < 0 or items.count(None) > 1:
        message = f"{len(items) - 1} indices do not fit the {dims} axes of {name!r}"
        raise InvalidArgument(message)
    full: list[int | Bounds] = []
    for item in items:
        if item is None:
            full += [(None, None, None)] * missing
        else:
            full.append(item)
    return full


def _order(axes: tuple[int, ...], dims: int, name: str) -> list[int]:
    if axes == _REVERSED:
        return list(reversed(range(dims)))
    order = [axis + dims if axis < 0 else axis for axis in axes]
    if sorted(order) != list(range(dims)):
        message = f"{axes} is not an order of the {dims} axes of {name!r}"
        raise InvalidArgument(message)
    return order


class ViewTensor(msgspec.Struct, frozen=True):
    """One tensor of a resolved view.

    Attributes
    ----------
    spec : TensorSpec
        Name, dtype and shape of the result.
    entry : int
        Entry of the base index that it is a part of.
    base_offset : int
        Where that entry begins in the base segment.
    base_shape : tuple of int
        Shape of the base tensor.
    box : Box
        Elements that it takes, in base order; picked axes have one.
    offset : int
        Byte of the base segment at which its first element lies.
    axes : tuple of int
        Base axis of each axis of the result.
    strides : tuple of int
        Elements of the base between neighbours along each axis; negative when reversed.
    """

    spec: TensorSpec
    entry: int
    base_offset: int
    base_shape: Shape
    box: Box
    offset: int
    axes: tuple[int, ...]
    strides: Shape

    @property
    def dtype(self) -> DType:
        """Dtype of base and result."""
        return self.spec.dtype

    @property
    def contiguous(self) -> bool:
        """Whether the result is a C-order range of the base segment."""
        wanted = zip(
            self.spec.shape, self.strides, c_strides(self.spec.shape), strict=True
        )
        return all(n <= 1 or have == want for n, have, want in wanted)

    def runs(self) -> Runs:
        """Byte runs of the box in the base segment, in base order."""
        runs = box_runs(self.base_shape, self.dtype.itemsize, self.box)
        return runs.shifted(self.base_offset) if runs.run_bytes else runs

    @property
    def identity(self) -> tuple[int, Box, tuple[int, ...], Shape]:
        """Equal for two names of a view exactly when they are one tensor."""
        return self.entry, self.box, self.axes, self.strides


class ResolvedView(msgspec.Struct, frozen=True):
    """A view in normal form.

    Attributes
    ----------
    tensors : tuple of ViewTensor
        In the base's put order.
    """

    tensors: tuple[ViewTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct boxes."""
        return sum(runs.nbytes for runs in self.runs())

    def runs(self) -> list[Runs]:
        """Byte runs of the base segment, one `Runs` for each entry of the packed index."""
        return [tensor.runs() for tensor in self._boxes().values()]

    def described(self) -> View:
        """Describe it in one step, the same for every view that resolves to this."""
        return View((tuple(map(_described, self.tensors)),) if self.tensors else ())

    def _boxes(self) -> dict[tuple[int, Box], ViewTensor]:
        boxes: dict[tuple[int, Box], ViewTensor] = {}
        for tensor in self.tensors:
            boxes.setdefault((tensor.entry, tensor.box), tensor)
        return boxes

    def packed(self) -> tuple[Index, ResolvedView]:
        """Index of a segment that holds just the boxes, and the view that reads it.

        The index has an entry for each distinct box (see `runs`), in base order, and the
        names of the view. Names that read one box differently share its bytes.
        """
        boxes = self._boxes()
        at = {key: number for number, key in enumerate(boxes)}
        shapes = [tuple(map(len, box)) for _, box in boxes]
        index = Index(
            [tensor.spec.name for tensor in self.tensors],
            [tensor.dtype for tensor in boxes.values()],
            shapes,
            entry_of=[at[tensor.entry, tensor.box] for tensor in self.tensors],
        )
        return index, ResolvedView(
            tuple(_repacked(t, index, at[t.entry, t.box]) for t in self.tensors)
        )


def _described(tensor: ViewTensor) -> Cut:
    """Give the cut of the base tensor that this is."""
    items: list[Item] = [axis.start for axis in tensor.box]  # picked, unless it is kept
    for base, stride in zip(tensor.axes, tensor.strides, strict=True):
        axis = tensor.box[base]
        if stride < 0:  # read from its last element down to its first, which may be 0
            after = axis.start - axis.step
            items[base] = (axis[-1], after if after >= 0 else None, -axis.step)
        else:
            items[base] = (axis.start, axis.stop, axis.step)
    kept = sorted(tensor.axes)
    order = tuple(map(kept.index, tensor.axes))
    return Cut(
        tensor.spec.name, tuple(items), order if order != tuple(sorted(order)) else None
    )


def _repacked(tensor: ViewTensor, index: Index, entry: int) -> ViewTensor:
    """Read the same result from its packed box."""
    shape = index.shapes[entry]
    strides = c_strides(shape)
    signs = [-1 if stride < 0 else 1 for stride in tensor.strides]
    offset = index.offsets[entry]
    first = sum(
        (shape[axis] - 1) * strides[axis]
        for axis, sign in zip(tensor.axes, signs, strict=True)
        if sign < 0
    )
    return ViewTensor(
        spec=tensor.spec,
        entry=entry,
        base_offset=offset,
        base_shape=shape,
        box=whole(shape),
        offset=offset + (first * tensor.dtype.itemsize if all(shape) else 0),
        axes=tensor.axes,
        strides=tuple(s * strides[a] for s, a in zip(signs, tensor.axes, strict=True)),
    )


def view_id(base: ArtifactId, generation: Generation, view: ResolvedView) -> ArtifactId:
    """Name the derived artifact: the same for everyone who describes the same view."""
    form = [
        (t.spec.name, t.axes, t.strides, [(r.start, r.step, len(r)) for r in t.box])
        for t in view.tensors
    ]
    digest = hashlib.blake2b(digest_size=16, person=b"tc-view")
    digest.update(_ENCODER.encode((base, generation, form)))
    return ArtifactId(f"view-{digest.hexdigest()}")
