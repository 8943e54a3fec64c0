"""A session moves from one engine to another, pages and all, in one plan."""

from __future__ import annotations

from paged_engine import PagedEngine
from roll_out import engines

import tensorcast_dask as tc


def main() -> None:
    with engines("busy", "idle") as cast:
        migrate(cast)


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
