"""Whole clusters of real processes, as an operator starts them, and a plain look at them.

Rules:

1. Every process is the test's own child (or, a store, known by its card), and is ended by
   its pid. Nothing is found by name.
2. All live under one run directory of the test, so that no cluster meets another.
3. What is true is read from the cards of the stores and from the catalog, never from logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from distributed import Client
from distributed.comm.core import connect
from distributed.core import Status
from distributed.security import Security

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.store.launch import LOG_NAME
from tensorcast_dask.tensors.ids import HostId, RequestId, SessionId
from tensorcast_dask.tensors.messages import (
    Answer,
    Message,
    NodeCard,
    Nodes,
    NodesAsked,
    NodeState,
    OpenSession,
    SessionOpen,
    decode,
    encode,
)
from tests.kit.eventually import eventually

__all__ = ["Cluster", "Process", "RawSession", "free_port"]

T = TypeVar("T")
START_S = 60.0
#: Has the kernel end a child when the test process is killed, then becomes that child.
LEASH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def free_port() -> int:
    """Give a port that was free a moment ago."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Process:
    """One child process and its family."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                argv,
                env=env,
                cwd=log.parent,  # nothing is importable by chance
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def children(self) -> list[int]:
        """Pids of its direct children."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def worker_pid(self) -> int:
        """Pid of the worker that this nanny looks after."""
        return eventually(self.workers, within_s=START_S, what="a worker process")[0]

    def workers(self) -> list[int]:
        """Pids of the workers that this nanny looks after."""
        found = []
        for pid in self.children():
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def wait(self, within_s: float = 20.0) -> int:
        """Wait for its end; give the exit status."""
        return self._popen.wait(within_s)

    def end(self) -> None:
        """Make sure that it and its workers are gone; stores are left."""
        family = self.workers() if self.alive else []
        for pid in [*family, self.pid]:
            for sig in (signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)


