"""Ways to get chunks from a holder; importing this makes the built-in schemes known."""

from tensorcast_dask.dataplane.transports import cuda_ipc, shm, stream, ucx

__all__ = ["cuda_ipc", "shm", "stream", "ucx"]
