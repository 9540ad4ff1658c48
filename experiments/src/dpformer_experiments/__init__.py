"""Benchmarks and the paper's tables and figures: `dpformer bench` and `dpformer reproduce`. `dpformer` never imports this."""
