"""Named fault points: places where a test may stop, slow, break or kill the process.

A piece of code names the instant at which dying would hurt most::

    faults.point("save.before_rename")

and a test, in this process or in another one, says what happens there. Off by default:
an unarmed point costs one call and one comparison.

Arming
------
- `TENSORCAST_FAULTS`: a spec in the environment, read at the process's first point.
- `TENSORCAST_FAULTS_FILE`: the path of a file that holds a spec. It is looked at on every
  hit and read again when it changed, so it arms and disarms processes that already run
  (write it with `write_spec`, which renames it into place). A missing file arms nothing.
- `arm(spec)`, `disarm()` and the context manager `armed(spec)`: in this process.

The three add up; rules are tried in the order arm, file, environment, and all that match act.

Spec
----
Rules separated by `;` or line ends; text after `#` is ignored::

    point [ '[' filter ']' ] = action [ ':' argument ] [ '@' hits ]

    save.before_rename=kill@2          the second hit of this process: SIGKILL to itself
    copy.chunk=raise:PeerLost@3-5      hits 3 to 5 raise tensorcast_dask's PeerLost
    spill.write=raise:ENOSPC@1         the first hit raises OSError(ENOSPC)
    put.*=delay:0.05                   every hit of every such point sleeps 50 ms
    copy.chunk[model/*]=pause:20@1     hits whose detail matches `model/*`
    destroy.before_drop[pid:417]=kill     only in process 417

`point` is a glob over names. Actions: `pause[:max_s]` waits until the rule is no longer armed,
at most `max_s` (60); `delay:s` sleeps; `raise:Kind` raises an error of the package by its kind, or
an OSError by its errno name; `kill`; `stop` (SIGSTOP to itself); `exit[:code]` leaves at
once, running nothing; `log` only counts. `hits` is `n`, `n-m` or `n+`; without it every hit counts.

With `TENSORCAST_FAULTS_LOG` naming a file, each hit that acts first appends one line
``<monotonic ns> <pid> <point> <action> <hit> <detail>`` (`read_log`), so that a test can wait
until a process has come to a point.

Rules:

1. Nothing here acts unless a test armed it; production code never arms.
2. Hits are counted per rule and process, from the moment that the rule was armed.
   A rule that an edited file still contains keeps its count.
3. A spec that cannot be read raises InvalidArgument at the point: a mistyped fault
   must not pass for a passed test.
4. A pause ends by itself: no rule can hang a test for ever.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensorcast_dask import exceptions
from tensorcast_dask.exceptions import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = [
    "Action",
    "Hit",
    "Rule",
    "arm",
    "armed",
    "disarm",
    "parse",
    "point",
    "point_async",
    "read_log",
    "take",
    "write_spec",
]

ENV_SPEC: Final = "TENSORCAST_FAULTS"
ENV_FILE: Final = "TENSORCAST_FAULTS_FILE"
ENV_LOG: Final = "TENSORCAST_FAULTS_LOG"

_MAX_PAUSE_S: Final = 60.0
_POLL_S: Final = 0.01
_RULE = re.compile(
    r"(?P<name>[\w.*?-]+)\s*(?:\[(?P<only>[^\]]*)\])?\s*=\s*"
    r"(?P<action>[a-z]+)(?::(?P<argument>[^@\s]+))?\s*(?:@(?P<hits>\d+(?:-\d+|\+)?))?"
)


class Action(StrEnum):
    """What a fault does to the thread that hits it."""

    PAUSE = "pause"
    DELAY = "delay"
    RAISE = "raise"
    KILL = "kill"
    STOP = "stop"
    EXIT = "exit"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of a spec."""

    name: str
    action: Action
    argument: str = ""
    only: str = ""
    first: int = 1
    last: int | None = None

    def matches(self, name: str, detail: str) -> bool:
        """Say whether a hit of `name` with `detail` concerns this rule."""
        if not fnmatchcase(name, self.name):
            return False
        if self.only.startswith("pid:"):
            return self.only == f"pid:{os.getpid()}"
        return not self.only or fnmatchcase(detail, self.only)

    def covers(self, hit: int) -> bool:
        """Say whether the `hit`-th hit, from 1, is one that acts."""
        return self.first <= hit and (self.last is None or hit <= self.last)

    @property
    def seconds_s(self) -> float:
        """The argument as a time; a pause without one has the longest."""
        return (
            min(float(self.argument), _MAX_PAUSE_S) if self.argument else _MAX_PAUSE_S
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """One line of the log."""

    at_ns: int
    pid: int
    name: str
    action: Action
    hit: int
    detail: str


def parse(spec: str) -> tuple[Rule, ...]:
    """Read a spec.

    Raises
    ------
    InvalidArgument
        When a rule is not written as the head of this module says.
    """
    lines = (line.split("#")[0] for line in spec.replace(";", "\n").splitlines())
    return tuple(_parse_rule(line.strip()) for line in lines if line.strip())


def _parse_rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None or found["action"] not in Action.__members__.values():
        message = f"fault {text!r} is not `point=action[:argument][@hits]`; see tensorcast_dask.dataplane.faults"
        raise InvalidArgument(message)
    first, last = _hits(found["hits"])
    rule = Rule(
        name=found["name"],
        action=Action(found["action"]),
        argument=found["argument"] or "",
        only=found["only"] or "",
        first=first,
        last=last,
    )
    _check_argument(rule, text)
    return rule


def _hits(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 1, None
    if text.endswith("+"):
        return int(text[:-1]), None
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _check_argument(rule: Rule, text: str) -> None:
    try:
        match rule.action:
            case Action.DELAY:
                float(rule.argument)
            case Action.PAUSE:
                float(rule.argument or 0)
            case Action.EXIT:
                int(rule.argument or 0)
            case Action.RAISE:
                _error(rule.argument, "")
            case Action.KILL | Action.STOP | Action.LOG:
                pass
    except (ValueError, KeyError) as error:
        message = f"fault {text!r}: {rule.argument!r} is no argument of {rule.action}"
        raise InvalidArgument(message) from error


def _error(kind: str, where: str) -> Exception:
    message = f"fault point {where} was armed to raise this"
    found = getattr(exceptions, kind, None)
    if isinstance(found, type) and issubclass(found, exceptions.TensorCastError):
        return found(message)
    codes = {name: code for code, name in errno.errorcode.items()}
    return OSError(codes[kind], os.strerror(codes[kind]), where)


class _Armed:
    """The rules of one process and their counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local: tuple[Rule, ...] = ()
        self._env: tuple[Rule, ...] = parse(os.environ.get(ENV_SPEC, ""))
        self._file: tuple[Rule, ...] = ()
        self._path = os.environ.get(ENV_FILE, "")
        self._stamp: tuple[int, int, int] | None = None
        self._counts: dict[Rule, int] = {}

    @property
    def idle(self) -> bool:
        """True when nothing can be armed here except by `arm`."""
        return not (self._local or self._env or self._path)

    def set_local(self, rules: tuple[Rule, ...]) -> None:
        with self._lock:
            for rule in rules:
                self._counts.pop(rule, None)
            self._local = rules

    @property
    def local(self) -> tuple[Rule, ...]:
        return self._local

    def rules(self) -> tuple[Rule, ...]:
        with self._lock:
            self._reread()
            return (*self._local, *self._file, *self._env)

    def _reread(self) -> None:
        if not self._path:
            return
        try:
            stat = Path(self._path).stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            rules = parse(Path(self._path).read_text())
        except FileNotFoundError:
            stamp, rules = None, ()
        for rule in set(self._file) - set(rules):
            self._counts.pop(rule, None)
        self._stamp, self._file = stamp, rules

    def count(self, rule: Rule) -> int:
        with self._lock:
            self._counts[rule] = self._counts.get(rule, 0) + 1
            return self._counts[rule]


#: Rules of this process: None before the first point, False once nothing is armed.
_state: _Armed | None = None
_off: bool = False
_first = threading.Lock()


def _armed() -> _Armed:
    global _state, _off  # noqa: PLW0603  # one process has one set of faults
    with _first:
        if _state is None:
            _state = _Armed()
        _off = _state.idle
        return _state


def arm(spec: str) -> None:
    """Arm `spec` in this process, in place of what was armed here before."""
    _armed().set_local(parse(spec))
    _armed()


def disarm() -> None:
    """Drop what `arm` armed; the environment's and the file's rules stay."""
    arm("")


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm `spec` in this process for the length of a block."""
    before = _armed().local
    arm(spec)
    try:
        yield
    finally:
        _armed().set_local(before)
        _armed()


def write_spec(path: str | os.PathLike[str], spec: str) -> None:
    """Write the file that `TENSORCAST_FAULTS_FILE` names, whole or not at all."""
    parse(spec)
    target = Path(path)
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    fresh.write_text(spec)
    fresh.replace(target)


def take(name: str, detail: str = "") -> list[Rule]:
    """Count one hit of `name` and return the rules that act on it.

    For shells that carry faults out by themselves; others call `point`.
    """
    state = _armed()
    due = []
    for rule in state.rules():
        if rule.matches(name, detail):
            hit = state.count(rule)
            if rule.covers(hit):
                _log(name, rule, hit, detail)
                due.append(rule)
    return due


def point(name: str, detail: str = "") -> None:
    """Let whatever is armed for `name` happen here.

    Parameters
    ----------
    name : str
        The point, `noun.instant`.
    detail : str
        What a rule's filter looks at: an artifact id, a node, a path.
    """
    if _off:
        return
    for rule in take(name, detail):
        match rule.action:
            case Action.PAUSE:
                deadline_s = time.monotonic() + rule.seconds_s
                while rule in _armed().rules() and time.monotonic() < deadline_s:
                    time.sleep(_POLL_S)
            case Action.DELAY:
                time.sleep(rule.seconds_s)
            case _:
                _act(rule, name)


async def point_async(
    name: str, detail: str = "", *, sleep: Callable[[float], Awaitable[object]]
) -> None:
    """`point` for an event loop: a pause or delay awaits `sleep`, it does not block."""
    if _off:
        return
    for rule in take(name, detail):
        match rule.action:
            case Action.PAUSE:
                deadline_s = time.monotonic() + rule.seconds_s
                while rule in _armed().rules() and time.monotonic() < deadline_s:
                    await sleep(_POLL_S)
            case Action.DELAY:
                await sleep(rule.seconds_s)
            case _:
                _act(rule, name)


def _act(rule: Rule, name: str) -> None:
    match rule.action:
        case Action.RAISE:
            raise _error(rule.argument, name)
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.EXIT:
            os._exit(int(rule.argument or 0))
        case _:
            pass


def _log(name: str, rule: Rule, hit: int, detail: str) -> None:
    path = os.environ.get(ENV_LOG)
    if not path:
        return
    flat = detail.replace("\n", " ")
    line = f"{time.monotonic_ns()} {os.getpid()} {name} {rule.action} {hit} {flat}\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def read_log(path: str | os.PathLike[str]) -> list[Hit]:
    """Return the hits that processes have written to `path`; none when it is missing."""
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []
    hits = []
    for line in lines:
        at_ns, pid, name, action, hit, *detail = line.split(" ", 5)
        hits.append(
            Hit(int(at_ns), int(pid), name, Action(action), int(hit), "".join(detail))
        )
    return hits
