"""SPMD ranks: plain classes without Ray, which also run under torchrun or in a test."""
