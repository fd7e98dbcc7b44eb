"""The loop of a run: order of phases, staleness bound, metrics, checkpoints and restarts. No Ray, no torch."""
