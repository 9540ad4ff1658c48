"""Private training: the loop, its schedule and averaging, checkpoints and the run folder."""
