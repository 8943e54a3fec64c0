"""HTTP for callers that are not Python: the gateway of nodes and of the scheduler's dashboard."""
