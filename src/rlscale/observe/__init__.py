"""What a run shows and leaves behind: metrics, console, summary, provenance. Imports neither torch nor Ray."""
