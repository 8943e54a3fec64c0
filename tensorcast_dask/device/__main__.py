"""`python -m tensorcast_dask.device`: one device process, told by its stdin."""

from __future__ import annotations

from tensorcast_dask.device.main import main

main()
