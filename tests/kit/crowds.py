"""Catalogs with very much in them, made at once: no program, no journal, no oracle."""

from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.scheduler_plugin.state.records import VersionRecord
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tests.kit.catalogs import Desk

__all__ = ["crowd", "fill"]


def crowd(artifacts: int, *, nodes: int = 20, copies: int = 2) -> Desk:
    """A catalog of `artifacts`, each on `copies` of `nodes`, of sizes from 1 KiB to 64 MiB."""
    desk = Desk()
    for number in range(nodes):
        desk.node(f"n{number:02}")
    fill(desk.catalog, artifacts, copies=copies)
    return desk


def fill(catalog: Catalog, artifacts: int, *, copies: int = 1) -> None:
    """Have a catalog believe that its nodes hold so many; no journal hears of it."""
    records = list(catalog.nodes.records.values())
    for number in range(artifacts):
        record = VersionRecord(
            id=ArtifactId(f"run-{number % 50:02}/step-{number:06}"),
            version=Version(1),
            generation=Generation((1 << 40) + number + 1),
            owner=m.Owner.SYSTEM,
            nbytes=1024 << number % 17,
            tensors=1,
            index_digest="",
            index=b"",
            labels={"tenant": f"t{number % 7}", "part": str(number % 3)},
            creating=False,
            published=number % 2 == 0,
        )
        catalog.names.add(record)
        for copy in range(copies):
            node = records[(number + copy) % len(records)]
            tier = m.Tier.DISK if number % 5 == 0 and copy else m.Tier.HOST
            catalog.replicas.add(record, node, tier, write=False)
