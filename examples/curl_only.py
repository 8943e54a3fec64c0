"""Everything that `curl_only.sh` does, on a cluster that this program starts for it."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import tensorcast_dask as tc


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        settings = {"http": {"token-file": str(token)}}
        with (
            tc.LocalCluster(
                n_workers=1, host_memory="64 MiB", settings=settings
            ) as cluster,
            tc.connect(cluster) as cast,
        ):
            bias = np.arange(4.0)
            cast.put({"bias": bias, "w": np.ones((100, 10))}, "toy/weights")
            address = cluster.dashboard_link.removesuffix("/status") + "/tensorcast"
            script = Path(__file__).with_suffix(".sh")
            done = subprocess.run(
                ["bash", str(script), address, str(token)],
                capture_output=True,
                text=True,
                check=False,
            )
            print(done.stdout, done.stderr)
            assert done.returncode == 0
            lines = done.stdout.splitlines()
            first = lines[
                lines.index("the first 16 bytes of a tensor, in hexadecimal:") + 1
            ]
            assert bytes.fromhex(first) == bias.tobytes()[:16]
            ended = next(line for line in lines if '"status":"done"' in line)
            assert json.loads(ended)["steps"]["now"]["status"] == "done"
            assert cast.latest("toy/weights").version == 1  # published by curl
            assert cast.artifact("toy/now").tensor_meta("bias").shape == (4,)


if __name__ == "__main__":
    main()
