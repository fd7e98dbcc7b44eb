"""Crash test: kills processes of a run at random times and compares it with an uninterrupted run."""
