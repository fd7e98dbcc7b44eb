"""Prompts, training batches and the plan of micro-batches."""
