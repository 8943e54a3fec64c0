"""The gateways of the scheduler's dashboard and of a node, asked by curl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from distributed import LocalCluster, secede
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

import tensorcast_dask as tc
from tensorcast_dask.dataplane import auth
from tensorcast_dask.exceptions import CatalogUnavailable, DeadlineExceeded
from tensorcast_dask.http.desk import Answer, Conditions
from tensorcast_dask.http.gateway import Gateway, Limits, _send_all
from tensorcast_dask.http.server import Server, _NodeHandler
from tensorcast_dask.http.state.routes import Asked
from tensorcast_dask.scheduler_plugin.dask_private import EXTENSION
from tensorcast_dask.worker_plugin.context import keeper_of
from tests.kit.certificates import mint_certificates
from tests.kit.curl import Curl
from tests.kit.eventually import eventually, eventually_async
from tests.kit.leaks import no_leaks
from tests.kit.local import local_cluster
from tests.kit.loops import on_loop

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines

TOKEN = "a-token-of-the-tests"
W = np.arange(1 << 18, dtype=np.float32)
PLAN = {
    "context": {"key": "roll-out"},
    "steps": [
        {"name": "live", "kind": "publish", "target": {"is": "name", "id": "toy/w"}},
        {"name": "held", "kind": "pin", "target": {"is": "step", "step": "live"}},
    ],
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("tc")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    settings = {
        "http": {"token-file": str(token), "watchers": 2},
        "node": {"host-memory": "64 MiB", "http-ports": 0},
    }
    with local_cluster(folder / "r", settings=settings) as made:
        with tc.connect(made.scheduler_address) as cast:
            toy = {"w": W, "b": np.arange(3), "e/f": np.zeros((0, 2))}
            cast.put(toy, "toy/w", labels={"team": "a", "my-token": "hunter2"})
            for number in range(3):
                cast.put(np.full(2, number), f"page/{number}")
        yield made


@pytest.fixture(params=["dashboard", "node"])
def curl(request: pytest.FixtureRequest, cluster: LocalCluster, tmp_path: Path) -> Curl:
    (worker,) = cluster.workers.values()
    keeper, scheduler = keeper_of(worker), cluster.scheduler
    assert keeper is not None
    assert scheduler is not None
    assert keeper.gateway.describe()["why"] == ""
    base = (
        f"http://127.0.0.1:{scheduler.http_server.port}/tensorcast"
        if request.param == "dashboard"
        else keeper.gateway.url
    )
    return Curl(base, TOKEN, tmp_path)


def problems(document: Any, name: str, value: object) -> list[str]:
    """Say what of a value is not as the document has it."""
    schema = {
        "$ref": f"#/components/schemas/{name}",
        "components": document["components"],
    }
    validator = jsonschema.Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(value)]


def test_answers_are_as_the_document_says(curl: Curl) -> None:
    document = curl("/openapi.json").json
    assert curl.base.endswith(document["servers"][0]["url"].rstrip("/"))
    asked = {
        "/v1/artifacts": "/v1/artifacts?label=team%3Da",
        "/v1/artifacts/{id}": "/v1/artifacts/toy%2Fw?version=1",
        "/v1/nodes": "/v1/nodes",
        "/v1/instances": "/v1/instances",
        "/v1/signals": "/v1/signals?prefix=node/&prefix=event/",
        "/v1/plans": "/v1/plans",
    }
    for path, query in asked.items():
        reply = curl(query)
        said = document["paths"][path]["get"]["responses"]["200"]["content"]
        name = said["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert (reply.status, problems(document, name, reply.json)) == (200, [])
        assert b"hunter2" not in reply.body
        assert TOKEN.encode() not in reply.body
    for reply in (
        curl("/v1/artifacts/none"),
        curl("/v1/x"),
        curl("/v1/plans", "-d", "{}"),
    ):
        assert problems(document, "Failed", reply.json) == []


def test_each_route_of_the_document_is_there_and_no_other_method(curl: Curl) -> None:
    for path, methods in curl("/openapi.json").json["paths"].items():
        there = (
            path.replace("{id}", "none").replace("{name}", "w").replace("{key}", "k")
        )
        if not path.endswith("/stream"):
            for method in methods:
                words = ["-I"] if method == "head" else ["-X", method.upper()]
                reply = curl(there, *words, token=True)
                assert reply.status != 405, path
                if reply.status == 404:
                    assert method == "head" or reply.json["error"]["kind"] == "NotFound"
        assert curl(there, "-X", "PUT", token=True).status == 405


def test_artifacts_are_listed_a_page_at_a_time(curl: Curl) -> None:
    seen, after, pages = [], "", 0
    while pages == 0 or after:
        page = curl(f"/v1/artifacts?prefix=page/&limit=2&after={after}").json
        seen += [one["id"] for one in page["artifacts"]]
        after, pages = page["after"], pages + 1
    assert (seen, pages) == (["page/0", "page/1", "page/2"], 2)
    assert curl("/v1/artifacts?after=x").json["error"]["kind"] == "InvalidArgument"


def test_bytes_come_whole_and_by_ranges_bit_for_bit(curl: Curl) -> None:
    path, raw = "/v1/artifacts/toy%2Fw/tensors/w", W.tobytes()
    whole = curl(path, token=True)
    assert (whole.status, whole.body == raw) == (200, True)
    tag = whole.headers["etag"]
    shown = curl("/v1/artifacts/toy%2Fw").json["tensors"][0]
    assert (shown["etag"], shown["bytes"]) == (tag, len(raw))
    for words, start, stop in (
        ("0-0", 0, 1),
        ("100000-", 100_000, None),
        ("-7", -7, None),
    ):
        part = curl(path, "-r", words, token=True)
        assert (part.status, part.body == raw[start:stop]) == (206, True)
        assert part.headers["content-range"].endswith(f"/{len(raw)}")
    behind = curl(path, "-r", f"{len(raw)}-", token=True)
    assert (behind.status, behind.headers["content-range"]) == (
        416,
        f"bytes */{len(raw)}",
    )
    same = curl(path, "-H", f"If-None-Match: {tag}", token=True)
    assert (same.status, same.body) == (304, b"")
    head = curl(path, "-I", token=True)
    assert (head.status, head.headers["content-length"]) == (200, str(len(raw)))
    empty = curl("/v1/artifacts/toy%2Fw/tensors/e%2Ff", token=True)
    assert (empty.status, empty.body) == (200, b"")
    missing = curl("/v1/artifacts/toy%2Fw/tensors/none", token=True)
    assert (missing.status, missing.json["error"]["kind"]) == (404, "NotFound")


def test_nothing_is_given_to_who_may_not_have_it(curl: Curl) -> None:
    tensor = "/v1/artifacts/toy%2Fw/tensors/w"
    wrong = ("-H", "Authorization: Bearer another-token-of-16")
    assert curl(tensor).status == curl(tensor, *wrong).status == 401
    assert curl("/v1/nodes", *wrong).headers["www-authenticate"] == "Bearer"
    assert curl("/v1/plans", "-d", json.dumps(PLAN)).status == 401
    assert curl("/v1/plans/roll-out/cancel", "-X", "POST").status == 401
    for header in ("Host: rebound.example", "Origin: http://page.example"):
        assert curl("/v1/nodes", "-H", header).status == 403
    assert curl("/v1/nodes", "-H", "X-Forwarded-For: 10.0.0.1").status == 401


def test_a_body_that_is_too_long_is_refused_before_it_is_read(
    curl: Curl, tmp_path: Path
) -> None:
    long = tmp_path / "long"
    long.write_bytes(b" " * (2 << 20))
    body = ("--data-binary", f"@{long}")
    # curl asks first, as it does for every long body, and so hears the answer.
    asks = ("-H", "Expect: 100-continue", "--expect100-timeout", "30")
    refused = curl("/v1/plans", *body, *asks, token=True)
    assert (refused.status, refused.json["error"]["kind"]) == (413, "RequestError")
    unsaid = ("-H", "Transfer-Encoding: chunked", "-H", "Expect:")
    done = subprocess.run(
        curl.words("/v1/plans", *body, *unsaid, token=True),
        capture_output=True,
        check=False,
    )
    assert b" 202 " not in done.stdout


def test_a_plan_is_begun_watched_shown_and_cancelled(curl: Curl) -> None:
    key = f"roll-out-{curl.base.rpartition(':')[2].partition('/')[0]}"
    plan = json.dumps(PLAN | {"context": {"key": key}})
    document = curl("/openapi.json").json
    begun = curl("/v1/plans", "-d", plan, token=True)
    assert (begun.status, begun.json["key"]) == (202, key)
    done = curl(f"/v1/plans/{key}?wait=30").json
    assert done["status"] == "done"
    assert done["steps"]["live"]["value"]["id"] == "toy/w"
    assert done["steps"]["held"]["value"]["pin"]
    assert problems(document, "Plan", done) == []
    told = curl(f"/v1/plans/{key}/stream")
    assert told.headers["content-type"] == "text/event-stream"
    (event,) = told.body.decode().strip().split("\n\n")
    assert event.startswith("event: plan\ndata: ")
    assert json.loads(event.partition("data: ")[2]) == done
    assert curl("/v1/plans", "-d", plan, token=True).json == done
    assert key in [one["key"] for one in curl("/v1/plans").json["plans"]]
    call = {"name": "c", "kind": "call", "instance": "e", "options": {"function": "f"}}
    wrong = curl(
        "/v1/plans", "-d", json.dumps({"steps": [call | {"args": "////"}]}), token=True
    )
    assert (wrong.status, wrong.json["error"]["kind"]) == (400, "InvalidArgument")
    other = json.dumps({"context": {"key": key}, "steps": []})
    assert curl("/v1/plans", "-d", other, token=True).status == 409
    assert curl(f"/v1/plans/{key}/cancel", "-X", "POST", token=True).status == 202
    assert curl("/v1/plans/none").status == 404


def test_who_looks_at_a_run_leaves_nothing_that_waits_for_its_end(
    curl: Curl, cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    (worker,) = cluster.workers.values()
    with tc.connect(cluster.scheduler_address) as cast:
        plan = cast.plan()
        plan.on_any().submit(wait_for, str(gate))
        # Not offered to Dask: the only task that waits is the one of the handle below.
        run = cast.client.sync(plan._submit, None, "graph")
        try:
            assert curl(f"/v1/plans/{plan.key}?wait=0.1").json["status"] == "running"
            assert cluster.scheduler is not None
            assert run.key not in cluster.scheduler.tasks
            with pytest.raises(DeadlineExceeded, match="still runs"):
                run.outcome(timeout=0.1)
            assert run._end is None
            found = cast.plan_run(plan.key)
            eventually(
                lambda: (
                    run.key in worker.state.tasks
                    and worker.state.tasks[run.key].state == "long-running"
                ),
                within_s=30,
                what="a task that waits for the end",
            )
            found.release()
            eventually(
                lambda: run.key not in worker.state.tasks,
                within_s=30,
                what="its end, though the run goes on",
            )
        finally:
            gate.touch()
        assert run.result(timeout=60).status == "done"


def wait_for(gate: str) -> None:
    secede()  # the worker has one thread
    eventually(lambda: Path(gate).exists(), within_s=60, what="the gate")


def test_a_stream_that_is_only_asked_for_its_head_ends(curl: Curl) -> None:
    two = curl.words("/v1/signals/stream", "-I", f"{curl.base}/v1/signals/stream")
    done = subprocess.run(two, capture_output=True, check=False)
    assert (done.returncode, done.stdout.count(b" 200 ")) == (0, 2)


def test_signals_are_streamed_and_a_closed_client_leaves_nothing(
    curl: Curl, cluster: LocalCluster
) -> None:
    with tc.connect(cluster.scheduler_address) as cast:
        two = [reader_of(curl), reader_of(curl)]
        try:
            full = curl("/v1/signals/stream")
            assert (full.status, full.json["error"]["branch"]) == (503, "ResourceError")
            cast.put(np.zeros(1), "new")
            for reader in two:
                read_until(reader, b'"artifact/new"')
        finally:
            for reader in two:
                reader.kill()
                reader.wait()
                assert reader.stdout is not None
                reader.stdout.close()
        cast.destroy("new")

    def free() -> bool:
        fast = curl.words("/v1/signals/stream?prefix=plan/none", "--max-time", "2")
        return b" 200 " in subprocess.run(fast, capture_output=True, check=False).stdout

    eventually(free, within_s=30, what="a place for another client")


def reader_of(curl: Curl) -> subprocess.Popen[bytes]:
    """Begin to read; the place of a reader who has gone is free a moment later."""
    words = curl.words("/v1/signals/stream?prefix=artifact/new&every=0.1", "-N")

    def begun() -> subprocess.Popen[bytes] | None:
        reader = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert reader.stdout is not None
        if b" 200 " in reader.stdout.readline():
            return reader
        reader.stdout.close()
        reader.kill()
        reader.wait()
        return None

    found = eventually(begun, within_s=30, what="a place for a reader")
    assert found is not None
    return found


def read_until(reader: subprocess.Popen[bytes], words: bytes) -> None:
    assert reader.stdout is not None
    for line in reader.stdout:
        if words in line:
            return
    raise AssertionError(words)


def test_a_token_that_cannot_be_read_opens_nothing_and_is_named_in_the_log_only(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path_factory.mktemp("tc")
    missing = str(folder / "no-such-token")
    settings = {"http": {"token-file": missing}}
    with local_cluster(folder / "r", n_workers=0, settings=settings) as made:
        scheduler = made.scheduler
        assert scheduler is not None
        base = f"http://127.0.0.1:{scheduler.http_server.port}/tensorcast"
        curl = Curl(base, "", folder)
        for token in (False, True):
            reply = curl("/v1/nodes", token=token)
            assert (reply.status, missing in reply.body.decode()) == (503, False)
        assert len(installed_in(made).guests) == 0
    assert missing in caplog.text


def installed_in(cluster: LocalCluster) -> Any:
    assert cluster.scheduler is not None
    return cluster.scheduler.extensions[EXTENSION]


# ------------------------------------------------------------ without a cluster
class Scene(Gateway):
    """A gateway whose answers are endless, or longer than any buffer."""

    entered = 0

    async def answer(self, asked: Asked, given: Conditions) -> Answer:
        self.entered += 1
        if asked.route.name == "read_tensor":
            return Answer(memory=memoryview(bytes(64 << 20)))
        return Answer(events=self._endless())

    async def _endless(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield b": " + b"x" * (1 << 16) + b"\n\n"


async def no_session() -> None:
    raise AssertionError("nothing asks for a session")


def scene(**limits: Any) -> Scene:
    given = {"connections": 3, "watchers": 1, "reads": 1, "stall_s": 0.3} | limits
    return Scene(no_session, token=TOKEN, limits=Limits(**given))


@pytest.mark.parametrize("path", ["/v1/signals/stream", "/v1/artifacts/a/tensors/w"])
def test_who_reads_nothing_is_left(path: str) -> None:
    @on_loop
    async def look() -> None:
        gateway = scene()
        server = Server(gateway, most=3, tls=None)
        url = await server.listen("127.0.0.1", (0, 0))
        port = int(url.rpartition(":")[2])
        rooms = [gateway.requests, *gateway._rooms.values()]
        try:
            with socket.create_connection(("127.0.0.1", port)) as caller:
                caller.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
                )
                await eventually_async(
                    lambda: gateway.entered and not any(r.taken for r in rooms),
                    within_s=30,
                    what="it was there and is left, though its socket is open",
                )
        finally:
            await server.close()

    with no_leaks(threads=True):
        look()


class Patient(Scene):
    """A gateway whose answers take until it is let go on."""

    dropped = 0
    going: asyncio.Event

    async def answer(self, asked: Asked, given: Conditions) -> Answer:
        self.entered += 1
        try:
            await self.going.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        return Answer()


@on_loop
async def test_who_has_gone_keeps_a_place_only_for_what_is_done() -> None:
    gateway = Patient(
        no_session, token=TOKEN, limits=Limits(connections=1, watchers=1, reads=1)
    )
    gateway.going = asyncio.Event()
    server = Server(gateway, most=3, tls=None)
    url = await server.listen("127.0.0.1", (0, 0))
    port = int(url.rpartition(":")[2])

    async def ask(method: str) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"{method} /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
        )
        writer.write(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        return writer

    try:
        for number, method in enumerate(("GET", "POST"), 1):
            writer = await ask(method)
            await eventually_async(
                partial(gateway_has, gateway, number), within_s=30, what="it is asked"
            )
            writer.close()
            if method == "GET":
                await eventually_async(
                    lambda: gateway.dropped and not gateway.requests.taken,
                    within_s=30,
                    what="nobody waits for it any more",
                )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 503 " in await reader.readline()
        writer.close()
        gateway.loop.call_soon_threadsafe(gateway.going.set)
        await eventually_async(
            lambda: not gateway.requests.taken, within_s=30, what="its place is free"
        )
        assert gateway.dropped == 1
    finally:
        await server.close()


class Lingering(Scene):
    """A gateway whose streams take a moment to end."""

    ended = False

    async def _endless(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b": one\n\n"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)  # scene: it has something to say yet
            self.ended = True


@on_loop
async def _leave_a_stream_of_another_loop() -> None:
    gateway = Lingering(
        no_session, token=TOKEN, limits=Limits(connections=1, watchers=1, reads=1)
    )
    server = HTTPServer(Application([(r".*", _NodeHandler)], gateway=gateway))
    (listening,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(listening)
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET /v1/signals/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b": one")
        writer.close()
        await eventually_async(
            lambda: gateway.ended and not gateway.requests.taken,
            within_s=30,
            what="the stream has ended",
        )
    finally:
        server.stop()
        await server.close_all_connections()
        await gateway.close()


def test_a_stream_that_is_left_ends_without_a_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _leave_a_stream_of_another_loop()
    assert "failed" not in caplog.text


def gateway_has(gateway: Scene, entered: int) -> bool:
    return gateway.entered == entered


@on_loop
async def test_what_is_under_way_when_a_gateway_closes_ends_with_a_reason() -> None:
    gateway = scene()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    waits = asyncio.create_task(gateway.on_loop(work()))
    await asyncio.to_thread(begun.wait, 30)
    await gateway.close()
    with pytest.raises(CatalogUnavailable, match="has closed"):
        await waits


def test_a_reader_is_slow_for_as_long_as_it_takes_something() -> None:
    class Slow:
        taken = b""
        within_s: float | None = None

        def settimeout(self, within_s: float) -> None:
            self.within_s = within_s

        def send(self, given: memoryview) -> int:
            self.taken += given[:1000]
            return len(given[:1000])

        def shutdown(self, how: int) -> None:
            assert how == socket.SHUT_WR

    slow: Any = Slow()
    _send_all(slow, memoryview(W.tobytes()[:10_500]), 3.0)
    assert (slow.taken, slow.within_s) == (W.tobytes()[:10_500], 3.0)


def test_connections_above_the_limit_are_closed_unread() -> None:
    @on_loop
    async def look() -> None:
        server = Server(scene(), most=2, tls=None)
        url = await server.listen("127.0.0.1", (0, 0))
        port = int(url.rpartition(":")[2])
        try:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            for _, one in [*kept, (reader, writer)]:
                one.close()
        finally:
            await server.close()

    with no_leaks(threads=True):
        look()


def test_under_tls_bytes_come_whole_and_in_the_clear_nothing_does(
    tmp_path: Path,
) -> None:
    files = mint_certificates()

    @on_loop
    async def look() -> None:
        gateway = scene(stall_s=20.0)
        server = Server(gateway, most=3, tls=auth.https_tls(files))
        url = await server.listen("127.0.0.1", (0, 0))
        try:
            curl = Curl(url, TOKEN, tmp_path)
            path = "/v1/artifacts/a/tensors/w"
            assert url.startswith("https://")
            whole = await asyncio.to_thread(curl, path, "-k", token=True)
            assert (whole.status, len(whole.body)) == (200, 64 << 20)
            refused = await asyncio.to_thread(curl, path, "-k")
            assert refused.status == 401
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(20):
                    answer = await reader.read()
            assert b"HTTP" not in answer
            writer.close()
        finally:
            await server.close()

    look()
    assert auth.https_tls(files).verify_mode is ssl.CERT_NONE
