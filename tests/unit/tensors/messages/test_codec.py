from __future__ import annotations

import typing

import msgspec
import pytest

from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.tensors import messages
from tensorcast_dask.tensors.ids import Generation, RequestId
from tensorcast_dask.tensors.messages import (
    Abort,
    Done,
    FromNode,
    Message,
    SessionRequest,
    StoreReply,
    StoreRequest,
    ToInstance,
    ToNode,
    decode,
    encode,
)

CONVERSATIONS = [
    StoreRequest,
    StoreReply,
    ToInstance,
    FromNode,
    ToNode,
    SessionRequest,
]
ABORT = Abort(rid=RequestId("r"), generation=Generation(7))


def test_every_message_is_of_some_conversation() -> None:
    spoken = {kind for union in CONVERSATIONS for kind in typing.get_args(union)}
    every = {
        value
        for value in vars(messages).values()
        if isinstance(value, type)
        and issubclass(value, Message)
        and value is not Message
    }
    assert every - spoken == set()


@pytest.mark.parametrize("union", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_ops_are_class_names_and_unique_within_a_conversation(union: object) -> None:
    members = typing.get_args(union)
    tags = [member.__struct_config__.tag for member in members]
    assert tags == [member.__name__ for member in members]
    assert len(set(tags)) == len(tags)


def test_a_message_is_itself_again() -> None:
    assert decode(encode(ABORT), StoreRequest) == ABORT  # type: ignore[arg-type]
    assert decode(memoryview(encode(ABORT)), Abort) == ABORT


def test_unknown_fields_are_ignored() -> None:
    wire = msgspec.msgpack.decode(encode(ABORT)) | {"since": "a newer peer"}
    assert decode(msgspec.msgpack.encode(wire), Abort) == ABORT


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"op": "Unheard"}),
        msgspec.msgpack.encode({"op": "Abort"}),
        msgspec.msgpack.encode({"op": "Abort", "rid": 3, "generation": 7}),
        msgspec.msgpack.encode({"op": "Abort", "rid": "r", "generation": "7"}),
        msgspec.msgpack.encode([1]),
        encode(Done()),
        encode(ABORT)[:-1],
        encode(ABORT) + b"\x00",
    ],
)
def test_what_is_no_message_of_the_conversation_is_refused(raw: bytes) -> None:
    with pytest.raises(WrongPeer):
        decode(raw, StoreRequest)  # type: ignore[arg-type]
