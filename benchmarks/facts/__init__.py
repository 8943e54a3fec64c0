"""Questions put to the machine and to the libraries below us, one script each.

Every script stands alone (``python -m benchmarks.facts.<name>``), ends by itself,
and prints a small table and one line of JSON. What the answers mean for the design
is written on one page: ``docs/facts.md``.
"""
