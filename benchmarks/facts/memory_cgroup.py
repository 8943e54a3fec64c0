"""A memory cgroup smaller than what is to be written: who is killed, when, and could
our own arithmetic have said so before?

1. Every process in the group is a child of this script; the group is made for the
   case and removed after it. Without the right to make one the script skips.
2. The writer fills a memory file of twice the limit, by each way there is; beside it
   sits a *bystander* (a worker) with private memory of its own.
3. Headroom is limit - usage + inactive_file, read before each step of 64 MiB.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.facts import linux
from benchmarks.facts.linux import MIB, READ, WRITE
from benchmarks.facts.report import show, skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.facts.report import Row

LIMIT = 256 * MIB
WANTED = 512 * MIB
STEP = 64 * MIB
BYSTANDER = 64 * MIB
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A memory cgroup, of version 1 or 2."""

    def __init__(self, name: str) -> None:
        controllers = V2 / "cgroup.controllers"
        self.two = controllers.exists() and "memory" in controllers.read_text()
        self.path = (V2 if self.two else V1) / f"tensorcast-fact-{os.getpid()}-{name}"
        self.path.mkdir()
        limit = "memory.max" if self.two else "memory.limit_in_bytes"
        (self.path / limit).write_text(str(LIMIT))

    def usage(self) -> int:
        name = "memory.current" if self.two else "memory.usage_in_bytes"
        return int((self.path / name).read_text())

    def stat(self, key: str) -> int:
        key = key if self.two else f"total_{key}"
        lines = (self.path / "memory.stat").read_text().splitlines()
        return next((int(ln.split()[1]) for ln in lines if ln.split()[0] == key), 0)

    def headroom(self) -> int:
        return LIMIT - self.usage() + self.stat("inactive_file")

    def kills(self) -> int:
        name = "memory.events" if self.two else "memory.oom_control"
        lines = (self.path / name).read_text().splitlines()
        return next(int(ln.split()[1]) for ln in lines if ln.startswith("oom_kill "))

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        for _ in range(100):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                return


def touch(_: Group, tell: Callable[[int], None]) -> None:
    """Write through a shared map."""
    fd = linux.fresh_file(WANTED)
    array = linux.array_at(linux.map_file(fd, WANTED, prot=READ | WRITE), WANTED)
    for at in range(0, WANTED, MIB):
        array[at : at + MIB] = 1
        tell(at + MIB)


def pwrite(_: Group, tell: Callable[[int], None]) -> None:
    """Write by descriptor."""
    fd, block = linux.fresh_file(WANTED), b"1" * MIB
    for at in range(0, WANTED, MIB):
        os.pwrite(fd, block, at)
        tell(at + MIB)


def fallocate(_: Group, tell: Callable[[int], None]) -> None:
    """Reserve everything in one call."""
    fd = linux.fresh_file(WANTED)
    os.posix_fallocate(fd, 0, WANTED)
    tell(WANTED)


def guarded(group: Group, tell: Callable[[int], None]) -> None:
    """Reserve in steps, each after a look at the headroom; refuse in time."""
    fd = linux.fresh_file(WANTED)
    reserve = max(LIMIT // 20, 16 * MIB)
    for at in range(0, WANTED, STEP):
        if group.headroom() < STEP + reserve:
            raise MemoryError
        os.posix_fallocate(fd, at, STEP)
        tell(at + STEP)


def after_file_cache(group: Group, tell: Callable[[int], None]) -> None:
    """The same when a file read before fills the group: inactive_file is given back."""
    with tempfile.NamedTemporaryFile(dir=str(Path.home())) as file:
        for _ in range(128):
            file.write(b"2" * MIB)
        file.flush()
        os.fsync(file.fileno())
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        while os.read(file.fileno(), MIB):
            pass
        free = LIMIT - group.usage()
        sys.stderr.write(
            f"free {free // MIB} MiB, with inactive_file {group.headroom() // MIB}\n"
        )
        guarded(group, tell)


def bystand(ready: int, adjust: int) -> None:
    """Hold private memory and wait."""
    Path("/proc/self/oom_score_adj").write_text(str(adjust))
    held = mmap.mmap(-1, BYSTANDER)
    for at in range(0, BYSTANDER, mmap.PAGESIZE):
        held[at] = 1
    os.write(ready, b"1")
    signal.pause()


def child(group: Group, work: Callable[[], None]) -> int:
    """Fork into the group."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        group.enter()
        work()
        code = 0
    except MemoryError:
        code = 3
    except OSError as error:
        sys.stderr.write(f"{error!r}\n")
        code = 4
    finally:
        os._exit(code)


def case(
    name: str,
    way: Callable[[Group, Callable[[int], None]], None],
    adjust: int,
) -> Row:
    """One group, a bystander, a writer."""
    group = Group("case")
    ready_r, ready_w = os.pipe()
    bystander = child(group, lambda: bystand(ready_w, adjust))
    os.read(ready_r, 1)
    before = group.headroom()
    told, tell = os.pipe()

    def say(done: int) -> None:
        os.write(tell, done.to_bytes(8, "little"))

    writer = child(group, lambda: way(group, say))
    os.close(tell)
    done = 0
    while block := os.read(told, 4096):
        done = int.from_bytes(block[-8:], "little")
    status = os.waitpid(writer, 0)[1]
    time.sleep(0.05)
    ended, bystander_status = os.waitpid(bystander, os.WNOHANG)
    if not ended:
        os.kill(bystander, signal.SIGTERM)
        os.waitpid(bystander, 0)
    row = {
        "way": name,
        "bystander's oom_score_adj": adjust,
        "headroom before MiB": before // MIB,
        "written MiB": done // MIB,
        "writer": _end(status),
        "bystander": _end(bystander_status) if ended else "lives",
        "oom kills": group.kills(),
    }
    for fd in (ready_r, ready_w, told):
        os.close(fd)
    group.remove()
    return row


def _end(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    return {0: "done", 3: "refused in time"}.get(os.WEXITSTATUS(status), "failed")


def main() -> None:
    """Every way, with and without a bystander that is offered to the killer."""
    try:
        Group("probe").remove()
    except OSError as error:
        skip("memory_cgroup", f"no memory cgroup can be made here: {error}")
        return
    rows = [
        case(name, way, adjust)
        for name, way in (
            ("touch a map", touch),
            ("pwrite", pwrite),
            ("fallocate at once", fallocate),
            ("64 MiB steps after our arithmetic", guarded),
            ("the same, 128 MiB of file cache", after_file_cache),
        )
        for adjust in (0, 800)
    ]
    show("memory_cgroup", rows, limit_mib=LIMIT // MIB, bystander_mib=BYSTANDER // MIB)


if __name__ == "__main__":
    main()
