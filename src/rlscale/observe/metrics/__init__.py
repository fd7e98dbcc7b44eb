"""Metrics of a run: their names, the functions that compute them, timers, and sinks combined into one."""
