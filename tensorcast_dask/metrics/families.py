"""What a scrape tells: numbers of the catalog and of workers, as families of samples.

Rules:

1. Everything is read from the catalog's records at the scrape; between scrapes nothing is done.
2. A family has a bounded number of samples: labels are nodes (the first `MAX_NODES`), tiers,
   kinds of events and transports; never artifacts, owners or sessions.
3. Names end in their unit; what only grows ends in `_total` and begins at 0 with the scheduler.
4. A node is named as its Dask worker; of two with one name the living one is, and the other one
   has its identity beside it: no two samples of a family have the same labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from tensorcast_dask.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
    from tensorcast_dask.tensors.messages import TierUse

__all__ = [
    "FAMILIES",
    "MAX_NODES",
    "OF_WORKERS",
    "Family",
    "Samples",
    "of_worker",
    "samples",
]

MAX_NODES: Final = 1000
_NODE: Final = ("node",)
_TIER: Final = (*_NODE, "tier")


class Family(NamedTuple):
    """One name, and what its samples mean."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


FAMILIES: Final = tuple(
    Family(*each)
    for each in (
        (
            "tensorcast_info",
            "gauge",
            "Always 1; the labels are the catalog's identity and the release",
            ("cluster", "version"),
        ),
        ("tensorcast_epoch", "gauge", "Term of the catalog: one more at each restart"),
        ("tensorcast_node_up", "gauge", "1 while a node's lease runs", _NODE),
        ("tensorcast_node_draining", "gauge", "1 while a node is drained", _NODE),
        ("tensorcast_node_orders", "gauge", "Orders a node has not finished", _NODE),
        ("tensorcast_tier_capacity_bytes", "gauge", "Budget of a tier", _TIER),
        ("tensorcast_tier_used_bytes", "gauge", "Bytes of whole replicas", _TIER),
        ("tensorcast_tier_reserved_bytes", "gauge", "Bytes being filled", _TIER),
        ("tensorcast_tier_pinned_bytes", "gauge", "Used bytes under a pin", _TIER),
        ("tensorcast_tier_evictable_bytes", "gauge", "Used bytes that may go", _TIER),
        ("tensorcast_tier_replicas", "gauge", "Whole replicas", _TIER),
        ("tensorcast_artifacts", "gauge", "Artifacts in the catalog"),
        ("tensorcast_versions", "gauge", "Versions in the catalog"),
        ("tensorcast_replicas", "gauge", "Replicas in the catalog"),
        ("tensorcast_pins", "gauge", "Pins in the catalog"),
        ("tensorcast_sessions", "gauge", "Open sessions"),
        ("tensorcast_operations", "gauge", "Operations that are known"),
        ("tensorcast_plans", "gauge", "Plans under way"),
        ("tensorcast_instances", "gauge", "Attached instances"),
        ("tensorcast_journal_waiting", "gauge", "Answers that wait for the journal"),
        ("tensorcast_journal_stalled", "gauge", "1 while the journal cannot write"),
        ("tensorcast_events_total", "counter", "What happened, by kind", ("event",)),
        ("tensorcast_transfers_total", "counter", "Copies, by transport", ("via",)),
        (
            "tensorcast_transferred_bytes_total",
            "counter",
            "Bytes that were copied from node to node, by transport",
            ("via",),
        ),
    )
)

#: What a scrape of a worker tells; what its store holds is told by the scheduler.
OF_WORKERS: Final = tuple(
    Family(*each)
    for each in (
        ("tensorcast_worker_store_up", "gauge", "1 while the worker has its store"),
        ("tensorcast_worker_maps", "gauge", "1 where its tasks may map"),
        ("tensorcast_worker_adoptions_total", "counter", "Stores it took or started"),
        ("tensorcast_worker_failures_total", "counter", "Vain attempts at a store"),
    )
)

#: Label values and number.
Samples: TypeAlias = "list[tuple[tuple[str, ...], float]]"


def samples(catalog: Catalog) -> dict[str, Samples]:
    """Read the catalog: samples by name of their family."""
    observed = catalog.observed
    found: dict[str, Samples] = {family.name: [] for family in FAMILIES}
    counts: dict[str, float] = {
        "epoch": catalog.epoch,
        "artifacts": len(catalog.names.artifacts),
        "versions": len(catalog.names.versions),
        "replicas": sum(map(len, catalog.replicas.by_node.values())),
        "pins": len(catalog.pins),
        "sessions": len(catalog.sessions),
        "operations": len(catalog.operations),
        "plans": len(catalog.plans),
        "instances": len(catalog.instances),
        "journal_waiting": catalog.outbox.waiting,
        "journal_stalled": bool(catalog.outbox.stalled),
    }
    for name, value in counts.items():
        found[f"tensorcast_{name}"].append(((), value))
    found["tensorcast_info"].append(((catalog.cluster, __version__), 1))
    for labels, values in _of_nodes(catalog):
        for name, value in values.items():
            found[f"tensorcast_{name}"].append((labels, value))
    for event, count in observed.signals.counts.items():
        found["tensorcast_events_total"].append(((event,), count))
    for via, total in observed.bandwidths.totals.items():
        found["tensorcast_transfers_total"].append(((via,), total.transfers))
        found["tensorcast_transferred_bytes_total"].append(((via,), total.nbytes))
    return found


def _of_nodes(
    catalog: Catalog,
) -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
    for name, node in _shown(catalog.nodes.records.values()):
        labels = (name,)
        yield (
            labels,
            {
                "node_up": node.live,
                "node_draining": node.draining,
                "node_orders": sum(1 for _ in catalog.tasks.of(node.node)),
            },
        )
        for tier, use in node.uses.items():
            yield (*labels, tier), _of_tier(use)


def _shown(nodes: Iterable[NodeRecord]) -> Iterator[tuple[str, NodeRecord]]:
    """Of stores that were heard of, the first; processes that lend memory have no tiers."""
    heard = sorted((one for one in nodes if one.uses), key=lambda one: not one.live)
    taken: set[str] = set()
    for node in heard[:MAX_NODES]:
        name = node.card.name
        if not name or name in taken:
            name = node.label if name else node.node
        taken.add(name)
        yield name, node


def _of_tier(use: TierUse) -> dict[str, float]:
    return {
        "tier_capacity_bytes": use.capacity_bytes,
        "tier_used_bytes": use.used_bytes,
        "tier_reserved_bytes": use.reserved_bytes,
        "tier_pinned_bytes": use.pinned_bytes,
        "tier_evictable_bytes": use.evictable_bytes,
        "tier_replicas": use.replicas,
    }


def of_worker(described: Mapping[str, Any]) -> dict[str, Samples]:
    """Read what a worker says of its store (`Keeper.describe`)."""
    return {
        "tensorcast_worker_store_up": [((), bool(described["node"]))],
        "tensorcast_worker_maps": [((), bool(described["mapping"]))],
        "tensorcast_worker_adoptions_total": [((), described["adoptions"])],
        "tensorcast_worker_failures_total": [((), described["failures"])],
    }
