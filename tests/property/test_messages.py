from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.tensors import messages
from tensorcast_dask.tensors.messages import Message, decode, encode

KINDS = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
]
PLAIN: dict[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
    msgspec.Raw: st.just(msgspec.Raw(b"\xc0")),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation that a message may have."""
    kind = getattr(kind, "__supertype__", kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    found: st.SearchStrategy[Any]
    if kind in PLAIN:
        found = PLAIN[kind]
    elif origin in (types.UnionType, typing.Union):
        found = st.one_of([values(part) for part in inner])
    elif origin in (tuple, list):
        each = [part for part in inner if part is not Ellipsis]
        fixed = origin is tuple and Ellipsis not in inner
        found = (
            st.tuples(*map(values, each))
            if fixed
            else st.lists(values(each[0]), max_size=2).map(origin)
        )
    elif origin is dict:
        found = st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    elif issubclass(kind, Enum):
        found = st.sampled_from(list(kind))
    else:
        fields = msgspec.structs.fields(kind)
        found = st.builds(kind, **{field.name: values(field.type) for field in fields})
    return found


@given(st.sampled_from(KINDS).flatmap(values))
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message), type(message)) == message


@given(st.sampled_from(KINDS), st.binary(max_size=40))
def test_noise_is_refused(kind: type[Message], raw: bytes) -> None:
    try:
        found = decode(raw, kind)
    except WrongPeer:
        return
    assert isinstance(found, kind)
