"""Reading artifacts: maps where a node of this host holds them, bytes over TCP elsewhere.

The order in which bytes are looked for:

1. the node of this host where the generation was last found, else the few nodes of this
   host one after the other: no word with the catalog;
2. any node of this host that the catalog lists;
3. a node of this host that is told to get it (`Ensure`), then 2: the next reader maps;
4. where no node is on this host: chunks from any holder into this process's own memory.

Rules:

1. A result is private to its caller on every path.
2. A result's memory lives until its last tensor is gone, whatever is destroyed, evicted or
   closed meanwhile.
3. Bytes that crossed a host's border are verified before they are handed out.
4. A view moves the bytes of the view, not of its base; a part of a tensor that of the part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.api.actions import moves, names, on_device
from tensorcast_dask.api.actions.fetching import Part, fetch
from tensorcast_dask.api.artifact import spec_dict
from tensorcast_dask.api.connection.operation import Operation
from tensorcast_dask.dataplane import arrays, tracing
from tensorcast_dask.dataplane.maps import PrivateMap
from tensorcast_dask.dataplane.reading import Found, read_lent
from tensorcast_dask.exceptions import (
    AbsentError,
    DataLost,
    DeadlineExceeded,
    Gone,
    Incomplete,
    InvalidArgument,
    Mismatch,
    NotFound,
    PeerLost,
    ResourceError,
    UnsupportedPlatform,
    WrongPeer,
)
from tensorcast_dask.tensors import requests
from tensorcast_dask.tensors.ids import Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    ChunkMap,
    ChunkMapAsked,
    Location,
    Moved,
    NodeCard,
    Nodes,
    Open,
    Opened,
    Owner,
    State,
    StateAsked,
    Tier,
    TierUse,
)
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline

__all__ = [
    "debug_state",
    "meta",
    "part",
    "pool",
    "read",
    "read_into",
    "save_view",
    "view",
]

#: How many nodes of this host are asked before the catalog, and how long each.
_TRIED: Final = 4
_LOOK_S: Final = 1.0
_UNREACHED: Final = (PeerLost, WrongPeer)
#: How often bytes of a version may arrive damaged: once or twice it may have been the way.
_MOST_DAMAGED: Final = 3
#: Of a longer part the whole is brought, where a node is here to keep it for the next reader.
_PART_BYTES: Final = 64 << 20
#: How long a reader rests before it asks the catalog again where the holders are.
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.2


# -------------------------------------------------------------------- from a local store
def _open_at(core: Core, card: NodeCard, info: ArtifactInfo, limit: Deadline) -> Found:
    """Give a replica of this host: a private map, or a copy when small."""
    generation = info.generation
    request = Open(
        rid=core.link.next_rid(),
        generation=generation,
        deadline_s=limit.left_s(),
        map=card.mapping or core.stores.own is None,
        lent=card.kind == "instance",
    )
    frame = core.stores.ask(card, request, Opened, limit)
    opened = frame.message
    index = core.stores.index(generation, opened.index)
    core.stores.remember_place(generation, card.node)
    view = View.decode(info.view) if info.view else None
    if opened.mapped:
        return Found(index, PrivateMap(frame.take_fd(), opened.nbytes).buffer, view)
    if opened.pid:
        return Found(index, _read_lent(core, card, opened, limit), view)
    return Found(index, bytearray() if frame.payload is None else frame.payload, view)


def _read_lent(
    core: Core, card: NodeCard, opened: Opened, limit: Deadline
) -> memoryview:
    """Read memory that another process lends out of it, and make sure that it stood still."""
    content = read_lent(opened)
    asked = ChunkMapAsked(rid=core.link.next_rid(), generation=opened.generation)
    if core.stores.ask(card, asked, ChunkMap, limit).message.stamp != opened.stamp:
        message = "the owner changed its memory while it was read; read again"
        raise Incomplete(message)
    return content


def _open_here(core: Core, info: ArtifactInfo, limit: Deadline) -> Found | None:
    """Take step 1; None when no node of this host has it at hand."""
    hint = core.stores.place(info.generation)
    cards = [hint] if hint is not None and hint.host == core.host else []
    if info.owner is not Owner.CALLER:
        cards += [card for card in core.stores.local()[:_TRIED] if card != hint]
    for card in cards:
        try:
            # Only a look: a node that must restore it first, or that stands still, is left
            # for what the catalog knows.
            return _open_at(core, card, info, limit.look(_LOOK_S))
        except (AbsentError, DeadlineExceeded, *_UNREACHED):
            core.stores.forget_place(info.generation)
    return None


async def _places(
    core: Core, info: ArtifactInfo, limit: Deadline
) -> Sequence[Location]:
    """Ask where it is; who is told that it is gone is told its name."""
    try:
        return await names.locate(core, info.generation, limit)
    except Gone as error:
        message = (
            f"{info.id!r} v{info.version} is gone: it was destroyed or released; "
            "ask for the artifact by its name again"
        )
        raise Gone(message, error.data) from None


async def _find(
    core: Core, info: ArtifactInfo, limit: Deadline, part: Part | None = None
) -> Found:
    """Take steps 2 to 4, again while holders come and go.

    That a version is gone or lost is the catalog's word alone: a store that does not have
    it (any more) was left by a move, a release or an eviction.
    """
    pause_s, patience_s, damaged = _FIRST_PAUSE_S, _LOOK_S, 0
    while True:
        cards = [at.card for at in await _places(core, info, limit)]
        try:
            return await _find_at(core, info, cards, limit, patience_s, part)
        except Incomplete:
            raise
        except (AbsentError, DeadlineExceeded, *_UNREACHED) as error:
            last = error
        damaged += bool(last.data.get("damaged"))
        if damaged >= _MOST_DAMAGED:
            raise last
        patience_s *= 2
        if limit.left_s() <= 0:
            message = f"{info.id!r} v{info.version} could not be read in time: {last}"
            raise DeadlineExceeded(message) from last
        await asyncio.sleep(min(pause_s, limit.left_s()))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _anywhere(core: Core, info: ArtifactInfo, limit: Deadline) -> Found:
    """Take the bytes from a node of this host, else from wherever they are."""
    found = await core.in_thread(_open_here, core, info, limit)
    return found if found is not None else await _find(core, info, limit)


async def _find_at(
    core: Core,
    info: ArtifactInfo,
    cards: list[NodeCard],
    limit: Deadline,
    patience_s: float,
    part: Part | None,
) -> Found:
    local = [c for c in cards if c.host == core.host and c.kind == "store"]
    # Who stands still is left after a while, if there is somebody else to turn to.
    each = limit.sooner(patience_s) if len(cards) > 1 else limit
    for card in local:
        try:
            return await core.in_thread(_open_at, core, card, info, each)
        except (AbsentError, *_UNREACHED):
            continue
        except DeadlineExceeded:
            if each is limit or limit.poll:
                raise
    some = part is not None or bool(info.view)
    for card in cards:
        # Of a view or a part only its bytes move; what cannot be read from here comes in chunks.
        if card.kind == "instance" and card.host == core.host and not some:
            with contextlib.suppress(AbsentError, UnsupportedPlatform, *_UNREACHED):
                return await core.in_thread(_open_at, core, card, info, each)
    if not (local or info.owner is Owner.CALLER or some):
        found = await _bring(core, info, limit)
        if found is not None:
            return found
    brought = await core.in_thread(fetch, core, info, cards, limit, part)
    return Found(*brought, cut=part is not None)


async def _bring(core: Core, info: ArtifactInfo, limit: Deadline) -> Found | None:
    """Have a node of this host get it; None when none lives or none has room."""
    for node in core.stores.local():
        operation: Operation[Any] = Operation(core, "read", info.id)
        with contextlib.suppress(AbsentError, ResourceError, *_UNREACHED):
            await moves.ensure(
                core,
                operation,
                info.generation,
                node=node.node,
                where=moves.Where(),
                why="read",
                limit=limit,
            )
            return await core.in_thread(_open_at, core, node, info, limit)
    return None


def read(
    core: Core,
    info: ArtifactInfo,
    *,
    framework: str | None,
    names: Iterable[str] | None,
    limit: Deadline,
    only: bool = False,
    device: str | None = None,
    share: bool = False,
) -> Any:
    """Give the tensors; blocks in a thread, an awaitable on the loop."""
    wanted = (
        None if names is None else [names] if isinstance(names, str) else list(names)
    )
    if device is not None and moves.where(core, device).tier is Tier.DEVICE:

        async def there() -> Any:
            made = await _read_on(core, info, device, limit, share, framework, wanted)
            return next(iter(made.values())) if only else made

        return core.call(there)
    if share:
        message = "share=True is for results on a device; what a host read maps is shared already"
        raise InvalidArgument(message)

    def finish(found: Found) -> Any:
        made = arrays.materialise(
            found.buffer,
            found.index,
            framework=framework,
            names=wanted,
            view=found.view,
        )
        return next(iter(made.values())) if only else made

    async def everywhere() -> Any:
        return finish(await _find(core, info, limit))

    async def work() -> Any:
        found = await _anywhere(core, info, limit)
        # Parts of a view may have to be copied together.
        return await core.in_thread(finish, found) if info.view else finish(found)

    if core.asynchronous:
        return core.call(work)
    # The hot path stays in the caller's thread: no hop to the event loop and back.
    with tracing.span("tensorcast read"):
        found = _open_here(core, info, limit)
        return finish(found) if found is not None else core.call(everywhere)


async def _read_on(
    core: Core,
    info: ArtifactInfo,
    device: str,
    limit: Deadline,
    share: bool,  # noqa: FBT001 - handed on
    framework: str | None,
    wanted: list[str] | None,
) -> dict[str, object]:
    """Give the tensors on a device: shared, copied there, or brought from the host."""
    uuid = await on_device.device_of(core, device, limit)
    own = await core.in_thread(core.devices.open, uuid)
    found: on_device.OnDevice | None
    if share:
        found = await on_device.shared(core, info, own, limit)
    else:
        cards = await on_device.holders(core, info, limit)
        found = await core.in_thread(on_device.copied, core, info, own, limit, cards)
    if found is None:
        here = await _anywhere(core, info, limit)
        # A view is copied to be packed: not on the event loop.
        index, content = await core.in_thread(here.packed)
        found = await core.in_thread(on_device.loaded, own, index, content)
    return arrays.materialise_on(
        found.holding, found.index, framework=framework, names=wanted
    )


async def part(
    core: Core, info: ArtifactInfo, wanted: Part, limit: Deadline
) -> memoryview:
    """Give some bytes of a tensor: out of a map, else only they come from a holder.

    All of it comes as ever where it is a view, and where a node of this host is to keep what was
    asked for at length.
    """
    found = await core.in_thread(_open_here, core, info, limit)
    if found is None:
        large = wanted.stop - wanted.start > _PART_BYTES and core.stores.local()
        only = None if info.view or large else wanted
        found = await _find(core, info, limit, only)
    if found.cut:
        return memoryview(found.buffer)

    def cut() -> memoryview:
        raw: Any = arrays.materialise(
            found.buffer,
            found.index,
            framework="raw",
            names=[wanted.tensor],
            view=found.view,
        )[wanted.tensor]
        return memoryview(raw.data).cast("B")[wanted.start : wanted.stop]

    # Parts of a view may have to be copied together.
    return await core.in_thread(cut) if info.view else cut()


def read_into(
    core: Core, info: ArtifactInfo, targets: Mapping[str, Any], limit: Deadline
) -> Any:
    """Copy into the caller's arrays, all of them checked first."""
    if not hasattr(targets, "items"):
        message = "targets must map tensor names to arrays"
        raise InvalidArgument(message)

    async def work() -> None:
        if await on_device.bind(core, info, targets, limit):
            return
        found = await _anywhere(core, info, limit)
        await core.in_thread(_copy_out, found, targets)

    return core.call(work)


