"""Kernels that only make small models fast on a CPU."""