class Cluster:
    """`dask scheduler` with our preload, and `dask worker` processes.

    Parameters
    ----------
    folder : Path
        For the run directory and logs; short, since sockets live in it.
    settings : dict
        Environment variables `TENSORCAST_...` without the prefix.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, str] | None = None,
        *,
        preload: bool = True,
        tls: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.preload = preload
        self.tls = tls or {}
        self.port = free_port()
        scheme = "tls" if tls else "tcp"
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self._numbers = itertools.count()
        self.processes: list[Process] = []
        self.env = dict(os.environ) | {
            "TENSORCAST_RUN_DIR": str(self.run_dir),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "0.95",
        }
        for key, value in (settings or {}).items():
            self.env[f"TENSORCAST_{key}"] = value
        self.scheduler: Process

    def move(self) -> None:
        """Have the next scheduler listen on another port."""
        self.port = free_port()
        self.address = f"{self.address.partition(':')[0]}://127.0.0.1:{self.port}"

    # ------------------------------------------------------------------ processes
    def _spawn(self, *words: str, env: dict[str, str] | None = None) -> Process:
        number = next(self._numbers)
        log = self.folder / f"{number}-{words[0]}.log"
        argv = [sys.executable, "-c", LEASH, "-m", "dask", *words]
        process = Process(argv, self.env | (env or {}), log)
        self.processes.append(process)
        return process

    def _tls_words(self) -> list[str]:
        return [
            word for key, path in self.tls.items() for word in (f"--tls-{key}", path)
        ]

    def start_scheduler(self, env: dict[str, str] | None = None) -> Process:
        """Start a scheduler on this cluster's port."""
        words = ["--host", self.address, "--no-dashboard", *self._tls_words()]
        if self.preload:
            words += ["--preload", "tensorcast_dask.deploy"]
        self.scheduler = self._spawn("scheduler", *words, env=env)
        return self.scheduler

    def start_worker(
        self,
        *,
        name: str = "",
        nanny: bool = True,
        memory_limit: str = "1GiB",
        env: dict[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> Process:
        """Start a worker process."""
        words = [self.address, "--nthreads", "1", "--memory-limit", memory_limit]
        words += ["--no-dashboard", "--host", host, *self._tls_words()]
        words += ["--local-directory", str(self.folder / "dask")]
        words += ["--name", name] if name else []
        words += [] if nanny else ["--no-nanny"]
        return self._spawn("worker", *words, env=env)

    def close(self) -> None:
        """End everything that was started, stores included."""
        for process in self.processes:
            process.end()
        for card in self.stores():
            with contextlib.suppress(ProcessLookupError):
                os.kill(card.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what is there
    def stores(self) -> list[NodeCard]:
        """Give the cards of the stores that live."""
        if not self.run_dir.is_dir():
            return []
        folders = [path for path in self.run_dir.iterdir() if path.is_dir()]
        return [card for folder in folders for card in hosts.cards(folder)]

    def wait_for_stores(self, count: int, *, attended: bool = True) -> list[NodeCard]:
        """Wait until exactly so many stores live (and have a worker)."""

        seen: list[NodeCard] = []

        def there() -> bool:
            seen[:] = self.stores()
            good = [card for card in seen if bool(card.worker) or not attended]
            return len(seen) == len(good) == count

        eventually(there, within_s=START_S, what=f"{count} stores")
        return seen

    def logs(self) -> str:
        """Give the end of every log, for a failing test."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            texts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")
        return "\n".join(texts)

    def account(self, card: NodeCard) -> str:
        """Give all that is known of a store that should not be there, for a failing test."""
        try:
            state = json.dumps(debug(card))
        except TensorCastError as error:
            state = f"it does not answer: {error}"
        log = Path(card.socket).parent / LOG_NAME
        told = log.read_text(errors="replace") if log.exists() else "no log"
        return f"{card.node}: {state}\n--- its log\n{told[-4000:]}\n{self.logs()}"

    def nodes(self) -> list[NodeState]:
        """Ask the catalog for its nodes."""
        return asyncio.run(self._nodes())

    async def _nodes(self) -> list[NodeState]:
        async with RawSession(self.address, self.security()) as session:
            return list((await session.ask(NodesAsked(rid=session.rid()), Nodes)).nodes)

    def security(self) -> Security | None:
        """Give Dask's Security for clients of this cluster."""
        if not self.tls:
            return None
        return Security(
            tls_ca_file=self.tls["ca-file"],
            tls_client_cert=self.tls["cert"],
            tls_client_key=self.tls["key"],
            require_encryption=True,
        )

    def wait_for_nodes(
        self, count: int, *, attended: int | None = None
    ) -> list[NodeState]:
        """Wait until the catalog lists so many nodes."""

        seen: list[NodeState] = []

        def there() -> bool:
            try:
                seen[:] = self.nodes()
            except OSError:
                return False
            manned = sum(node.attended for node in seen)
            assert (len(seen), manned) == (
                count,
                manned if attended is None else attended,
            )
            return True

        eventually(there, within_s=START_S, what=f"{count} nodes, {attended} attended")
        return seen

    def wait_for_workers(self, count: int) -> None:
        """Wait for workers that are there to stay.

        A worker registers, runs tasks and has its store before its nanny knows that it has
        started; a nanny whose worker is killed until then gives up, and starts no other.
        """

        def all_run() -> bool:
            workers = client.scheduler_info(n_workers=-1)["workers"]
            minded = [address for address, at in workers.items() if at["nanny"]]
            told = client.run(status_of, nanny=True, workers=minded) if minded else {}
            return set(told.values()) <= {Status.running}

        with Client(self.address, security=self.security()) as client:
            client.wait_for_workers(count, timeout=START_S)
            eventually(all_run, within_s=START_S, what="nannies that have started")


def status_of(dask_worker: Any) -> Status:
    """Give the status of the worker or nanny that runs this."""
    status: Status = dask_worker.status
    return status


class RawSession:
    """A session as it stands on the wire."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.address = address
        self.security = security
        self.name = SessionId(f"raw-{os.getpid()}-{time.monotonic_ns()}")
        self._count = itertools.count(1)
        self._comm: Any = None
        self.greeting: SessionOpen

    def rid(self) -> RequestId:
        """Mint the id of a request."""
        return RequestId(f"{self.name}:{next(self._count)}")

    async def open(self) -> SessionOpen:
        """Connect and greet."""
        how = (
            {} if self.security is None else self.security.get_connection_args("client")
        )
        self._comm = await connect(self.address, **how)
        await self._comm.write({"op": "tensorcast-session", "reply": False})
        opening = OpenSession(
            rid=self.rid(), session=self.name, pid=os.getpid(), host=HostId("")
        )
        self.greeting = await self._exchange(opening, SessionOpen)
        return self.greeting

    async def ask(self, request: Message, kind: type[T]) -> T:
        """Ask one thing and wait for its answer."""
        return await self._exchange(request, kind)

    async def _exchange(self, request: Message, kind: type[T]) -> T:
        await self._comm.write(encode(request))
        while True:
            raw = await self._comm.read()
            if not isinstance(raw, bytes):
                problem = f"no catalog here: {raw!r}"
                raise ConnectionError(problem)
            answer = decode(raw, Answer)
            if answer.rid == request.rid:  # type: ignore[attr-defined]
                break
        if answer.fault is not None:
            raise answer.fault.error()
        return decode(answer.value, kind)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._comm.abort()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process with SIGSTOP for the length of a block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def debug(card: NodeCard) -> dict[str, Any]:
    """Give a store's own account of itself."""
    from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
    from tensorcast_dask.tensors.messages import Role, State, StateAsked

    credentials = Credentials(role=Role.PROBE, host=card.host)
    with Channel.connect(card, credentials=credentials, prefer=Prefer.UNIX) as channel:
        frame = channel.call(StateAsked(rid=RequestId("debug:1")), expect=State)
        state: dict[str, Any] = json.loads(frame.message.json)
        return state
