"""What can go wrong in a simulated cluster, and how often.

Rates are events a simulated second over the whole cluster, chances are per message or per
piece of work, bounds are bounds. A `Faults` with all zeros is a calm cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

__all__ = ["CALM", "ROUGH", "Faults", "some"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Rates of everything that the World can throw."""

    # -------------------------------------------------------------- network
    #: One connection breaks; what was under way may arrive or not.
    drop_link: float = 0.0
    #: One direction between two hosts goes silent for a while.
    one_way_cut: float = 0.0
    #: Both directions between one host and all others go silent for a while.
    partition: float = 0.0
    #: Longest silence, seconds.
    silence_s: float = 12.0
    #: Chance that a message is late, and by how much at most. Connections are independent,
    #: so this also reorders across them, never within one.
    delay: float = 0.0
    delay_s: float = 1.5
    #: Chance that a message that may be said twice is.
    duplicate: float = 0.0
    # -------------------------------------------------------------- nodes
    #: A store dies with its memory, and a new one comes to its host.
    crash_with_amnesia: float = 0.0
    #: The same, but the new one takes the disk folder over.
    crash_with_disk: float = 0.0
    #: A device process dies with what is on the device, and a new one comes.
    device_loss: float = 0.0
    #: Dask says that a worker is gone; it is, or lives on, and its successor adopts the store later.
    believed_dead: float = 0.0
    #: Clocks of nodes run at 1 +- this.
    drift: float = 0.0
    # -------------------------------------------------------------- bytes
    #: Chance that a disk write takes `slow_disk_s` instead of a moment.
    slow_disk: float = 0.0
    slow_disk_s: float = 2.0
    #: Chance that memory is refused when it is asked for, and in the middle of a copy.
    out_of_room: float = 0.0
    #: Memory runs short on every node at once: each gives up what it may.
    squeeze: float = 0.0
    #: Chance that a chunk breaks off, or arrives damaged.
    truncated: float = 0.0
    # -------------------------------------------------------------- scheduler
    #: The scheduler is killed and starts again on its journal. What the journal was just
    #: writing is all there or not at all.
    scheduler_restart: float = 0.0
    #: Chance that the scheduler is killed when a group is on disk and nobody was told yet.
    crash_at_sync: float = 0.0
    #: Chance that such a restart finds rows missing, or no journal at all.
    journal_loss: float = 0.0
    #: The journal's disk takes nothing for a while.
    journal_stall: float = 0.0
    #: The scheduler's loop is busy for a moment: what arrives waits.
    busy_loop: float = 0.0
    # -------------------------------------------------------------- programs
    #: A program is killed, and another one takes its place.
    session_death: float = 0.0
    # -------------------------------------------------------------- instances
    #: An instance is killed, and another process takes its name a moment later.
    instance_death: float = 0.0
    #: Another process takes the name of an instance that lives.
    instance_replaced: float = 0.0
    # -------------------------------------------------------------- everybody
    #: The scheduler hears nobody for longer than a lease: all are given up, and all come back.
    all_lapse: float = 0.0
    #: Dask says that every worker is gone; all stores live, and are adopted later.
    all_believed_dead: float = 0.0


CALM = Faults()

#: Everything at once, moderately.
ROUGH = Faults(
    drop_link=0.25,
    one_way_cut=0.06,
    partition=0.05,
    delay=0.05,
    duplicate=0.05,
    crash_with_amnesia=0.04,
    crash_with_disk=0.04,
    device_loss=0.2,
    believed_dead=0.08,
    drift=0.005,
    slow_disk=0.1,
    out_of_room=0.05,
    squeeze=0.1,
    truncated=0.03,
    scheduler_restart=0.08,
    crash_at_sync=0.01,
    journal_loss=0.25,
    journal_stall=0.04,
    busy_loop=0.05,
    session_death=0.05,
    instance_death=0.15,
    instance_replaced=0.1,
    all_lapse=0.04,
    all_believed_dead=0.04,
)


def some(rng: Random) -> Faults:
    """Draw a mixture: most kinds absent, the others at up to three times their usual rate.

    A few faults at a time go deeper than all of them at once.
    """
    bounds = ("silence_s", "delay_s", "slow_disk_s", "drift")
    drawn = {
        one.name: getattr(ROUGH, one.name)
        * (rng.choice([1.0, 1.0, 3.0]) if rng.random() < 0.4 else 0.0)
        for one in fields(Faults)
        if one.name not in bounds
    }
    drift = rng.choice([0.0, ROUGH.drift])
    return Faults(**drawn, drift=drift, silence_s=rng.choice([2.0, 12.0]), delay_s=1.5)
