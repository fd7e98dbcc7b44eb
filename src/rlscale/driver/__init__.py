"""The composition root: builds every part of a run from its config and drives it."""
