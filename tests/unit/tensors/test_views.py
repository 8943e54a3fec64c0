from __future__ import annotations

from types import EllipsisType

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    CorruptFile,
    InvalidArgument,
    InvalidName,
    NotFound,
)
from tensorcast_dask.tensors.boxes import Runs
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import ArtifactId, Generation
from tensorcast_dask.tensors.specs import Index
from tensorcast_dask.tensors.views import Cut, ResolvedView, View, s_, view_id

F32 = dtype("float32")
INDEX = Index(
    ["w", "tied", "v", "empty", "scalar"],
    [F32, F32, F32, F32],
    [(6, 8), (5,), (0, 3), ()],
    entry_of=[0, 0, 1, 2, 3],
)


def one(view: View) -> ResolvedView:
    resolved = view.resolve(INDEX)
    assert len(resolved.tensors) == 1
    return resolved


def test_the_view_of_nothing_in_particular_is_every_tensor_whole() -> None:
    resolved = View().resolve(INDEX)
    assert [t.spec for t in resolved.tensors] == list(INDEX.specs())
    assert all(t.contiguous for t in resolved.tensors)
    assert resolved.nbytes == INDEX.content_bytes


def test_a_bare_colon_is_all_of_whatever_it_is() -> None:
    keys = dict.fromkeys(INDEX.names, slice(None))
    assert View.of(keys).resolve(INDEX) == View().resolve(INDEX)
    with pytest.raises(InvalidArgument):
        View.of({"scalar": (slice(None),)}).resolve(INDEX)


def test_a_slice_of_rows_is_one_run() -> None:
    (tensor,) = one(View.of({"w": s_[2:4]})).tensors
    assert tensor.spec.shape == (2, 8)
    assert tensor.offset == 2 * 8 * 4
    assert tensor.contiguous
    assert tensor.runs() == Runs(64, 64)


def test_a_picked_row_loses_its_axis() -> None:
    (tensor,) = one(View.of({"w": s_[-1]})).tensors
    assert (tensor.spec.shape, tensor.offset, tensor.axes) == ((8,), 160, (1,))


def test_a_picked_element_is_a_scalar() -> None:
    (tensor,) = one(View.of({"w": s_[1, 2]})).tensors
    assert (tensor.spec.shape, tensor.offset, tensor.strides) == ((), 40, ())


def test_a_reversed_axis_has_a_negative_stride_and_the_same_bytes() -> None:
    (forward,) = one(View.of({"v": s_[1:4]})).tensors
    (backward,) = one(View.of({"v": s_[3:0:-1]})).tensors
    assert backward.runs() == forward.runs()
    assert backward.strides == (-1,)
    assert backward.offset == forward.offset + 8
    assert not backward.contiguous


def test_a_transpose_moves_no_bytes() -> None:
    (tensor,) = one(View.transpose({"w": None})).tensors
    assert tensor.spec.shape == (8, 6)
    assert tensor.strides == (1, 8)
    assert tensor.runs() == Runs(0, 192)


def test_the_ellipsis_stands_for_the_axes_that_are_left() -> None:
    assert one(View.of({"w": s_[..., 3]})) == one(View.of({"w": s_[:, 3]}))
    assert one(View.of({"w": s_[2, ...]})) == one(View.of({"w": s_[2]}))
    assert one(View.of({"w": s_[1, ..., 2]})) == one(View.of({"w": s_[1, 2]}))
    assert one(View.of({"scalar": s_[...]})) == one(View.of({"scalar": ()}))


EQUAL = [
    [View.of({"w": s_[2:5]}), View.of({"w": s_[1:]}).then(View.of({"w": s_[1:4, :]}))],
    [View.of({"w": s_[:]}), View.select(["w"]), View.of({"w": s_[-100:100, ::1]})],
    [View.of({"w": s_[::-1]}).then(View.of({"w": s_[::-1]})), View.of({"w": s_[...]})],
    [
        View.transpose({"w": (1, 0)}).then(View.transpose({"w": None})),
        View.select(["w"]),
    ],
    [
        View.transpose({"w": (-1, 0)}).then(View.of({"w": s_[3]})),
        View.of({"w": s_[:, 3]}),
    ],
    [View.of({"v": s_[1:5:2]}).then(View.of({"v": s_[1]})), View.of({"v": s_[3]})],
    [View.of({"v": s_[4:0:-7]}), View.of({"v": s_[4:5]}), View.of({"v": s_[-1:]})],
    [View.of({"v": s_[3:3]}), View.of({"v": s_[9:]}), View.of({"v": s_[2:0]})],
    [View.select(["v", "w"]), View.select(["w", "v"]), View.of({"w": (), "v": s_[:]})],
]


@pytest.mark.parametrize("views", EQUAL)
def test_equivalent_chains_have_one_normal_form_and_one_id(views: list[View]) -> None:
    forms = [view.resolve(INDEX) for view in views]
    assert all(form == forms[0] for form in forms)
    ids = {view_id(ArtifactId("a"), Generation(7), form) for form in forms}
    assert len(ids) == 1
    assert len({form.described().encode() for form in forms}) == 1
    assert forms[0].described().resolve(INDEX) == forms[0]


