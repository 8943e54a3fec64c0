"""What a debug bundle leaves out."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

from tensorcast_dask.cli.bundle import scrubbed, spellings, write
from tensorcast_dask.dataplane import bearer
from tensorcast_dask.tensors.secrets import HIDDEN


def test_values_that_are_secrets_by_their_names_are_left_out_at_every_depth() -> None:
    assert scrubbed(
        {
            "nodes": [{"labels": {"hf_token": "hunter2", "zone": "a"}}],
            "TENSORCAST_HTTP__TOKEN_FILE": "hunter2",
            "tokens": {"used": 7},
            "facts": json.dumps({"id": "a", "password": "hunter2"}),
            "text": "{no json",
            "TENSORCAST_NODE__LABELS": "{'hf-token': 'hunter2'}",
        }
    ) == {
        "nodes": [{"labels": {"hf_token": HIDDEN, "zone": "a"}}],
        "TENSORCAST_HTTP__TOKEN_FILE": HIDDEN,
        "tokens": {"used": 7},
        "facts": json.dumps({"id": "a", "password": HIDDEN}),
        "text": "{no json",
        "TENSORCAST_NODE__LABELS": HIDDEN,
    }


def test_the_clusters_token_is_known_in_every_spelling() -> None:
    token = bytes(range(32))
    found = spellings(token)
    assert token.hex() in found
    assert bearer.derived(token) in found
    assert all(len(one) > 16 for one in found)
    said = {f"with {one}": {"text": json.dumps({"why": f"of {one}"})} for one in found}
    left = json.dumps(scrubbed(said, found))
    assert left.count(HIDDEN) == 2
    assert not any(json.dumps(one)[1:-1] in left for one in found)


def test_a_sick_cluster_gives_a_bundle_too_and_only_its_owner_reads_it(
    tmp_path: Path,
) -> None:
    def fails(*_: object, **__: object) -> None:
        message = "it is sick"
        raise RuntimeError(message)

    greeting = SimpleNamespace(token=bytes(range(32)))
    core = SimpleNamespace(link=SimpleNamespace(greeting=greeting))
    sick = SimpleNamespace(
        _core=core,
        debug_state=fails,
        nodes=fails,
        instances=fails,
        sql=fails,
        explain=fails,
        signals=SimpleNamespace(snapshot=fails),
        policies=SimpleNamespace(list=fails),
    )
    path = tmp_path / "bundle.zip"
    path.touch(mode=0o644)
    parts = write(sick, path)
    assert core.deadline_default_s < 60
    assert path.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(path) as bundle:
        said = {name: json.loads(bundle.read(name)) for name in parts}
    assert said["nodes.json"] == {"not_there": "RuntimeError: it is sick"}
    assert "python" in said["versions.json"]
