"""How a session talks: to Dask, to the catalog, to stores; and how long it waits."""
