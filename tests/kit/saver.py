"""A process that saves, to be killed: ``python -m tests.kit.saver path seed [shard_bytes]``.

It says `ready` when it is about to begin and `done` when the save has returned.
"""

from __future__ import annotations

import resource
import sys
from typing import Final

from tensorcast_dask.dataplane.files.save import save
from tensorcast_dask.dataplane.files.spool import Spool
from tensorcast_dask.exceptions import CapacityError
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tests.kit.models import Sample, sample

MIB: Final = 1 << 20
#: Eight tensors; four shards where those are asked for.
SHARD_BYTES: Final = 2 * MIB


def eight(seed: int) -> Sample:
    """Make the artifact that is saved."""
    return sample({f"t{n}": ("uint8", (MIB,)) for n in range(8)}, seed=seed)


def main(what: str, path: str, seed: int, limit_bytes: int) -> None:
    """Save or spill `eight(seed)`; exit code 3 says that there was no room."""
    artifact = eight(seed)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    _say("ready")
    try:
        if what == "spool":
            Spool(path).write(
                Generation(seed),
                ArtifactId("m"),
                Version(1),
                index=artifact.index,
                source=memoryview(artifact.segment),
            )
        else:
            shard_bytes = SHARD_BYTES if what == "shards" else None
            save(
                path,
                artifact.index,
                memoryview(artifact.segment),
                max_shard_bytes=shard_bytes,
            )
    except CapacityError:
        sys.exit(3)
    _say("done")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
