"""What is allowed but deserves a word: settings that do little good, and settings that have no effect."""

from rlscale.config.notes.table import IGNORED, doubtful, ignored, warnings_of

__all__ = ["IGNORED", "doubtful", "ignored", "warnings_of"]
