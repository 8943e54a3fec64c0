"""One request, followed through every process that has a part in it.

The program and all processes that it starts load OpenTelemetry at their start, as under
`opentelemetry-instrument`, and write each span as a line of a file of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.kit.source import ROOT

#: Run by every Python process that finds its folder on its path.
AT_START = """
import json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class Lines(SpanExporter):
    def export(self, spans):
        with open(f"{os.environ['SPANS']}/{os.getpid()}", "a") as file:
            for one in spans:
                said = {
                    "name": one.name, "pid": os.getpid(),
                    "trace": f"{one.context.trace_id:032x}", "id": f"{one.context.span_id:016x}",
                    "parent": f"{one.parent.span_id:016x}" if one.parent else "",
                    "status": one.status.status_code.name, "attributes": dict(one.attributes),
                }
                file.write(json.dumps(said) + "\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Lines()))
trace.set_tracer_provider(provider)
"""

PROGRAM = '''
import subprocess, sys
import numpy as np
from opentelemetry import trace
import tensorcast_dask as tc
from tensorcast_dask.exceptions import NotFound

ENGINE = """
import sys, tensorcast_dask.instance as instance
with instance.attach("engine") as me:
    @me.function
    def double(number):
        return 2 * number
    print("ready", flush=True)
    sys.stdin.read()
"""

if __name__ == "__main__":
    tracer = trace.get_tracer("program")
    with (
        tc.LocalCluster(2, host_memory="64 MiB", separate_hosts=True) as cluster,
        tc.connect(cluster) as cast,
    ):
        first, second = cast.workers()
        model = cast.put({"w": np.ones(1 << 20)}, "model", worker=first)
        with tracer.start_as_current_span("roll-out"):
            cast.prefetch(model, worker=second)
        cast.put({"w": np.ones(3)}, "small", worker=first)
        for executor in ("graph", "rpc"):
            with tracer.start_as_current_span(f"plan by {executor}"):
                with cast.plan(tc.context(ddl=60, key=executor)) as plan:
                    there = plan.on_worker(second)
                    copied = there.prefetch("small", name="brought")
                    plan.on_any().pin("small", ttl=60, name="held", after=[copied])
                    if executor == "graph":
                        there.submit(divmod, 1, 0, name="wrong", after=[copied])
                plan.run(executor=executor, raise_on_error=False)
        with tracer.start_as_current_span("miss"):
            try:
                cast.artifact("nothing")
            except NotFound:
                pass
    with tc.LocalCluster(1, host_memory="64 MiB") as cluster, tc.connect(cluster) as cast:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        engine.stdout.readline()
        with tracer.start_as_current_span("ask"):
            assert cast.instance("engine").call("double", 21) == 42
        engine.communicate(b"", timeout=30)
'''


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("spans")
    start = tmp_path_factory.mktemp("start")
    (start / "sitecustomize.py").write_text(AT_START)
    program = start / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with TemporaryDirectory(prefix="tc-", dir="/tmp") as run_dir:
        done = subprocess.run(
            [sys.executable, str(program)],
            env=os.environ
            | {
                "PYTHONPATH": f"{start}:{ROOT}",
                "SPANS": str(folder),
                "TENSORCAST_RUN_DIR": run_dir,
            },
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [
        json.loads(line)
        for file in Path(folder).iterdir()
        for line in file.read_text().splitlines()
    ]


def below(spans: list[dict[str, Any]], root: str) -> dict[str, dict[str, Any]]:
    """All spans of the trace that begins with `root`, by name."""
    (top,) = [one for one in spans if one["name"] == root]
    found = {one["name"]: one for one in spans if one["trace"] == top["trace"]}
    known = {one["id"] for one in found.values()}
    assert all(one["parent"] in known for one in found.values() if one is not top)
    return found


def test_a_copy_is_followed_from_the_program_to_the_store_that_pulls(
    spans: list[dict[str, Any]],
) -> None:
    found = below(spans, "roll-out")
    assert {"tensorcast prefetch", "catalog Ensure", "store pull"} <= set(found)
    assert found["tensorcast prefetch"]["parent"] == found["roll-out"]["id"]
    assert found["catalog Ensure"]["parent"] == found["tensorcast prefetch"]["id"]
    assert found["store pull"]["parent"] == found["tensorcast prefetch"]["id"]
    assert found["store pull"]["pid"] != found["catalog Ensure"]["pid"]


def test_a_refusal_is_an_error_on_every_span_that_it_ends(
    spans: list[dict[str, Any]],
) -> None:
    found = below(spans, "miss")
    asked = [one for name, one in found.items() if name.startswith("catalog ")]
    assert {one["status"] for one in asked} == {"ERROR"}
    assert {one["attributes"]["error.type"] for one in asked} == {"NotFound"}
    assert found["tensorcast artifact"]["status"] == "ERROR"


def test_a_call_is_followed_into_the_engine(spans: list[dict[str, Any]]) -> None:
    found = below(spans, "ask")
    assert "instance double" in found
    assert found["instance double"]["pid"] != found["ask"]["pid"]


def test_steps_of_a_plan_are_in_the_trace_of_the_call_that_ran_it(
    spans: list[dict[str, Any]],
) -> None:
    found = below(spans, "plan by graph")
    run, step = found["tensorcast run"], found["step brought"]
    assert {"step held", "plan report", "catalog BeginStep"} <= set(found)
    assert step["parent"] == found["step held"]["parent"] == run["id"]
    assert step["pid"] != run["pid"]
    assert step["attributes"]["tensorcast.plan"] == "graph"
    assert (step["status"], found["step wrong"]["status"]) == ("UNSET", "ERROR")
    assert found["step wrong"]["attributes"]["error.type"] == "PlanFailed"


def test_what_a_store_asks_for_a_plan_is_in_the_same_trace(
    spans: list[dict[str, Any]],
) -> None:
    found = below(spans, "plan by rpc")
    assert found["catalog StepEffect"]["parent"] == found["tensorcast run"]["id"]
