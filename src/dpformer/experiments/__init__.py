"""Benchmarks and the paper's tables and figures. Nothing else imports this package."""
