"""UCX as far as it is used here: `ucxx` for contexts and workers, libucp for all that moves.

Rules:

1. Nothing is loaded before `load`; without the library it raises InvalidArgument, which
   names the extra.
2. Endpoints and messages go through libucp itself, the copy that ucxx has loaded: ucxx's own
   requests keep their worker alive when they end while its endpoint is closed (seen with a
   stopped peer: 17 of 20), cannot be cancelled one by one, and guess a memory's type; and
   its way to close an endpoint waits for ever.
3. No structure is read or written beyond the fields that its mask names: that is what UCX
   keeps stable between versions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.exceptions import InvalidArgument, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["IN_PROGRESS", "Endpoint", "Ucx", "load", "named"]

IN_PROGRESS: Final = 1
_LAST_ERROR: Final = -100
_ALL_OF_THE_TAG: Final = (1 << 64) - 1
_MEMORY_TYPES: Final = {"host": 0, "cuda": 1}

#: Over what UCX would choose; `UCX_...` variables of the user win.
_OPTIONS: Final = {
    # A lane that fails is to be an error of its endpoint; by default CMA ends the whole process
    # when its peer has died. UCX gives CMA to endpoints with errors only when told so.
    "CMA_MEMORY_INVALIDATE": "y",
    # Liveness is our own, and UCX's was seen to look at a lane that was gone already, which
    # ends the process.
    "KEEPALIVE_INTERVAL": "inf",
    # The receiver fetches: a peer that puts would write into memory of ours by itself.
    "RNDV_SCHEME": "get_zcopy",
    "TCP_PUT_ENABLE": "n",
    "TCP_TX_SEG_SIZE": "256K",  # 8 KiB by default, which is slow
    "TCP_RX_SEG_SIZE": "256K",
}
#: A transport's name in UCX -> its lane's name here, the best first.
_NAMES: Final = {
    "rc_mlx5": "rc",
    "rc_verbs": "rc",
    "dc_mlx5": "dc",
    "cuda_ipc": "cuda_ipc",
    "cma": "cma",
    "posix": "shm",
    "sysv": "shm",
    "self": "self",
    "cuda_copy": "cuda_copy",
    "tcp": "tcp",
}


class _Entry(ctypes.Structure):
    """`ucp_transport_entry_t`."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("transport", ctypes.c_char_p),
        ("device", ctypes.c_char_p),
    ]


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t`."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("addresses", ctypes.c_char * 256),
        ("entries", ctypes.POINTER(_Entry)),
        ("count", ctypes.c_uint),
        ("entry_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    ]


#: `ucp_err_handler_cb_t`: called by `progress` when a lane has failed.
_Handler: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class _EndpointParameters(ctypes.Structure):
    """`ucp_ep_params_t`, as far as it is filled."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_char_p),
        ("error_mode", ctypes.c_int),
        ("handler", _Handler),
        ("argument", ctypes.c_void_p),
    ]


class _RequestParameters(ctypes.Structure):
    """`ucp_request_param_t`."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("received", ctypes.c_void_p),
        ("memory_handle", ctypes.c_void_p),
    ]


_ADDRESS_MODE_HANDLER: Final = 0b111
_PEER_ERRORS: Final = 1
_FLAGS: Final = 1 << 4
_FORCE: Final = 1
_TRANSPORTS: Final = 1 << 3
_MOST_LANES: Final = 32
_MEMORY_TYPE: Final = 1 << 6
_ALWAYS_A_REQUEST: Final = 1 << 16

_pointer: Final = ctypes.c_void_p
#: The functions of libucp that are called: what they take, and give.
_FUNCTIONS: Final[dict[str, tuple[tuple[Any, ...], Any]]] = {
    "ucp_ep_create": ((_pointer, _pointer, _pointer), ctypes.c_int),
    "ucp_ep_query": ((_pointer, _pointer), ctypes.c_int),
    "ucp_ep_close_nbx": ((_pointer, _pointer), _pointer),
    "ucp_worker_progress": ((_pointer,), ctypes.c_uint),
    "ucp_tag_send_nbx": (
        (_pointer, _pointer, ctypes.c_size_t, ctypes.c_uint64, _pointer),
        _pointer,
    ),
    "ucp_tag_recv_nbx": (
        (
            _pointer,
            _pointer,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_uint64,
            _pointer,
        ),
        _pointer,
    ),
    "ucp_request_check_status": ((_pointer,), ctypes.c_int),
    "ucp_request_cancel": ((_pointer, _pointer), None),
    "ucp_request_free": ((_pointer,), None),
}


class Endpoint:
    """A way to one other worker. Made by `Ucx.endpoint`."""

    __slots__ = ("_handler", "failed", "handle")

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        #: Set when one of its lanes has failed: nothing passes any more.
        self.failed = False
        self._handler = _Handler(self._fail)  # UCX keeps no reference

    def _fail(self, _argument: int, _handle: int, _status: int) -> None:
        self.failed = True

    def parameters(self, address: bytes) -> _EndpointParameters:
        """Make what UCX has to be told of it."""
        return _EndpointParameters(
            field_mask=_ADDRESS_MODE_HANDLER,
            address=address,
            # With it a lane's failure ends the endpoint, and it can be closed by force.
            error_mode=_PEER_ERRORS,
            handler=self._handler,
        )


class Ucx:
    """The library. Ask `load` for it."""

    def __init__(self) -> None:
        # ucxx sets variables that this build of UCX does not know and warns about.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            ucxx = importlib.import_module("ucxx")
            self._ucp = ctypes.CDLL("libucp.so.0")  # the copy that is loaded
        except (ImportError, OSError) as error:
            message = (
                f"UCX cannot be used: {error}; install tensorcast-dask[ucx] on each node, "
                "or set tensorcast.transfer.ucx to off"
            )
            raise InvalidArgument(message) from error
        for name, (takes, gives) in _FUNCTIONS.items():
            function = getattr(self._ucp, name)
            function.argtypes, function.restype = takes, gives
        self.api = ucxx.libucxx
        numbers = ".".join(str(number) for number in ucxx.get_ucx_version())
        self.version = f"ucxx {ucxx.__version__}, UCX {numbers}"

    def context(self, lanes: Iterable[str]) -> Any:  # noqa: ANN401
        """Open UCX with some lanes; what the environment says wins."""
        options = {"TLS": ",".join(lanes), **_OPTIONS}
        given = {
            key: value
            for key, value in options.items()
            if f"UCX_{key}" not in os.environ
        }
        features = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        return self.api.UCXContext(given, features)

    @functools.cached_property
    def transports(self) -> frozenset[str]:
        """What this machine has. Devices are not asked: that would start a driver."""
        words = self.context(("^cuda",)).info.replace("/", " ").split()
        return frozenset(word for word in words if word in _NAMES)

    def endpoint(self, worker: Any, address: bytes) -> Endpoint:  # noqa: ANN401
        """Reach another worker.

        Raises
        ------
        PeerLost
            When UCX has no way there.
        """
        made = Endpoint()
        status = self._ucp.ucp_ep_create(
            worker.handle,
            ctypes.byref(made.parameters(address)),
            ctypes.byref(made.handle),
        )
        if status < 0:
            message = f"UCX finds no way to the other end: status {status}"
            raise PeerLost(message)
        return made

    def end(self, endpoint: Endpoint) -> int:
        """Begin to close an endpoint by force; the request, for `status` and `free`."""
        force = _RequestParameters(op_attr_mask=_FLAGS, flags=_FORCE)
        found = self._ucp.ucp_ep_close_nbx(endpoint.handle, ctypes.byref(force))
        return 0 if _refused(found) else found or 0

    def progress(self, worker: Any) -> bool:  # noqa: ANN401
        """Do one step of what is under way; False when there was nothing to do."""
        return bool(self._ucp.ucp_worker_progress(worker.handle))

    def lanes_of(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Ask which lanes an endpoint was given; the best first."""
        entries = (_Entry * _MOST_LANES)()
        asked = _EndpointAttributes(
            field_mask=_TRANSPORTS,
            entries=ctypes.cast(entries, ctypes.POINTER(_Entry)),
            count=_MOST_LANES,
            entry_bytes=ctypes.sizeof(_Entry),
        )
        if self._ucp.ucp_ep_query(endpoint.handle, ctypes.byref(asked)) != 0:
            return ()
        return named(entries[n].transport.decode() for n in range(asked.count))

    def send(
        self,
        endpoint: Endpoint,
        address: int,
        nbytes: int,
        memory: str,
        tag: int,
    ) -> int:
        """Begin to send; the request. Errors as `receive`."""
        return self._begun(
            self._ucp.ucp_tag_send_nbx(
                endpoint.handle, address, nbytes, tag, _parameters(memory)
            )
        )

    def receive(
        self,
        worker: Any,  # noqa: ANN401
        address: int,
        nbytes: int,
        memory: str,
        tag: int,
    ) -> int:
        """Begin to receive; the request.

        Raises
        ------
        PeerLost
            When UCX refuses.
        """
        return self._begun(
            self._ucp.ucp_tag_recv_nbx(
                worker.handle,
                address,
                nbytes,
                tag,
                _ALL_OF_THE_TAG,
                _parameters(memory),
            )
        )

    @staticmethod
    def _begun(found: int | None) -> int:
        if status := _refused(found):
            message = f"UCX cannot transfer: status {status}"
            raise PeerLost(message)
        return found or 0

    def status(self, request: int) -> int:
        """Return 0 when a request is done, IN_PROGRESS, or an error below 0."""
        return int(self._ucp.ucp_request_check_status(request)) if request else 0

    def cancel(self, worker: Any, request: int) -> None:  # noqa: ANN401
        """Call a request back, where that can still be done."""
        self._ucp.ucp_request_cancel(worker.handle, request)

    def free(self, request: int) -> None:
        """Forget a request; one in progress goes on."""
        if request:
            self._ucp.ucp_request_free(request)


def _refused(found: int | None) -> int:
    """Return the error in what UCX gave in place of a request; 0 without one."""
    status = ctypes.c_int64(found or 0).value
    return status if _LAST_ERROR <= status < 0 else 0


def _parameters(memory: str) -> Any:  # noqa: ANN401
    return ctypes.byref(
        _RequestParameters(
            op_attr_mask=_MEMORY_TYPE | _ALWAYS_A_REQUEST,
            memory_type=_MEMORY_TYPES[memory],
        )
    )


def named(transports: Iterable[str]) -> tuple[str, ...]:
    """Give lanes their names, the best first, each once."""
    found = set(transports)
    return tuple(dict.fromkeys(name for raw, name in _NAMES.items() if raw in found))


@functools.cache
def load() -> Ucx:
    """Return the library, loaded once.

    Raises
    ------
    InvalidArgument
        When it is not installed.
    """
    return Ucx()
