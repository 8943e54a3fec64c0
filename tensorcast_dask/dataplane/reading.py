"""Bytes of a read, and memory of another process that was lent."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane import arrays, memory
from tensorcast_dask.dataplane.remote import read_process
from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from tensorcast_dask.tensors.messages import Opened
    from tensorcast_dask.tensors.views import ResolvedView, View

__all__ = ["Found", "read_lent"]

_SPAN: Final = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes of a read, private to it."""

    index: Index
    buffer: Any
    #: How the tensors of a view lie in the buffer; None for a whole artifact.
    view: View | ResolvedView | None
    #: The buffer is the part of one tensor that was asked for, and no more.
    cut: bool = False

    def packed(self) -> tuple[Index, Any]:
        """Give the tensors as a segment of their own: a view's are copied."""
        if self.view is None:
            return self.index, self.buffer
        made = arrays.materialise(
            self.buffer, self.index, framework="raw", view=self.view
        )
        index = Index.of(
            raw.spec for raw in made.values() if isinstance(raw, arrays.RawTensor)
        )
        content = memory.private(index.nbytes)
        for raw, offset, size in zip(
            made.values(), index.offsets, index.sizes, strict=True
        ):
            assert isinstance(raw, arrays.RawTensor)
            content[offset : offset + size] = raw.data
        return index, content


def read_lent(opened: Opened, *, threads: int = memory.DEFAULT_THREADS) -> memoryview:
    """Read memory that its owner lends out of the owner's process.

    What came counts only when its stamp is the same afterwards; the caller asks.

    Raises
    ------
    OwnerGone, PeerLost, UnsupportedPlatform
        When it cannot be read; over a socket it can.
    """
    content = memory.private(opened.nbytes)
    for offset, address, length in _SPAN.iter_unpack(opened.spans):
        if offset + length > opened.nbytes:
            message = "the owner's spans do not fit its memory"
            raise WrongPeer(message)
        read_process(
            opened.pid, address, content[offset : offset + length], threads=threads
        )
    return content
