"""Checkpoints in Megatron-core's `torch_dist` format, and conversion between them and Hugging Face folders."""
