"""Plans in a program and on workers: building, pricing, graphs, runs."""
