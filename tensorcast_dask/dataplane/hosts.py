"""Who runs on this host: its identity, the run directory, the cards of its stores, what `up` runs.

Rules:

1. Two processes share a host when they see the same boot and the same run directory
   (boot id, device and inode). The setting `tensorcast.host` overrides it (tests).
2. The run directory is this uid's own, mode 0700, no symbolic link; anything else is
   refused, never repaired.
3. A card is written whole or not at all, and believed only while its process lives: the
   same pid with the same start time, or, where a container hides the pid, somebody who
   listens on its socket.
4. A path of a unix socket takes at most 100 bytes; the kernel's limit is 107.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tensorcast_dask.exceptions import InvalidArgument, OwnershipError
from tensorcast_dask.tensors.ids import HostId
from tensorcast_dask.tensors.messages import NodeCard

__all__ = [
    "CARD_NAME",
    "SOCKET_NAME",
    "UP_NAME",
    "PeerCredentials",
    "PidWatch",
    "budgets",
    "cards",
    "check_length",
    "clean_dead",
    "cluster_folder",
    "cluster_name",
    "host_id",
    "is_alive",
    "node_folder",
    "peer_credentials",
    "process_start",
    "read_card",
    "remove_folder",
    "run_directory",
    "running_up",
    "socket_path",
    "write_card",
]

CARD_NAME: Final = "card.json"
SOCKET_NAME: Final = "sock"
UP_NAME: Final = "up.json"
_MAX_SOCKET_BYTES: Final = 100
#: Length of the names of a cluster's folder and of a node's.
_CLUSTER_DIGITS: Final = 12
_NODE_DIGITS: Final = 32
_SO_PEERPIDFD: Final = 77


# ------------------------------------------------------------------ the directory
def run_directory(setting: str = "") -> Path:
    """Return the run directory of this user, made when it is missing.

    Raises
    ------
    OwnershipError
        When it belongs to another user or is a link.
    """
    path = Path(setting) if setting else _default_directory()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return _checked(path)


def _default_directory() -> Path:
    if named := os.environ.get("TENSORCAST_RUN_DIR"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "tensorcast"
    return Path(f"/tmp/tensorcast-{os.getuid()}")  # noqa: S108  # owner and mode are checked


def _checked(path: Path) -> Path:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        message = f"run directory {path} is a link or belongs to another user; set TENSORCAST_RUN_DIR to a directory of your own"
        raise OwnershipError(message)
    if stat.S_IMODE(found.st_mode) != 0o700:
        message = f"run directory {path} has mode {stat.S_IMODE(found.st_mode):o}; it must be 700 (chmod 700 {path})"
        raise OwnershipError(message)
    return path


def cluster_name(cluster: str) -> str:
    """Return the name of the folder of one cluster; `cluster` is any text."""
    return hashlib.sha256(cluster.encode()).hexdigest()[:_CLUSTER_DIGITS]


def cluster_folder(run_dir: Path, cluster: str) -> Path:
    """Return the folder of one cluster, made when it is missing; `cluster` is any text."""
    path = run_dir / cluster_name(cluster)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return _checked(path)


def node_folder(cluster_dir: Path, node: str) -> Path:
    """Return the folder of one store, made when it is missing."""
    path = cluster_dir / node
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return _checked(path)


def socket_path(folder: Path) -> str:
    """Return where a store listens.

    Raises
    ------
    InvalidArgument
        When the path is too long for a unix socket.
    """
    path = str(folder / SOCKET_NAME)
    nbytes = len(os.fsencode(path))
    if nbytes > _MAX_SOCKET_BYTES:
        message = (
            f"socket path {path} takes {nbytes} bytes, a unix socket's at most "
            f"{_MAX_SOCKET_BYTES}; set tensorcast.run-dir (TENSORCAST_RUN_DIR) to a "
            f"directory whose path is at least {nbytes - _MAX_SOCKET_BYTES} bytes shorter"
        )
        raise InvalidArgument(message)
    return path


def check_length(run_dir: Path) -> None:
    """Refuse a run directory in which no store could listen.

    Raises
    ------
    InvalidArgument
        When its path is too long.
    """
    socket_path(run_dir / ("0" * _CLUSTER_DIGITS) / ("0" * _NODE_DIGITS))


def host_id(run_dir: Path, override: str = "") -> HostId:
    """Return the identity of this host as processes with this run directory see it."""
    if override:
        return HostId(override)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = run_dir.stat()
    return HostId(f"{boot}:{found.st_dev:x}:{found.st_ino:x}")


# ------------------------------------------------------------------ cards
def process_start(pid: int) -> int:
    """Clock ticks since boot at which `pid` started; 0 when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return 0
    return int(fields[19])


