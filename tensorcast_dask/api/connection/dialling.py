"""From a scheduler's address to a Dask client, or a sentence on why there is none.

Rules:

1. What is no address and what is no host is said before anything is dialled.
2. Where nothing listens, dialling goes on for `session.refused-timeout` only: a scheduler
   that is just starting is found, a wrong port is said soon.
3. Nothing is dialled only to look while all is well: Dask's scheduler would log each look.
4. Before Dask's client is made, the other end must have answered as Dask does: the client
   would wait for ever for one that is silent, whatever its own time-out, and would take
   the first bytes of another protocol for a length.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.config import Settings
from tensorcast_dask.exceptions import CatalogUnavailable, InvalidArgument

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.deadlines import Deadline

__all__ = ["client_of", "client_on_loop", "no_scheduler"]

_LOOK_S: Final = 3.0


class _Dialling:
    """One address and how it is dialled.

    Parameters
    ----------
    address : str
        The scheduler's.
    limit : Deadline
        For all of it.

    Raises
    ------
    InvalidArgument
        When it is no address.
    CatalogUnavailable
        When its host is not known. Looking a name up may block.
    """

    def __init__(self, address: str, limit: Deadline) -> None:
        self._address = address
        self._limit = limit
        self._within_s = limit.left_s()
        self._patience_s = Settings.read().refused_timeout_s
        self._place = _place(address)
        self._patient = False
        if self._place is not None:
            _check_host(address, *self._place)

    @property
    def speaks_first(self) -> bool:
        """Whether the other end is another process, which may be anything."""
        return self._place is not None

    @property
    def timeout_s(self) -> float:
        """How long the next attempt may take."""
        left_s = self._limit.left_s()
        return left_s if self._patient else min(left_s, self._patience_s)

    def failed(self, error: OSError) -> None:
        """Note that an attempt failed; returns when there is to be another.

        Raises
        ------
        CatalogUnavailable
            When another would not help. Looking may block.
        """
        why = "" if self._place is None else _look(*self._place)
        if why:
            message = (
                f"{why} at {self._address}; is the scheduler running, and is that its port? "
                "(setting tensorcast.session.refused-timeout is how long to try)"
            )
            raise CatalogUnavailable(message, {"why": why}) from None
        if self._patient or self._limit.left_s() <= 0:
            raise no_scheduler(error, self._within_s) from None
        self._patient = True  # somebody is there, and slow


async def _greet(address: str, security: Any, timeout_s: float) -> None:
    """Exchange Dask's greetings with whoever listens (rule 4).

    Raises
    ------
    OSError
        When nobody answers in time.
    InvalidArgument
        When it is to be TLS, and there are no certificates.
    CatalogUnavailable
        When it is no Dask scheduler.
    """
    from distributed.comm.core import connect
    from distributed.security import Security

    if security is None:
        security = Security()  # type: ignore[no-untyped-call] # as Dask's client does
    options = (
        security.get_connection_args("client")
        if hasattr(security, "get_connection_args")
        else {}
    )
    if address.startswith("tls:") and not options.get("ssl_context"):
        message = (
            f"{address} needs certificates, and there are none: give security=, or set "
            "distributed.comm.tls in Dask's configuration (ca-file, client.cert, client.key)"
        )
        raise InvalidArgument(message)
    try:
        async with asyncio.timeout(timeout_s):
            comm = await connect(address, timeout=timeout_s, **options)  # type: ignore[no-untyped-call]
            await comm.close()
    except OSError:
        raise
    except Exception as error:
        message = (
            f"what answers at {address} is no Dask scheduler ({type(error).__name__}); "
            "is that the dashboard's port?"
        )
        raise CatalogUnavailable(message, {"why": "no scheduler"}) from error


def _said(error: OSError) -> str:
    return f" ({error})" if str(error) else ""  # a time-out has no text


def no_scheduler(error: OSError, within_s: float) -> CatalogUnavailable:
    """Give the error for a scheduler that stays silent."""
    message = (
        f"no Dask scheduler answered within {within_s:.3g} s: it is busy or stopped, or it is "
        f"not there; check the address (tls:// where the cluster has TLS), or give it more "
        f"time with deadline={_said(error)}"
    )
    return CatalogUnavailable(message, {"why": "no answer"})


def _place(address: str) -> tuple[str, int] | None:
    """Give host and port, or None for a scheme that has none.

    Raises
    ------
    InvalidArgument
        When it is no address.
    """
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import get_backend

    try:
        scheme, place = parse_address(address)
        get_backend(scheme)
        if scheme not in {"tcp", "tls"}:
            return None
        host, port = parse_host_port(place)
    except ValueError as error:
        message = f"{address!r} is no scheduler's address ({error}); it looks like tcp://host:8786"
        raise InvalidArgument(message) from None
    return str(host), int(port)


def _check_host(address: str, host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = (
            f"unknown host {host!r} in {address} ({error}); check the name, or give the "
            "scheduler's IP address"
        )
        raise CatalogUnavailable(message, {"why": "unknown host"}) from None


def _look(host: str, port: int) -> str:
    """Dial once; say what is wrong, or "" when somebody is there or nothing is known."""
    try:
        socket.create_connection((host, port), timeout=_LOOK_S).close()
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return ""
    except OSError as error:
        return str(error.strerror or error).lower()
    return ""


def client_of(address: str, limit: Deadline, options: dict[str, Any]) -> Any:
    """Make a connected Dask client. Blocks.

    Raises
    ------
    CatalogUnavailable, InvalidArgument
        When none can be made.
    """
    from distributed import Client

    dialling = _Dialling(address, limit)
    while True:
        try:
            if (
                dialling.speaks_first
            ):  # on a loop of its own: this thread's may be running
                greeting = _greet(address, options.get("security"), dialling.timeout_s)
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(asyncio.run, greeting).result()
            return Client(address, timeout=dialling.timeout_s, **options)  # type: ignore[no-untyped-call]
        except OSError as error:
            dialling.failed(error)


async def client_on_loop(address: str, limit: Deadline, options: dict[str, Any]) -> Any:
    """Make a connected asynchronous Dask client.

    Raises
    ------
    CatalogUnavailable, InvalidArgument
        When none can be made.
    """
    from distributed import Client

    dialling = await asyncio.to_thread(_Dialling, address, limit)
    while True:
        try:
            if dialling.speaks_first:
                await _greet(address, options.get("security"), dialling.timeout_s)
            return await Client(address, timeout=dialling.timeout_s, **options)  # type: ignore[no-untyped-call]
        except OSError as error:
            await asyncio.to_thread(dialling.failed, error)
