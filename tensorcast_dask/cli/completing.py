"""What shells offer at a TAB of what the running cluster has: ids, versions, aliases, nodes, plans.

Rules:

1. A TAB never fails, never talks and never hangs: with no cluster, a slow one or a refusal nothing
   is offered, after `WITHIN_S` at the latest. It installs nothing and changes nothing.
2. At most `MOST` are offered, and none that a shell would have to be told of: a name that has a
   blank, a quote or a `$(...)` in it becomes no part of a command line by itself.
3. bash cuts words at `:`, `@` and `=`. Its line is taken apart here, and what it has already is
   left off again. A script of an earlier release, which sends words, is answered as ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    split_arg_string,
)

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.signals import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import click

__all__ = [
    "MOST",
    "WITHIN_S",
    "Bash",
    "families",
    "ids",
    "nodes",
    "plans",
    "refs",
    "versions",
]

WITHIN_S: Final = 5.0
MOST: Final = 200
#: How long the tables are waited for, which have to catch up first.
_TABLES_S: Final = 1.5
_PLAIN: Final = re.compile(r"[\w./@][\w./@:=%+-]*")

Complete: TypeAlias = (
    "Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]"
)


# ------------------------------------------------------------------ of a cluster
def _completes(
    look: Callable[[Any, click.Context, str], Iterable[str]],
) -> Complete:
    """Make it what click asks."""

    def complete(
        context: click.Context,
        _: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        names = dict.fromkeys(_looked(look, context, incomplete))
        fits = [name for name in names if name.startswith(incomplete)]
        plain = [name for name in fits if _PLAIN.fullmatch(name)]
        return [CompletionItem(name) for name in plain[:MOST]]

    return complete


def _looked(
    look: Callable[[Any, click.Context, str], Iterable[str]],
    context: click.Context,
    incomplete: str,
) -> list[str]:
    from tensorcast_dask.cli.local import running_address

    address = context.params.get("scheduler") or running_address()
    if not address:
        return []
    with _in_silence():
        try:
            from tensorcast_dask.api.connect import connect

            with connect(address, install=False, deadline=WITHIN_S - 2) as cast:
                return list(look(cast, context, incomplete))
        except (TensorCastError, OSError, TimeoutError, ValueError):
            return []


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Keep rule 1, also where what is asked does not keep its own time."""

    def give_up(*_: object) -> None:
        os._exit(0)  # whoever waits here would be waited for at the end, too

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, WITHIN_S)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ids(cast: Any, _: click.Context, incomplete: str) -> list[str]:
    found = [one.id for one in cast.list(incomplete, limit=MOST)]
    begins = f"starts_with(name, {_quoted(incomplete)})"
    named = (
        f"SELECT name FROM (SELECT name FROM aliases UNION SELECT id AS name FROM views) "  # noqa: S608 - quoted
        f"WHERE {begins} ORDER BY name"
    )
    with contextlib.suppress(TensorCastError):
        rows = cast.sql(named, limit=MOST, deadline=_TABLES_S).rows
        found += [str(name) for (name,) in rows]
    return found


def _versions(cast: Any, context: click.Context, _: str) -> list[str]:
    # Of a line that ends with the option itself click has parsed no arguments.
    name = context.params.get("id_") or next(iter(context.args), "")
    of_it = (
        f"SELECT version FROM versions WHERE id = {_quoted(name)} ORDER BY version DESC"  # noqa: S608 - quoted
    )
    return [str(number) for (number,) in cast.sql(of_it, limit=MOST).rows]


def _nodes(cast: Any, *_: object) -> list[str]:
    cards = [state.card for state in cast.nodes()]
    return [card.name or card.node for card in cards if card.kind == "store"]


def _plans(cast: Any, _: click.Context, incomplete: str) -> list[str]:
    found = cast.signals.snapshot(f"plan/{incomplete}", limit=MOST)
    return [name.removeprefix("plan/") for name in found]


def _refs(cast: Any, context: click.Context, incomplete: str) -> list[str]:
    kind, colon, key = incomplete.partition(":")
    if colon and kind == "plan":
        return [f"plan:{one}" for one in _plans(cast, context, key)]
    known = [one.name for one in cast.instances()]
    return [*_ids(cast, context, incomplete), *_nodes(cast), *known]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


#: Ids of artifacts and views, and aliases.
ids: Final = _completes(_ids)
#: Of the artifact that stands before.
versions: Final = _completes(_versions)
#: Names of nodes.
nodes: Final = _completes(_nodes)
#: Keys of runs.
plans: Final = _completes(_plans)
#: What `explain` and `story` take.
refs: Final = _completes(_refs)


def families(
    context: click.Context,  # noqa: ARG001 - click calls it so
    parameter: click.Parameter,  # noqa: ARG001
    incomplete: str,
) -> list[CompletionItem[str]]:
    """Offer what names of signals begin with."""
    fits = [one for one in FAMILIES if one.startswith(incomplete)]
    return [CompletionItem(one) for one in fits]


# ------------------------------------------------------------------ bash (rule 3)
class Bash(BashComplete):
    """Completion for bash, also of words that bash cuts."""

    name = "bash"
    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value
    response=$(env COMP_LINE="${COMP_LINE:0:$COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \\
%(complete_var)s=bash_complete "$1" 2>/dev/null)
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            COMPREPLY=()
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
        fi
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Give the words before the one that is completed, and that."""
        line = os.environ.get("COMP_LINE")
        if line is None:
            return super().get_completion_args()
        words = split_arg_string(line)
        incomplete = "" if line[-1:].isspace() or len(words) < 2 else words.pop()
        return words[1:], incomplete

    def complete(self) -> str:
        """Give what bash puts in the place of the end of the word, as it cuts it."""
        breaks = os.environ.get("COMP_BREAKS")
        if breaks is None:
            return super().complete()
        args, incomplete = self.get_completion_args()
        at = max((incomplete.rfind(one) for one in breaks), default=-1) + 1
        items = self.get_completions(args, incomplete)
        # Files and folders are completed by bash itself; their value is what is there already.
        return "\n".join(
            f"{one.type},{one.value[at:] if one.type == 'plain' else one.value}"
            for one in items
        )


add_completion_class(Bash, "bash")
