"""Checkpoints: saving, resuming, retention."""
