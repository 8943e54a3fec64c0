from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec
import pytest

from tensorcast_dask.dataplane import auth
from tensorcast_dask.dataplane.auth import LINK, STORE, Answerer, Caller
from tensorcast_dask.exceptions import (
    InvalidArgument,
    StaleOwner,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import ClusterId, HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import Challenge, Hello, Proof, Role
from tests.kit.certificates import mint_certificates

TOKEN = b"t" * 32
HELLO = Hello(
    cluster=ClusterId("c"),
    node=NodeId("n"),
    incarnation=Incarnation(4),
    role=Role.PEER,
    pid=17,
    host=HostId("h"),
)


@dataclass
class Talk:
    """One complete challenge, so that tests can use its parts again."""

    hello: Hello
    challenge: Challenge
    proof: Proof


def talk(caller: Caller, answerer: Answerer) -> Talk:
    challenge = answerer.challenge(caller.hello)
    proof = caller.answer(challenge)
    answerer.check(proof)
    return Talk(caller.hello, challenge, proof)


def test_two_that_hold_the_token_believe_each_other() -> None:
    talk(Caller(HELLO, token=TOKEN), Answerer(token=TOKEN))


def test_the_token_is_never_sent() -> None:
    said = talk(Caller(HELLO, token=TOKEN), Answerer(token=TOKEN))
    sent = b"".join(
        msgspec.msgpack.encode(m) for m in (said.hello, said.challenge, said.proof)
    )
    assert TOKEN not in sent
    assert TOKEN[:8] not in sent


def test_a_caller_without_the_token_is_refused() -> None:
    answerer = Answerer(token=TOKEN)
    challenge = answerer.challenge(Caller(HELLO, token=TOKEN).hello)
    with pytest.raises(WrongPeer, match="token"):
        answerer.check(Proof(proof=b"x" * 32))
    with pytest.raises(WrongPeer, match="token"):
        Caller(HELLO, token=b"o" * 32).answer(challenge)


def test_an_answerer_without_the_token_gets_no_proof() -> None:
    caller = Caller(HELLO, token=TOKEN)
    stranger = Answerer(token=b"o" * 32)
    with pytest.raises(WrongPeer, match="token"):
        caller.answer(stranger.challenge(caller.hello))


def test_a_recorded_proof_is_worth_nothing_later() -> None:
    said = talk(Caller(HELLO, token=TOKEN), Answerer(token=TOKEN))
    again = Answerer(token=TOKEN)
    again.challenge(said.hello)
    with pytest.raises(WrongPeer):
        again.check(said.proof)


def test_a_recorded_challenge_is_worth_nothing_later() -> None:
    said = talk(Caller(HELLO, token=TOKEN), Answerer(token=TOKEN))
    with pytest.raises(WrongPeer):
        Caller(HELLO, token=TOKEN).answer(said.challenge)


def test_a_proof_counts_once() -> None:
    answerer = Answerer(token=TOKEN)
    said = talk(Caller(HELLO, token=TOKEN), answerer)
    with pytest.raises(WrongPeer):
        answerer.check(said.proof)


def test_an_answerers_proof_is_no_callers_proof() -> None:
    """Reflection: who connects to us cannot have us prove his own challenge."""
    answerer = Answerer(token=TOKEN)
    challenge = answerer.challenge(Caller(HELLO, token=TOKEN).hello)
    with pytest.raises(WrongPeer):
        answerer.check(Proof(proof=challenge.proof))


def test_a_proof_for_the_link_does_not_open_a_store() -> None:
    caller = Caller(HELLO, token=TOKEN, purpose=LINK)
    with pytest.raises(WrongPeer):
        caller.answer(Answerer(token=TOKEN, purpose=STORE).challenge(caller.hello))


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": "other"},
        {"node": "m"},
        {"incarnation": 5},
        {"role": Role.CLIENT},
        {"pid": 18},
        {"host": "g"},
        {"protocol": 9},
        {"cluster": "cn", "node": ""},  # the same text, cut elsewhere
    ],
)
def test_what_the_hello_says_cannot_be_changed_on_the_way(
    change: dict[str, object],
) -> None:
    caller = Caller(HELLO, token=TOKEN)
    heard = msgspec.structs.replace(caller.hello, **change)
    answerer = Answerer(token=TOKEN)
    challenge = answerer.challenge(heard)
    with pytest.raises(WrongPeer):
        caller.answer(challenge)


