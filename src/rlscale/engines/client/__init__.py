"""The client of an engine's HTTP API."""
