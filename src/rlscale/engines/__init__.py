"""Engines: servers that generate, their processes and their client."""
