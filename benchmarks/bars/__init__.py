"""One file for each bar; ``python -m benchmarks.bars.<name>`` runs one of them."""
