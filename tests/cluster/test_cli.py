"""The operator's commands, on a cluster in this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import tensorcast_dask as tc
from tensorcast_dask.cli import completing
from tensorcast_dask.cli import main as cli
from tests.kit.clusters import free_port
from tests.kit.commands import Commands
from tests.kit.eventually import eventually
from tests.kit.local import local_cluster

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines


class Operator(Commands):
    """Commands that name the cluster, and a session beside them."""

    cast: tc.Session
    address: str

    def __call__(self, *words: str, status: int = 0) -> tuple[str, str]:
        return super().__call__(*words, "-s", self.address, status=status)


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    made = Operator(tmp_path_factory.mktemp("c"))
    with (
        # On one host a drain would hand the memory over, however full the other is.
        local_cluster(
            made.run_dir,
            n_workers=2,
            settings={"separate-hosts": True},
            protocol="tcp",  # commands of other processes come, too
            host="127.0.0.1",
        ) as cluster,
        tc.connect(cluster.scheduler_address) as cast,
    ):
        made.cast, made.address = cast, cluster.scheduler_address
        yield made


def test_a_worker_that_is_retired_begins_no_other_node(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    leaving = Operator(tmp_path_factory.mktemp("c"))
    with (
        local_cluster(leaving.run_dir, n_workers=2) as cluster,
        tc.connect(cluster.scheduler_address) as cast,
    ):
        leaving.cast, leaving.address = cast, cluster.scheduler_address
        first, second = cast.wait_for_workers(2)
        cast.put(np.zeros(1000), "kept", worker=first)
        assert "kept v1" in leaving("drain", first.name, "--retire")[0]
        eventually(lambda: nodes_of(leaving, "kept") == [second.name], within_s=20)
        eventually(
            lambda: len(cast.client.scheduler_info()["workers"]) == 1, within_s=20
        )
        leaving("drain", second.name, "--keep", "--retire", status=2)


def nodes_of(operator: Operator, name: str) -> list[str]:
    return sorted(at.card.name for at in operator.cast.locations(name))


def test_copies_go_where_they_are_sent(operator: Operator) -> None:
    first = operator.cast.workers()[0]
    operator.cast.put(np.zeros(1000), "moved", worker=first)
    assert "moved: on 1 (host)" in operator("cp", "moved", "1")[1]
    assert nodes_of(operator, "moved") == ["0", "1"]
    assert "--from" in operator("mv", "moved", "1", status=1)[1]
    operator("mv", "moved", "1", "--from", "0")
    assert nodes_of(operator, "moved") == ["1"]
    assert operator.json("mv", "moved", "0")["location"]["card"]["name"] == "0"
    assert nodes_of(operator, "moved") == ["0"]
    assert "no node 'nope'" in operator("cp", "moved", "nope", status=1)[1]
    operator.cast.destroy("moved")


def test_draining_shows_its_receipt_and_fails_where_something_stayed(
    operator: Operator,
) -> None:
    first, _ = operator.cast.workers()
    held = operator.cast.put(np.zeros(1000), "drained", worker=first)
    out, err = operator("drain", "0", "--keep")
    assert "drained v1" in out
    assert "1 moved" in err
    assert "1" in nodes_of(operator, "drained")
    operator.cast.destroy("drained")
    # What is larger than all room elsewhere has to stay.
    large = operator.cast.put(np.zeros(40 << 20, np.uint8), "large", worker=first)
    other = operator.cast.put(np.zeros(40 << 20, np.uint8), "other", worker="1")
    receipt = json.loads(operator("drain", "0", "--keep", "--json", status=1)[0])
    assert [generation for generation, _ in receipt["stayed"]] == [
        str(large.generation)
    ]
    for one in (held, large, other):
        operator.cast.destroy(one)


def test_a_plan_is_run_listed_shown_and_cancelled(
    operator: Operator, tmp_path: Path
) -> None:
    operator.cast.put(np.zeros(3), "planned")
    step = {
        "name": "live",
        "kind": "publish",
        "target": {"is": "name", "id": "planned"},
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"steps": [step]}))
    assert operator.json("plan", "run", str(path), "--dry-run")["refusals"] == {}
    ran = operator.json("plan", "run", str(path), "-k", "by-hand", "--ddl", "60")
    assert (ran["key"], ran["status"]) == ("by-hand", "done")
    assert operator.json("plan", "run", str(path), "-k", "by-hand") == ran
    (listed,) = operator.json("plan", "ls", "by-")
    assert (listed["key"], listed["done"]) == ("by-hand", 1)
    assert operator.json("plan", "show", "by-hand", "--wait") == ran
    assert operator.json("plan", "cancel", "by-hand")["status"] == "done"
    step["target"] = {"is": "name", "id": "nobody made this"}
    path.write_text(json.dumps({"steps": [step]}))
    out, err = operator("plan", "run", str(path), status=1)
    assert "NotFound" in out
    assert "step 'live' failed" in err
    path.write_text("{")
    assert "no plan" in operator("plan", "run", str(path), status=1)[1]
    assert "NotFound" in operator("plan", "show", "none", status=1)[1]
    operator.cast.destroy("planned")


def test_what_happened_is_watched_and_told(operator: Operator) -> None:
    made = operator.cast.put(np.zeros(1000), "told")
    made.publish()
    lines = [one["what"] for one in operator.json("story", "told")]
    assert lines.index("version 1 committed") < lines.index("version 1 published")
    assert any(line.startswith("event/published: id told") for line in lines)
    assert "is published" in "".join(lines)
    operator.cast.destroy("told")
    assert "event/destroyed" in operator("story", "told")[0]
    assert "NotFound" in operator("story", "nobody made this", status=1)[1]
    told = operator("watch", "node/", "-n", "1", "--json")[0].splitlines()
    assert {json.loads(line)["name"].split("/")[0] for line in told} == {"node"}
    assert "capacity_bytes=" in operator("watch", "node/", "-n", "1")[0]
    assert operator("watch", "plan/none", "--seconds", "0.1")[0] == ""


def test_one_picture_is_shown_where_there_is_no_terminal(operator: Operator) -> None:
    operator.cast.put(np.zeros(1000), "pictured")
    shown = operator("top")[0]
    assert "pictured" in shown
    assert "nodes 2" in shown
    frame = operator.json("top")
    assert "pictured" in [row[0] for row in frame["artifacts"]["rows"]]
    operator.cast.destroy("pictured")


def test_where_http_is_answered_is_told_with_the_file_of_the_token(
    operator: Operator,
) -> None:
    told = operator.json("http")
    assert told["dashboard"].endswith("/tensorcast")
    assert told["nodes"] == {}  # no ports were given to any
    path = Path(told["token_file"])
    assert path.is_relative_to(operator.run_dir)
    assert len(path.read_text().strip()) == 64
    assert path.read_text().strip() not in "".join(operator("http"))


def test_a_benchmark_leaves_nothing_behind(operator: Operator) -> None:
    before = operator.cast.debug_state()["catalog"]
    figures = operator.json("bench", "--size", "1 MiB", "-r", "1")
    assert [one["bytes"] for one in figures if one["what"] == "put"] == [1 << 20]
    assert all(one["seconds"] > 0 for one in figures)
    after = operator.cast.debug_state()["catalog"]
    assert (after["artifacts"], after["pins"]) == (before["artifacts"], before["pins"])
    assert "CapacityError" in operator("bench", "--size", "1e30", status=1)[1]
    assert "'1 parsec'" in operator("bench", "--size", "1 parsec", status=2)[1]


def test_a_bundle_has_what_helps_and_no_secret(
    operator: Operator, tmp_path: Path
) -> None:
    operator.cast.put(
        np.zeros(3), "bundled", labels={"hf-token": "hunter2", "team": "a"}
    )
    path = tmp_path / "bundle.zip"
    made = operator.json("debug", "bundle", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(path) as bundle:
        assert bundle.namelist() == made["parts"]
        text = {name: bundle.read(name).decode() for name in bundle.namelist()}
    whole = "".join(text.values())
    token = operator.cast._core.link.greeting.token  # type: ignore[union-attr]
    for hidden in ("hunter2", token.hex(), '"not_there":'):
        assert hidden not in whole
    assert '"distributed"' in text["versions.json"]
    assert "bundled" in text["tables/versions.json"]
    assert "lease_ttl_s" in text["settings.json"]
    assert "resident_bytes" in text["state.json"]
    assert (
        "no folder"
        in operator("debug", "bundle", str(tmp_path / "n" / "f"), status=1)[1]
    )
    operator.cast.destroy("bundled")


# ------------------------------------------------------------------ completion
#: Asks the script as bash does at a TAB, with the words cut where bash cuts them.
TAB = r"""
source "$0"
COMP_WORDBREAKS=$' \t\n"'"'"'@><=;|&(:'
COMP_LINE=$1 COMP_POINT=${#1}
_tensorcast_completion tensorcast
printf '%s\n' "${COMPREPLY[@]}"
"""


def offered(commands: Commands, line: str) -> list[str]:
    """What a real bash is offered at the end of a line."""
    folder = commands.folder
    command, script = folder / "tensorcast", folder / "completion.bash"
    if not script.exists():
        main = "from tensorcast_dask.cli import main\nmain()\n"
        command.write_text(f"#!{sys.executable}\n{main}")
        command.chmod(0o755)
        script.write_text(CliRunner().invoke(cli, ["completion", "bash"]).output)
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", TAB, str(script), line],
        env=commands.env | {"PATH": f"{folder}:{os.environ['PATH']}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stderr == ""
    return sorted(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_tab_offers_what_the_cluster_has(operator: Operator) -> None:
    cast, at = operator.cast, f"-s {operator.address}"
    held = [cast.put(np.zeros(3), f"tab/{name}") for name in ("first", "$(touch x);ls")]
    cast.alias("tab:alias", held[0])
    with cast.plan(tc.context(ddl=60, key="tab-key")) as plan:
        plan.on_any().pin("tab/first", ttl=60)
    plan.run()
    for line, expected in (
        (f"tensorcast cp {at} tab", ["tab/first", "tab:alias"]),
        # bash has what stands before the colon.
        (f"tensorcast show {at} tab:", ["alias"]),
        (f"tensorcast mv {at} tab/first 1 --from ", ["0", "1"]),
    ):
        # A machine that is busy may not answer in a TAB's time.
        found = partial(offered, operator, line)
        eventually(lambda f=found, e=expected: f() == e, within_s=60, what=line)  # type: ignore[misc]
    # The rest without a shell, which costs a second each.
    context = click.Context(cli)
    context.args = ["tab/first"]
    assert completing._versions(cast, context, "") == ["1"]
    assert completing._plans(cast, context, "tab") == ["tab-key"]
    assert completing._refs(cast, context, "plan:ta") == ["plan:tab-key"]
    assert {"tab/first", "0"} <= set(completing._refs(cast, context, ""))
    assert not (operator.folder / "x").exists()
    for one in held:
        cast.destroy(one)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_tab_where_no_cluster_is_offers_nothing_and_says_nothing(
    tmp_path: Path,
) -> None:
    alone = Commands(tmp_path)
    assert offered(alone, "tensorcast show x") == []
    nobody = f"tcp://127.0.0.1:{free_port()}"
    assert offered(alone, f"tensorcast show -s {nobody} x") == []
    assert offered(alone, "tensorcast plan ca") == ["cancel"]
    assert offered(alone, "tensorcast watch ev") == ["event/"]
