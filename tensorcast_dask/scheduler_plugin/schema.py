"""The tables that `sql()` shows.

Names with an underscore are filled from rows of the journal, by their `key`; the views
over them are what a question uses.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SCHEMA"]

SCHEMA: Final = (
    (
        "CREATE TABLE _versions (key VARCHAR, id VARCHAR, version BIGINT, generation UBIGINT,"
        " owner VARCHAR, published BOOLEAN, nbytes BIGINT, tensors BIGINT,"
        " index_digest VARCHAR, replicas_wanted INTEGER, degraded VARCHAR, labels VARCHAR)"
    ),
    (
        "CREATE TABLE _replicas (key VARCHAR, id VARCHAR, version BIGINT,"
        " generation UBIGINT, node VARCHAR, tier VARCHAR)"
    ),
    (
        "CREATE TABLE _aliases (key VARCHAR, name VARCHAR, id VARCHAR, generation UBIGINT,"
        " alias_generation BIGINT)"
    ),
    (
        "CREATE TABLE _views (key VARCHAR, id VARCHAR, base_generation UBIGINT,"
        " index_digest VARCHAR, nbytes BIGINT, tensors BIGINT)"
    ),
    (
        "CREATE TABLE _pins (key VARCHAR, pin BIGINT, generation UBIGINT, node VARCHAR,"
        " ttl_s DOUBLE)"
    ),
    (
        "CREATE TABLE _creating (id VARCHAR, version BIGINT, generation UBIGINT,"
        " nbytes BIGINT)"
    ),
    (
        "CREATE TABLE nodes (node VARCHAR, name VARCHAR, host VARCHAR, worker VARCHAR,"
        " kind VARCHAR, incarnation UBIGINT, attended BOOLEAN, live BOOLEAN,"
        " lease_left_s DOUBLE, capacity_bytes BIGINT, used_bytes BIGINT,"
        " pinned_bytes BIGINT)"
    ),
    (
        "CREATE TABLE instances (name VARCHAR, node VARCHAR, node_name VARCHAR,"
        " attachment VARCHAR, term UBIGINT, pid BIGINT, functions VARCHAR, engine VARCHAR,"
        " labels VARCHAR, holds VARCHAR, poisoned VARCHAR, draining BOOLEAN, load VARCHAR,"
        " load_age_s DOUBLE)"
    ),
    (
        "CREATE TABLE operations (rid VARCHAR, session VARCHAR, kind VARCHAR,"
        " status VARCHAR, id VARCHAR, generation UBIGINT, node VARCHAR, done_bytes BIGINT,"
        " total_bytes BIGINT, seconds DOUBLE, via VARCHAR, message VARCHAR)"
    ),
    "CREATE TABLE events (position BIGINT, topic VARCHAR, facts VARCHAR)",
    (
        "CREATE TABLE _plans (key VARCHAR, plan VARCHAR, status VARCHAR, run UBIGINT,"
        " digest VARCHAR, message VARCHAR)"
    ),
    (
        "CREATE TABLE _steps (key VARCHAR, plan VARCHAR, step VARCHAR, kind VARCHAR,"
        " status VARCHAR, node VARCHAR, nbytes BIGINT, seconds DOUBLE, attempts INTEGER,"
        " message VARCHAR)"
    ),
    "CREATE VIEW plans AS SELECT plan, status, run, digest, message FROM _plans",
    (
        "CREATE VIEW steps AS SELECT plan, step, kind, status, node, nbytes, seconds,"
        " attempts, message FROM _steps"
    ),
    (
        "CREATE VIEW replicas AS SELECT r.id, r.version, r.generation, r.node,"
        " n.name AS node_name, n.host, r.tier, coalesce(n.live, false) AS live"
        " FROM _replicas r LEFT JOIN nodes n ON n.node = r.node"
    ),
    (
        "CREATE VIEW versions AS SELECT v.id, v.version, v.generation,"
        " CASE WHEN l.generation IS NULL THEN 'lost' WHEN v.published THEN 'published'"
        " ELSE 'committed' END AS stage, v.owner, v.published, v.nbytes, v.tensors,"
        " v.index_digest, v.replicas_wanted, coalesce(l.hosts, 0) AS hosts, v.degraded,"
        " v.labels FROM _versions v LEFT JOIN (SELECT generation,"
        " count(DISTINCT host) AS hosts FROM replicas WHERE live GROUP BY generation) l"
        " ON l.generation = v.generation UNION ALL SELECT c.id, c.version, c.generation,"
        " 'creating', 'system', false, c.nbytes, NULL, '', NULL, 0, '', '{}'"
        " FROM _creating c"
    ),
    (
        "CREATE VIEW artifacts AS SELECT id, count(*) AS versions, max(version) AS newest,"
        " max(version) FILTER (published) AS latest, sum(nbytes)::BIGINT AS nbytes"
        " FROM versions WHERE stage <> 'creating' GROUP BY id"
    ),
    (
        "CREATE VIEW leases AS SELECT node, name, 'node' AS kind, live, lease_left_s"
        " FROM nodes"
    ),
    (
        "CREATE VIEW pins AS SELECT p.pin, v.id, v.version, p.generation, p.node,"
        " CASE WHEN p.ttl_s < 1e9 THEN p.ttl_s END AS ttl_s FROM _pins p LEFT JOIN _versions v ON v.generation = p.generation"
    ),
    (
        "CREATE VIEW aliases AS SELECT name, id, generation, alias_generation FROM _aliases"
        " WHERE generation <> 0"
    ),
    (
        "CREATE VIEW views AS SELECT w.id, v.id AS base, v.version AS base_version,"
        " w.base_generation, w.index_digest, w.nbytes, w.tensors FROM _views w"
        " LEFT JOIN _versions v ON v.generation = w.base_generation"
    ),
    (
        "CREATE VIEW transfers AS SELECT rid, session, kind, status, id, generation, node,"
        " done_bytes, total_bytes, seconds, via FROM operations WHERE via <> '' OR"
        " (status = 'running' AND total_bytes > 0 AND kind NOT IN ('load', 'save'))"
    ),
)
