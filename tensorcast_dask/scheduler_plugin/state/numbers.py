"""Generations and version numbers: what is given out once, ever.

Rules:

1. A generation is minted from the epoch of this life and a counter; a node that has seen
   more raises them. The counter begins where the cluster's id says: two clusters of one
   epoch, which is that of their first minute, mint different ones, and a handle of one
   never means another's artifact.
2. A version number is used up when it is committed, and kept by the version log for ever.
   A creation that was given back frees its number: nobody ever saw it.
"""

from __future__ import annotations

import hashlib

from tensorcast_dask.tensors.ids import ClusterId, Epoch, Generation, generation_of

__all__ = ["Numbers", "begin_of", "digest_of"]


def digest_of(name: str) -> bytes:
    """Make what the version log calls an id: 16 bytes."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()


def begin_of(cluster: ClusterId) -> int:
    """Tell where a cluster's counters begin; there is room for as many again after it."""
    digest = hashlib.blake2b(cluster.encode(), digest_size=8, person=b"tc-counter")
    return int.from_bytes(digest.digest()) >> 25


class Numbers:
    """What was given out.

    Attributes
    ----------
    epoch : Epoch
        The term of this catalog.
    counter : int
        Last generation minted in it.
    """

    def __init__(
        self, *, epoch: Epoch, issued: dict[bytes, int], begin: int = 0
    ) -> None:
        self.epoch = epoch
        self._begin = begin
        self.counter = begin
        self._issued = dict(issued)

    def mint(self) -> Generation:
        """Make a generation that was never used."""
        self.counter += 1
        return generation_of(self.epoch, self.counter)

    def minted(self, generation: Generation) -> bool:
        """Whether a generation could have been given out."""
        return 0 < generation <= (self.epoch << 40 | self.counter)

    def seen(self, epoch: Epoch, counter: int) -> bool:
        """Take note of what a node has seen; True when the epoch had to go up."""
        if epoch == self.epoch:
            self.counter = max(self.counter, counter)
        if epoch <= self.epoch:
            return False
        self.epoch = Epoch(epoch + 1)
        self.counter = self._begin
        return True

    def issued(self, name: str) -> int:
        """Tell the highest number that was ever used up for an id."""
        return self._issued.get(digest_of(name), 0)

    def used_up(self, name: str, version: int) -> bytes | None:
        """Use a number up; the digest to log when that is news."""
        digest = digest_of(name)
        if self._issued.get(digest, 0) >= version:
            return None
        self._issued[digest] = version
        return digest
