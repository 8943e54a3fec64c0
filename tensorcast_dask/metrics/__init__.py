"""Numbers for Prometheus, on the endpoints that Dask has."""