@pytest.mark.parametrize("nonce", [b"", b"short", b"x" * 33])
def test_a_nonce_of_another_length_is_refused(nonce: bytes) -> None:
    with pytest.raises(WrongPeer, match="nonce"):
        Answerer(token=TOKEN).challenge(msgspec.structs.replace(HELLO, nonce=nonce))
    with pytest.raises(WrongPeer, match="nonce"):
        Caller(HELLO, token=TOKEN).answer(Challenge(nonce=nonce, proof=b"x" * 32))


def test_without_a_token_nobody_proves_anything() -> None:
    with pytest.raises(InvalidArgument):
        Caller(HELLO, token=b"")
    with pytest.raises(WrongPeer, match="adopted"):
        Answerer(token=b"").challenge(Caller(HELLO, token=TOKEN).hello)


def test_tokens_are_long_and_new() -> None:
    one, two = auth.mint_token(), auth.mint_token()
    assert len(one) == len(two) == 32
    assert one != two


def check(**change: object) -> None:
    hello = msgspec.structs.replace(HELLO, **change)
    auth.check_hello(
        hello,
        cluster=ClusterId("c"),
        node=NodeId("n"),
        incarnation=Incarnation(4),
    )


def test_a_hello_that_names_this_life_of_this_node_is_let_in() -> None:
    check()
    check(node="", incarnation=0, cluster="")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"protocol": 99}, WrongPeer),
        ({"cluster": "d"}, WrongPeer),
        ({"node": "m"}, WrongPeer),
        ({"incarnation": 3}, StaleOwner),
        ({"incarnation": 5}, StaleOwner),
        ({"node": "m", "incarnation": 3}, WrongPeer),
    ],
)
def test_a_hello_for_somebody_else_is_refused(
    change: dict[str, object], error: type[TensorCastError]
) -> None:
    with pytest.raises(error):
        check(**change)


def test_the_kernel_vouches_for_the_same_user() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert auth.check_uid(here) == os.getpid()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user at the other end")
def test_another_user_is_refused_unless_allowed() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # an address of the kernel's choice, without a file
        listener.listen()
        code = (
            "import os, socket;"
            "os.setuid(65534);"
            "caller = socket.socket(socket.AF_UNIX);"
            f"caller.connect({listener.getsockname()!r});"
            "caller.recv(1)"
        )
        child = subprocess.Popen([sys.executable, "-c", code])
        accepted, _ = listener.accept()
        with accepted:
            with pytest.raises(WrongPeer, match="65534"):
                auth.check_uid(accepted)
            assert auth.check_uid(accepted, allow_uids=(65534,)) == child.pid
        assert child.wait(30) == 0


# ------------------------------------------------------------------ TLS
def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    here, there = socket.socketpair()
    got: list[bytes] = []

    def answer() -> None:
        try:
            with server.wrap_socket(there, server_side=True) as tls:
                got.append(tls.recv(10))
        except OSError:
            got.append(b"refused")
            there.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap_socket(here) as tls:
            tls.sendall(b"hello")
            tls.settimeout(10)
            tls.recv(1)
    except OSError:
        here.close()
    thread.join(10)
    return got[0]


def test_both_ends_verify_the_others_certificate() -> None:
    ours, theirs = mint_certificates(), mint_certificates()
    server = auth.server_tls(ours)
    assert shake(server, auth.client_tls(ours)) == b"hello"
    assert shake(server, auth.client_tls(theirs)) == b"refused"
    mixed = msgspec.structs.replace(theirs, ca=ours.ca)
    assert shake(server, auth.client_tls(mixed)) == b"refused"


def test_a_caller_without_a_certificate_is_refused() -> None:
    ours = mint_certificates()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=ours.ca)
    assert shake(auth.server_tls(ours), bare) == b"refused"


def test_certificates_leave_no_file_and_no_descriptor(leaves_nothing: None) -> None:
    auth.server_tls(mint_certificates())


@pytest.mark.parametrize("part", ["ca", "cert", "key"])
def test_broken_certificates_are_said_to_be(part: str) -> None:
    broken = msgspec.structs.replace(mint_certificates(), **{part: "nonsense"})
    with pytest.raises(InvalidArgument, match="TLS"):
        auth.client_tls(broken)


def test_a_key_that_does_not_fit_is_refused() -> None:
    one, two = mint_certificates(), mint_certificates()
    with pytest.raises(InvalidArgument):
        auth.server_tls(msgspec.structs.replace(one, key=two.key))