def test_different_views_have_different_ids() -> None:
    views = [
        View(),
        View.select(["w"]),
        View.select(["tied"]),
        View.of({"w": s_[:3]}),
        View.of({"w": s_[0]}),
        View.of({"w": s_[:1]}),
        View.of({"w": s_[::-1]}),
        View.of({"w": s_[::2]}),
        View.transpose({"w": None}),
        View.of({"w": s_[:0]}),
        View.of({"w": s_[:, :0]}),
    ]
    ids = {view_id(ArtifactId("a"), Generation(7), v.resolve(INDEX)) for v in views}
    ids.add(view_id(ArtifactId("b"), Generation(7), views[0].resolve(INDEX)))
    ids.add(view_id(ArtifactId("a"), Generation(8), views[0].resolve(INDEX)))
    assert len(ids) == len(views) + 2


def test_an_id_is_the_same_in_every_process_and_release() -> None:
    resolved = View.of({"w": s_[1:5:2, ::-1], "v": s_[2]}).resolve(INDEX)
    assert (
        view_id(ArtifactId("qwen3/weights"), Generation(1 << 40 | 1), resolved)
        == "view-d75bc0107f940f61f8b2a554193e79db"
    )


@pytest.mark.parametrize(
    "key", [None, True, 1.5, "a", [0, 1], (0, None), (0, [1]), s_[..., ...], b"", {}]
)
def test_what_is_not_basic_slicing_is_refused(key: object) -> None:
    with pytest.raises(InvalidArgument):
        View.of({"w": key})  # type: ignore[dict-item]


@pytest.mark.parametrize("key", [slice(None, None, 0), slice("a", None), slice(1.5)])
def test_an_impossible_slice_is_refused(key: slice) -> None:
    with pytest.raises(InvalidArgument):
        View.of({"w": key})


@pytest.mark.parametrize(
    "view",
    [
        View.of({"w": s_[6]}),
        View.of({"w": s_[-7]}),
        View.of({"w": s_[1 << 61]}),
        View.of({"w": s_[0, 0, 0]}),
        View.of({"scalar": s_[0]}),
        View.of({"scalar": (slice(None),)}),
        View.of({"empty": s_[0]}),
        View.of({"w": s_[:3]}).then(View.of({"w": s_[3]})),
        View.of({"w": s_[0]}).then(View.of({"w": s_[0, 0]})),
        View.transpose({"w": (0,)}),
        View.transpose({"w": (0, 2)}),
        View.transpose({"w": (0, -2)}),
        View.transpose({"w": (0, 1, 2)}),
        View(((Cut("w", ((0, 5, 0),)),),)),
        View(((Cut("w", (None, None)),),)),
    ],
)
def test_a_view_that_does_not_fit_its_tensor_is_refused(view: View) -> None:
    with pytest.raises(InvalidArgument):
        view.resolve(INDEX)


@pytest.mark.parametrize("axes", [(0, 0), (64, 0), ("a",), (1.0, 0)])
def test_what_is_no_order_of_axes_is_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        View.transpose({"w": axes})


def test_a_name_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound):
        View.select(["nobody"]).resolve(INDEX)
    with pytest.raises(NotFound, match="earlier step"):
        View.select(["w"]).then(View.select(["v"])).resolve(INDEX)


def test_an_illegal_name_is_refused_at_once() -> None:
    with pytest.raises(InvalidName):
        View.select([""])


def test_a_view_without_tensors_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        View.of({})


def test_objects_that_are_integers_are_taken_as_such() -> None:
    class Two:
        def __index__(self) -> int:
            return 2

    key: tuple[Two | slice | EllipsisType, ...] = (Two(), slice(Two(), None))
    assert one(View.of({"w": key})) == one(View.of({"w": s_[2, 2:]}))


def test_an_object_that_is_no_integer_after_all_is_refused() -> None:
    class Many:
        def __index__(self) -> int:
            raise TypeError

    for key in (Many(), slice(Many(), None), 1 << 62):
        with pytest.raises(InvalidArgument):
            View.of({"w": key})


def test_tied_names_cut_alike_stay_tied_and_others_do_not() -> None:
    alike = View.of({"w": s_[:2], "tied": s_[0:2]}).resolve(INDEX)
    index, _ = alike.packed()
    assert index.ties == (("w", "tied"),)
    assert alike.nbytes == index.nbytes == 64
    apart, _ = View.of({"w": s_[:2], "tied": s_[1:3]}).resolve(INDEX).packed()
    assert apart.ties == ()


def test_a_packed_view_holds_its_boxes_and_reads_them_back() -> None:
    view = View.of({"w": s_[4:0:-2, 3:5], "v": s_[2:], "scalar": ()})
    resolved = view.then(
        View.transpose({"w": None, "v": None, "scalar": None})
    ).resolve(INDEX)
    index, packed = resolved.packed()
    assert index.shapes == ((2, 2), (3,), ())
    assert [runs.nbytes for runs in resolved.runs()] == list(index.sizes)
    assert [t.spec for t in packed.tensors] == [t.spec for t in resolved.tensors]
    (w, _v, _scalar) = packed.tensors
    assert (w.strides, w.offset) == ((1, -2), 8)
    assert all(t.base_offset == index.offsets[t.entry] for t in packed.tensors)


def test_a_view_survives_the_codec() -> None:
    view = View.of({"w": s_[1:5:2, ..., -1]}).then(View.transpose({"w": (0,)}))
    assert View.decode(view.encode()) == view
    assert View.decode(View().encode()) == View()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92",
        msgspec.msgpack.encode([2, []]),
        msgspec.msgpack.encode([1, [[["w", ["x"], None]]]]),
        msgspec.msgpack.encode([1, [[["w", [True], None]]]]),
        msgspec.msgpack.encode([1, [[["w", [[0, 1]], None]]]]),
    ],
)
def test_bytes_that_are_no_view_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        View.decode(data)
