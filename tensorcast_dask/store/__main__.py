"""`python -m tensorcast_dask.store`: one store process, told by its stdin."""

from __future__ import annotations

import gc

# Nothing of what a start makes is garbage; the store turns it on when it serves.
gc.disable()

from tensorcast_dask.store.main import main  # noqa: E402

main()
