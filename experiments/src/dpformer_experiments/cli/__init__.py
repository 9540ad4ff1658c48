"""The commands that this package adds to `dpformer`. They import what they need when they run, so `--help` is fast."""
