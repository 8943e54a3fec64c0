"""A session moves from one engine to another, pages and all, in one plan."""

from __future__ import annotations

import tempfile

from paged_engine import PagedEngine
from roll_out import start

import tensorcast_dask as tc


def main() -> None:
    run_dir = tempfile.mkdtemp(prefix="tcd-")
    settings = {"run-dir": run_dir}
    with (
        tc.LocalCluster(
            n_workers=2, host_memory="64 MiB", settings=settings
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        engines = [start(name, run_dir) for name in ("busy", "idle")]
        try:
            migrate(cast)
        finally:
            for engine in engines:
                engine.communicate(timeout=30)


def migrate(cast: tc.Session) -> None:
    """Begin a session on one engine, move it, go on with it on the other."""
    busy, idle = cast.instance("busy"), cast.instance("idle")
    begun = busy.call("generate", "chat-7", [3, 1, 4, 1, 5])

    with cast.plan(tc.context(id="rebalance", ddl=30, key="move-chat-7")) as plan:
        pages = plan.on_instance(busy).publish_session("chat-7")
        there = plan.on_instance(idle).hydrate(pages, "chat-7")
        plan.on_instance(busy).evict_local("chat-7", after=[there])
        plan.on_any().destroy(pages, after=[there])
    result = plan.run()
    print(result[there].value)

    # It goes on as if it had never moved, and nothing was computed twice.
    alone = PagedEngine()
    assert begun == alone.generate("chat-7", [3, 1, 4, 1, 5])
    assert idle.call("generate", "chat-7", [9]) == alone.generate("chat-7", [9])
    assert idle.manifest()["computed"] == 5
    assert busy.manifest()["sessions"] == {}
    assert not cast.exists("session/chat-7")


if __name__ == "__main__":
    main()
