"""Checkpoints and run folders: saving, resuming, retention."""
