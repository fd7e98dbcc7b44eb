"""Packing of samples into micro-batches, and its division over context-parallel ranks."""
