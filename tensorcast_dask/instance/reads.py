"""Bytes of artifacts, as an instance gets them.

Rules:

1. What the node holds is mapped. What it does not hold it gets first.
2. What another process lends is read out of it on this host, and comes in chunks from elsewhere;
   its owner may change it meanwhile, then it is read again.
3. A read is whole and private before it is handed out.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.dataplane.maps import PrivateMap
from tensorcast_dask.dataplane.reading import Found, read_lent
from tensorcast_dask.dataplane.transports.base import Context, open_source
from tensorcast_dask.exceptions import (
    AbsentError,
    Incomplete,
    PeerLost,
    TensorCastError,
    UnsupportedPlatform,
    WrongPeer,
)
from tensorcast_dask.tensors.checksums import chunk_count, chunk_range
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    ChunkMap,
    ChunkMapAsked,
    Ensure,
    Locate,
    Located,
    Moved,
    Open,
    Opened,
    Owner,
    Role,
)
from tensorcast_dask.tensors.specs import Index
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.instance.catalog import CatalogSession
    from tensorcast_dask.instance.line import Line
    from tensorcast_dask.tensors.messages import Location, NodeCard

__all__ = ["Reads", "left"]

_MOST_BYTES: Final = 1 << 62
_PAUSE_S: Final = 0.02
#: How often content that changes under its reader is read before it is given up.
_STAMPS: Final = 10


def left(until_s: float) -> float:
    """Give the seconds that are left, never none."""
    return max(0.001, until_s - time.monotonic())


class Reads:
    """Reads artifacts.

    Parameters
    ----------
    line : Line
        To the node's store.
    session : CatalogSession
        To the catalog.
    card : callable
        Gives the node's card of this instant.
    """

    def __init__(
        self, line: Line, session: CatalogSession, card: Callable[[], NodeCard]
    ) -> None:
        self._line = line
        self._session = session
        self._card = card

    def read(self, info: ArtifactInfo, until_s: float) -> Found:
        """Give an artifact's bytes."""
        if info.owner is not Owner.CALLER:
            with contextlib.suppress(AbsentError):
                return self._here(info, until_s)
            ensure = Ensure(
                rid=self._session.next_rid(),
                generation=info.generation,
                node=self._card().node,
                deadline_s=left(until_s),
                why="read",
            )
            self._session.ask(ensure, Moved, within_s=left(until_s))
            return self._here(info, until_s)
        return self._lent_by_others(info, until_s)

    def _here(self, info: ArtifactInfo, until_s: float) -> Found:
        request = Open(
            rid=self._session.next_rid(),
            generation=info.generation,
            deadline_s=left(until_s),
        )
        frame = self._line.ask(request, Opened, within_s=left(until_s))
        opened = frame.message
        view = View.decode(info.view) if info.view else None
        index = Index.decode(opened.index)
        if opened.mapped:
            buffer: Any = PrivateMap(frame.take_fd(), opened.nbytes).buffer
        else:
            buffer = bytearray() if frame.payload is None else frame.payload
        return Found(index, buffer, view)

    def _lent_by_others(self, info: ArtifactInfo, until_s: float) -> Found:
        request = Locate(rid=self._session.next_rid(), generation=info.generation)
        located = self._session.ask(request, Located, within_s=left(until_s))
        last: TensorCastError = PeerLost(
            f"nobody lends {info.id!r} now; its owner must register it again"
        )
        for location in located.locations:
            try:
                return self._from(info, location, until_s)
            except (AbsentError, PeerLost, WrongPeer) as error:
                last = error
        raise last

    def _credentials(self, until_s: float) -> Credentials:
        greeting = self._session.greeted(left(until_s))
        return Credentials(
            cluster=greeting.cluster,
            token=greeting.token,
            tls=greeting.tls,
            role=Role.INSTANCE,
            host=self._card().host,
        )

    def _from(self, info: ArtifactInfo, location: Location, until_s: float) -> Found:
        """Read from who lends: out of the process on this host, in chunks elsewhere."""
        credentials = self._credentials(until_s)
        view = View.decode(info.view) if info.view else None
        if location.card.host == credentials.host:
            with (
                contextlib.suppress(UnsupportedPlatform, PeerLost),
                Channel.connect(
                    location.card,
                    credentials=credentials,
                    prefer=Prefer.UNIX,
                    until_s=until_s,
                ) as channel,
            ):
                return self._out_of(channel, info, view, until_s)
        for _ in range(_STAMPS):
            try:
                return self._in_chunks(info, location, credentials, view, until_s)
            except Incomplete:
                time.sleep(_PAUSE_S)
        message = f"the owner of {info.id!r} changes it all the time; read again later"
        raise Incomplete(message)

    def _out_of(
        self, channel: Channel, info: ArtifactInfo, view: View | None, until_s: float
    ) -> Found:
        generation = info.generation
        for _ in range(_STAMPS):
            rid = self._session.next_rid()
            request = Open(
                rid=rid, generation=generation, deadline_s=left(until_s), lent=True
            )
            frame = channel.call(
                request,
                expect=Opened,
                until_s=until_s,
                max_payload_bytes=info.nbytes if not info.view else _MOST_BYTES,
            )
            opened = frame.message
            index = Index.decode(opened.index)
            if not opened.pid:
                return Found(index, frame.payload or bytearray(), view)
            content = read_lent(opened)
            asked = ChunkMapAsked(rid=self._session.next_rid(), generation=generation)
            now = channel.call(asked, expect=ChunkMap, until_s=until_s).message
            if now.stamp == opened.stamp:
                return Found(index, content, view)
        message = f"the owner of {info.id!r} changes it all the time; read again later"
        raise Incomplete(message)

    @staticmethod
    def _in_chunks(
        info: ArtifactInfo,
        location: Location,
        credentials: Credentials,
        view: View | None,
        until_s: float,
    ) -> Found:
        scheme = "unix" if location.card.host == credentials.host else "tcp"
        context = Context(credentials=credentials, until_s=until_s)
        source = open_source(location, info.generation, scheme=scheme, context=context)
        try:
            chunks = source.chunk_map()
            content = memory.private(chunks.nbytes)
            for number in range(chunk_count(chunks.nbytes, chunks.chunk_bytes)):
                start, nbytes = chunk_range(number, chunks.nbytes, chunks.chunk_bytes)
                source.read_chunk(number, content[start : start + nbytes])
        finally:
            source.close()
        return Found(Index.decode(chunks.index), content, view)
