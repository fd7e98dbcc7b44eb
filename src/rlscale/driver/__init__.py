"""Composition root: builds the parts of a run from its config, and runs it."""
