"""Output of a run: metrics, console, summary, provenance, report. Imports neither torch nor Ray."""