def _copy_out(found: Found, targets: Mapping[str, Any]) -> None:
    index, buffer = found.packed()
    arrays.copy_out(buffer, index, targets)


# -------------------------------------------------------------------- metadata and views
async def meta(
    core: Core, info: ArtifactInfo, name: str | None, limit: Deadline
) -> Any:
    """Specs by name, or one."""
    index = await names.describe(core, info.generation, limit)
    if info.view:
        resolved = View.decode(info.view).resolve(index)
        specs = spec_dict(tensor.spec for tensor in resolved.tensors)
    else:
        specs = spec_dict(index.specs())
    if name is None:
        return specs
    if name not in specs:
        message = (
            f"{info.id!r} has no tensor {name!r}; it has {', '.join(list(specs)[:10])}"
        )
        raise NotFound(message)
    return specs[name]


async def view(
    core: Core, info: ArtifactInfo, what: Any, name: str | None, limit: Deadline
) -> ArtifactInfo:
    """Describe a derived artifact and make it findable."""
    index = await names.describe(core, info.generation, limit)
    base = View.decode(info.view) if info.view else None
    seen = (
        index.names
        if base is None
        else tuple(tensor.spec.name for tensor in base.resolve(index).tensors)
    )
    step, own_id = _step(seen, what, name)
    request = requests.register_view(core.link.next_rid(), info, index, step, own_id)
    return await core.ask(request, ArtifactInfo, limit)


