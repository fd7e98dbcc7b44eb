"""Prompts, batches and the schedule of micro-batches."""
