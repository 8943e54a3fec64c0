"""Runs inside Ray's own environment: one JSON request a line in, one answer a line out.

``{"op": "put"}``: seconds of ``ray.put`` of the array in a warm store.
``{"op": "get"}``: seconds of the first ``ray.get`` of it in a fresh, connected process.
"""

import json
import os
import sys
import tempfile
import time

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray


@ray.remote(num_cpus=1)
class Reader:
    def ready(self, refs: list) -> int:
        return int(ray.get(refs[0])[0])

    def first_get(self, refs: list) -> tuple[float, int]:
        begin = time.perf_counter()
        array = ray.get(refs[0])
        spent = time.perf_counter() - begin
        return spent, int(array[-1])


def main() -> None:
    size = int(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # Ray prints; only answers go to the pipe
    ray.init(
        num_cpus=2,
        object_store_memory=size * 3,
        include_dashboard=False,
        _temp_dir=tempfile.mkdtemp(prefix="ray", dir="/tmp"),
        log_to_driver=False,
        logging_level="ERROR",
    )
    array = np.full(size, 3, dtype=np.uint8)
    for _ in range(4):  # until the store recycles its memory
        ref = ray.put(array)
        del ref
    kept = ray.put(array)
    tiny = ray.put(np.zeros(1 << 20, dtype=np.uint8))

    def say(**answer: object) -> None:
        os.write(answers, (json.dumps(answer) + "\n").encode())

    say(ready=True, version=ray.__version__)
    for line in sys.stdin:
        op = json.loads(line)["op"]
        if op == "put":
            begin = time.perf_counter()
            ref = ray.put(array)
            say(seconds=time.perf_counter() - begin)
            del ref
        elif op == "get":
            reader = Reader.remote()
            ray.get(reader.ready.remote([tiny]))
            spent, last = ray.get(reader.first_get.remote([kept]))
            assert last == 3
            ray.kill(reader)
            say(seconds=spent)
        else:
            break
    ray.shutdown()


main()
