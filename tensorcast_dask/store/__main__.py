"""`python -m tensorcast_dask.store`: one store process, told by its stdin."""

from __future__ import annotations

from tensorcast_dask.store.main import main

main()
