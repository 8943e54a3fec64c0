"""`python -m tensorcast_dask.cli`."""

from __future__ import annotations

from tensorcast_dask.cli.main import main

if __name__ == "__main__":
    main()