def is_alive(card: NodeCard) -> bool:
    """Say whether the very process that wrote the card still runs."""
    if card.pid > 0 and process_start(card.pid) == card.pid_start != 0:
        return True
    return bool(card.socket) and _listens(card.socket)


def _listens(path: str) -> bool:
    """Say whether a socket has a listener; the kernel closes it with its process."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(0)
        try:
            sock.connect(path)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
    return True


def write_card(folder: Path, card: NodeCard) -> None:
    """Write a store's card, whole or not at all."""
    fresh = folder / f".{CARD_NAME}.{os.getpid()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.json.encode(card))
    finally:
        os.close(fd)
    fresh.replace(folder / CARD_NAME)


def read_card(folder: Path) -> NodeCard | None:
    """Read a store's card; None when there is none that can be read."""
    try:
        return msgspec.json.decode((folder / CARD_NAME).read_bytes(), type=NodeCard)
    except (OSError, msgspec.DecodeError):
        return None


def cards(cluster_dir: Path) -> list[NodeCard]:
    """Return the cards of the stores of one cluster that live on this host, by node."""
    found = []
    for folder in sorted(_folders(cluster_dir)):
        card = read_card(folder)
        if card is not None and is_alive(card):
            found.append(card)
    return found


def budgets(run_dir: Path) -> list[int]:
    """Return what each store that lives here may take of host memory, whatever its cluster."""
    found = [card for folder in _folders(run_dir) for card in cards(folder)]
    return [card.host_memory_bytes for card in found if card.host_memory_bytes]


def clean_dead(cluster_dir: Path) -> list[str]:
    """Remove the folders of stores that are dead; return their names.

    A folder without a card may belong to a store that is just starting and is left.
    """
    gone = []
    for folder in _folders(cluster_dir):
        card = read_card(folder)
        if card is not None and not is_alive(card):
            remove_folder(folder)
            gone.append(folder.name)
    return gone


def remove_folder(folder: Path) -> None:
    """Remove a folder of ours with what is in it, as far as that can be done."""
    import shutil  # noqa: PLC0415 - a store starts without it

    shutil.rmtree(folder, ignore_errors=True)


def _folders(cluster_dir: Path) -> list[Path]:
    try:
        return [path for path in cluster_dir.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def running_up(run_dir: Path) -> dict[str, Any] | None:
    """Give what `tensorcast up` wrote of its cluster, while the very process that did lives."""
    try:
        known: dict[str, Any] = msgspec.json.decode((run_dir / UP_NAME).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return known if process_start(known["pid"]) == known["pid_start"] else None


# ------------------------------------------------------------------ processes
class PeerCredentials(NamedTuple):
    """Who is at the other end of a unix socket, as the kernel says."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Ask the kernel who is at the other end of a connected unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return PeerCredentials(*struct.unpack("3i", raw))


class PidWatch:
    """A process to be told about: readable (`fileno`) once it has ended.

    A process of another container, of which the kernel says only that it is hidden (pid
    0), is never known to have ended; the end of its connection must do.

    Parameters
    ----------
    pid : int
        The process.
    start : int
        Its start time as `process_start` gives it; 0 takes whoever has the pid now.
    fd : int
        A descriptor of the process that exists already.
    """

    def __init__(self, pid: int, start: int = 0, *, fd: int = -1) -> None:
        self.pid = pid
        self._fd = fd
        self._hidden = pid <= 0
        if fd >= 0 or self._hidden:
            return
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        # Looked at after the descriptor exists: from here on the pid cannot be re-used.
        now = process_start(pid)
        if now == 0 or (start and now != start):
            self.close()

    @classmethod
    def of_peer(cls, sock: socket.socket) -> PidWatch:
        """Watch the process at the other end of a unix socket."""
        pid = peer_credentials(sock).pid
        try:
            fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:  # before Linux 6.5, or the peer has ended
            return cls(pid)
        return cls(pid, fd=fd)

    def fileno(self) -> int:
        """Descriptor to poll for reading; -1 when gone already, or hidden from us."""
        return self._fd

    def is_gone(self) -> bool:
        """Say whether the process is known to have ended."""
        if self._fd < 0:
            return not self._hidden
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching; counts as gone from then on."""
        self._hidden = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
