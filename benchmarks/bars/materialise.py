"""Another process on the host materialises 1 GiB that the node holds."""

from __future__ import annotations

from benchmarks import product
from benchmarks.harness import emit, paired, unavailable
from benchmarks.helpers import Helper
from benchmarks.peers.gather import DaskGather
from benchmarks.peers.ray_peer import NotInstallable, Ray
from benchmarks.raw import Memcpy
from benchmarks.sizes import Sizes, parse


def main(sizes: Sizes) -> None:
    """Four lines."""
    big, small = sizes.big_bytes, sizes.small_bytes
    with (
        product.cluster(sizes, n_workers=1) as cluster,
        product.session(cluster) as cast,
        Helper("reader") as reader,
    ):
        cast.put(product.big_array(big), "bench/big")
        cast.put(product.big_array(small), "bench/small")
        cast.put(product.big_array(64), "bench/tiny")
        reader(product.attach, cluster.scheduler_address)
        whole = f"{big >> 20} MiB"

        def read_ms(name: str) -> float:
            return reader(product.materialise, name) * 1e3

        emit(
            paired(
                f"materialise {whole} against {small >> 20} MiB",
                lambda: read_ms("bench/big"),
                lambda: read_ms("bench/small"),
                bar=2,
                better="lower",
                pairs=sizes.pairs * 3,
            )
        )
        memcpy = Memcpy(big)
        emit(
            paired(
                f"materialise {whole}, memcpy is slower by",
                lambda: memcpy.seconds() * 1e3,
                lambda: read_ms("bench/big"),
                bar=30,
                better="higher",
                pairs=sizes.pairs,
                notes={"value": "memcpy", "reference": "product"},
            )
        )
        with DaskGather(big) as gather:
            emit(
                paired(
                    f"materialise {whole}, Dask's gather is slower by",
                    lambda: gather.seconds() * 1e3,
                    lambda: read_ms("bench/big"),
                    bar=50,
                    better="higher",
                    pairs=sizes.pairs,
                    notes={"value": "Dask", "noop task ms": gather.noop_s * 1e3},
                )
            )
        against_ray(sizes, cluster.scheduler_address)


def against_ray(sizes: Sizes, address: str) -> None:
    """First read of the array in a fresh, connected process, the handle in hand.

    On both sides the process has read something tiny before: it *is* connected.
    """
    name = "materialise, first time in a process, against Ray's first get"
    try:
        ray = Ray(sizes.big_bytes)
    except NotInstallable as error:
        emit(unavailable(name, str(error), bar=1))
        return

    def first_ms() -> float:
        with Helper("first") as fresh:
            fresh(product.attach, address)
            fresh(product.materialise, "bench/tiny")
            fresh(product.resolve, "bench/big")
            return fresh(product.materialise_held) * 1e3

    try:
        emit(
            paired(
                name,
                first_ms,
                lambda: ray.seconds("get") * 1e3,
                bar=1,
                better="lower",
                pairs=sizes.pairs,
                notes={"ray": ray.version},
            )
        )
    finally:
        ray.close()


if __name__ == "__main__":
    main(parse())
