"""Evaluation sets and the metrics that are measured on them."""
