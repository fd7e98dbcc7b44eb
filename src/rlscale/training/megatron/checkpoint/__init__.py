"""Checkpoints of the Megatron-core backend."""
