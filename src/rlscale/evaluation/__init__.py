"""Evaluation sets and what is measured on them."""
