"""Proving who is at the other end: the token challenge, uids, certificates.

The challenge, keyed by the cluster token, which is never sent::

    caller                                   answerer
    Hello{nonce a, whom I expect, my role} -->
                              <-- Challenge{nonce b, HMAC(token, "answerer" | all of it)}
    Proof{HMAC(token, "caller" | all of it)} -->

Rules:

1. Each proof covers both nonces, the purpose of the port (store or link), the cluster,
   the node and incarnation that the caller expects, its role, host and pid: a proof
   made for one connection is worth nothing on another.
2. Comparisons take constant time. A refusal says what to check, never what was right.
3. This half is sans-IO (`Caller`, `Answerer`), for blocking sockets and event loops alike.
4. Over a unix socket the kernel's word on the other's uid stands in for the challenge.
5. With TLS both ends verify the other's certificate against the cluster's authority;
   names in certificates are not looked at, as in Dask.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.hosts import peer_credentials
from tensorcast_dask.exceptions import InvalidArgument, StaleOwner, WrongPeer
from tensorcast_dask.tensors.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Proof,
    TlsFiles,
)

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Collection, Mapping

    from tensorcast_dask.tensors.ids import ClusterId, Incarnation, NodeId

__all__ = [
    "LINK",
    "STORE",
    "TOKEN_BYTES",
    "Answerer",
    "Caller",
    "check_hello",
    "check_uid",
    "client_tls",
    "https_tls",
    "mint_token",
    "server_tls",
    "tls_files",
]

TOKEN_BYTES: Final = 32
_NONCE_BYTES: Final = 32

#: Purposes of a port.
STORE: Final = "store"
LINK: Final = "link"


def mint_token() -> bytes:
    """Make a new cluster token."""
    return os.urandom(TOKEN_BYTES)


def _mac(token: bytes, side: str, purpose: str, hello: Hello, nonce: bytes) -> bytes:
    parts = (
        side.encode(),
        purpose.encode(),
        str(hello.protocol).encode(),
        hello.cluster.encode(),
        hello.node.encode(),
        str(hello.incarnation).encode(),
        hello.role.encode(),
        str(hello.pid).encode(),
        hello.host.encode(),
        hello.nonce,
        nonce,
    )
    # Lengths stand before the parts, so that no two lists give the same bytes.
    framed = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.new(token, framed, hashlib.sha256).digest()


class Caller:
    """The opening side of one connection.

    Parameters
    ----------
    hello : Hello
        What to say first; its nonce is filled in here.
    token : bytes
        The cluster token.
    purpose : str
        `STORE` or `LINK`.
    """

    def __init__(self, hello: Hello, *, token: bytes, purpose: str = STORE) -> None:
        if not token:
            message = "there is no cluster token to prove; connect through a session"
            raise InvalidArgument(message)
        self._token = token
        self._purpose = purpose
        self.hello = _with_nonce(hello)

    def answer(self, challenge: Challenge) -> Proof:
        """Check the answerer's proof and make ours.

        Raises
        ------
        WrongPeer
            When the answerer does not hold the token.
        """
        _check_nonce(challenge.nonce)
        wanted = _mac(
            self._token, "answerer", self._purpose, self.hello, challenge.nonce
        )
        if not hmac.compare_digest(wanted, challenge.proof):
            message = "who answered there does not hold this cluster's token; is the address that of another cluster?"
            raise WrongPeer(message)
        return Proof(
            proof=_mac(
                self._token, "caller", self._purpose, self.hello, challenge.nonce
            )
        )


def _with_nonce(hello: Hello) -> Hello:
    return Hello(
        protocol=hello.protocol,
        cluster=hello.cluster,
        node=hello.node,
        incarnation=hello.incarnation,
        role=hello.role,
        pid=hello.pid or os.getpid(),
        host=hello.host,
        nonce=os.urandom(_NONCE_BYTES),
    )


class Answerer:
    """The listening side of one connection; one object a connection."""

    def __init__(self, *, token: bytes, purpose: str = STORE) -> None:
        self._token = token
        self._purpose = purpose
        self._wanted = b""

    def challenge(self, hello: Hello) -> Challenge:
        """Prove that we hold the token, and ask the same of the caller.

        Raises
        ------
        WrongPeer
            When there is no token yet, or the hello has no usable nonce.
        """
        if not self._token:
            message = "this node has no cluster yet; try again when it is adopted"
            raise WrongPeer(message)
        _check_nonce(hello.nonce)
        nonce = os.urandom(_NONCE_BYTES)
        self._wanted = _mac(self._token, "caller", self._purpose, hello, nonce)
        return Challenge(
            nonce=nonce,
            proof=_mac(self._token, "answerer", self._purpose, hello, nonce),
        )

    def check(self, proof: Proof) -> None:
        """Check the caller's proof, once.

        Raises
        ------
        WrongPeer
            When the caller does not hold the token.
        """
        wanted, self._wanted = self._wanted, b""
        if not wanted or not hmac.compare_digest(wanted, proof.proof):
            message = "the caller does not hold this cluster's token; it was refused"
            raise WrongPeer(message)


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != _NONCE_BYTES:
        message = f"a challenge needs a nonce of {_NONCE_BYTES} bytes, not {len(nonce)}"
        raise WrongPeer(message)


def check_hello(
    hello: Hello, *, cluster: ClusterId, node: NodeId, incarnation: Incarnation
) -> None:
    """Check that the caller wants this very process.

    Raises
    ------
    WrongPeer
        Another protocol, cluster or node is expected.
    StaleOwner
        The node is right, the incarnation is not.
    """
    if hello.protocol != PROTOCOL:
        message = f"this node speaks protocol {PROTOCOL}, the caller {hello.protocol}; use the same release on both"
        raise WrongPeer(message, {"protocol": PROTOCOL})
    if hello.cluster and cluster and hello.cluster != cluster:
        message = (
            "the caller expects another cluster; ask the scheduler for addresses again"
        )
        raise WrongPeer(message)
    if hello.node and hello.node != node:
        message = (
            f"the caller expects node {hello.node}; node {node} has its address now"
        )
        raise WrongPeer(message, {"node": node})
    if hello.incarnation and hello.incarnation != incarnation:
        message = f"node {node} is in incarnation {incarnation}, the caller expects {hello.incarnation}; ask the catalog again"
        raise StaleOwner(message, {"node": node, "incarnation": incarnation})


def check_uid(sock: socket.socket, *, allow_uids: Collection[int] = ()) -> int:
    """Check that the other end of a unix socket is ours; return its pid.

    Raises
    ------
    WrongPeer
        When another user, not in `allow_uids`, is there.
    """
    found = peer_credentials(sock)
    if found.uid != os.getuid() and found.uid not in allow_uids:
        message = f"user {found.uid} may not talk to this process; see tensorcast.store.allow_uids"
        raise WrongPeer(message)
    return found.pid


# ------------------------------------------------------------------ TLS
def tls_files(found: Mapping[str, str | None]) -> TlsFiles | None:
    """Read certificates as Dask's `Security` names them: each a path or PEM text.

    Parameters
    ----------
    found : mapping
        With `ca_file`, `cert` and `key`; without a key it is in the file of `cert`.

    Returns
    -------
    TlsFiles or None
        None when there is no certificate.

    Raises
    ------
    InvalidArgument
        When a file cannot be read.
    """
    ca, cert = found.get("ca_file"), found.get("cert")
    if not ca or not cert:
        return None
    return TlsFiles(ca=_pem(ca), cert=_pem(cert), key=_pem(found.get("key") or cert))


def _pem(text_or_path: str) -> str:
    if "\n" in text_or_path:
        return text_or_path
    try:
        return Path(text_or_path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        message = f"the certificate {text_or_path} cannot be read ({error}); check distributed.comm.tls"
        raise InvalidArgument(message) from error


@lru_cache(maxsize=4)
def client_tls(files: TlsFiles) -> ssl.SSLContext:
    """Make the context of an opening side; the same one for the same files."""
    import ssl  # noqa: PLC0415 - a store starts without it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _load(context, files)


def server_tls(files: TlsFiles) -> ssl.SSLContext:
    """Make the context of a listening side; it demands a certificate of the caller."""
    import ssl  # noqa: PLC0415 - a store starts without it

    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)


def https_tls(files: TlsFiles) -> ssl.SSLContext:
    """Make the context of a port for strangers with a token: no certificate is asked of them."""
    import ssl  # noqa: PLC0415 - a store starts without it

    context = _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    context.verify_mode = ssl.CERT_NONE
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    import ssl  # noqa: PLC0415 - a store starts without it

    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=files.ca)
        _load_chain(context, files)
    except (ssl.SSLError, ValueError, OSError) as error:
        message = f"the cluster's TLS certificates cannot be used ({error}); check distributed.comm.tls"
        raise InvalidArgument(message) from error
    return context


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load certificate and key, which OpenSSL takes from files only: from memory files."""
    opened = []
    try:
        for name, text in (("cert", files.cert), ("key", files.key)):
            fd = os.memfd_create(f"tensorcast-{name}", os.MFD_CLOEXEC)
            opened.append(fd)
            os.write(fd, text.encode())
        cert, key = (f"/proc/self/fd/{fd}" for fd in opened)
        context.load_cert_chain(cert, key)
    finally:
        for fd in opened:
            os.close(fd)
