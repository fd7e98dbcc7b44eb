"""Fills unset keys of a valid config and records what was derived and why."""