def _step(seen: Sequence[str], what: Any, name: str | None) -> tuple[View, str | None]:
    """Give what the caller described: the view step, and the id it asked for."""
    if isinstance(what, View):
        return what, name
    if hasattr(what, "items"):
        return View.of(dict(what.items())), name
    if name is None:
        if len(seen) != 1:
            message = (
                f"say which of the {len(seen)} tensors to slice: view(slice, name) or "
                "view({name: slice})"
            )
            raise Mismatch(message)
        name = seen[0]
    return View.of({name: what}), None


async def save_view(
    core: Core,
    info: ArtifactInfo,
    path: str | Path,
    *,
    metadata: Mapping[str, str] | None,
    max_shard_bytes: int,
    limit: Deadline,
) -> Moved:
    """Write a view from this process: the stores hold its base, not it."""
    from tensorcast_dask.dataplane.files.save import save

    found = await _anywhere(core, info, limit)

    def write() -> Moved:
        started_s = time.monotonic()
        own, content = found.packed()
        saved = save(
            path,
            own,
            content,
            metadata=names.check_labels(metadata),
            max_shard_bytes=max_shard_bytes or None,
        )
        here = NodeCard(
            node=NodeId(""), incarnation=Incarnation(0), host=core.host, socket=""
        )
        return Moved(
            location=Location(card=here, tier=Tier.DISK),
            moved_bytes=saved.nbytes,
            seconds=time.monotonic() - started_s,
            via="file",
            path=saved.path,
            files=saved.files,
        )

    return await core.in_thread(write)


# -------------------------------------------------------------------- sums over nodes
def pool(nodes: Nodes) -> dict[Tier, TierUse]:
    """Each tier summed over all nodes."""
    total: dict[Tier, TierUse] = {}
    for state in nodes.nodes:
        for tier, use in state.uses.items():
            known = total.get(tier, TierUse())
            fields = {
                name: getattr(known, name) + getattr(use, name)
                for name in TierUse.__struct_fields__
                if name != "device"
            }
            total[tier] = TierUse(**fields)
    return total


async def debug_state(core: Core, catalog: bytes, limit: Deadline) -> dict[str, Any]:
    """Give what the catalog and every reachable store say of themselves."""
    stores: dict[str, Any] = {}
    for state in (await names.nodes(core, limit)).nodes:
        request = StateAsked(rid=core.link.next_rid())
        try:
            frame = await core.in_thread(
                core.stores.ask, state.card, request, State, limit
            )
        except (DataLost, *_UNREACHED) as error:
            stores[state.card.node] = {"error": str(error)}
        else:
            stores[state.card.node] = json.loads(frame.message.json)
    return {"catalog": json.loads(catalog), "stores": stores}
