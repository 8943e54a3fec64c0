"""Whether this store may still take new bytes: the fence of a node that lost its lease.

Rules:

1. The link keeps the node's lease and says what is left of it; a lease runs from when its
   renewal was *sent*, so a grant that was long under way is worth less, never more.
2. A store that no catalog ever greeted is not fenced: nobody places anything there, and
   a lone store is of use.
3. At its expiry instant a lease has ended. A fenced store refuses reservations and
   commits with StaleOwner; reads by generation go on, for bytes do not go stale.
4. A link that is lost does not end the lease, only time does; the next grant ends the fence.
"""

from __future__ import annotations

from tensorcast_dask.exceptions import StaleOwner

__all__ = ["check_lease"]


def check_lease(left_s: float) -> None:
    """Return when the node's lease runs; `left_s` is infinite where no catalog greeted us.

    Raises
    ------
    StaleOwner
        When it has ended: this store is fenced.
    """
    if left_s <= 0.0:
        message = (
            "this node has lost its lease (the scheduler has not renewed it) and "
            "takes no new bytes; try another node, or again when the scheduler is back"
        )
        raise StaleOwner(message)
