"""Weights between Hugging Face and Megatron-core: the code that interprets the tables of `rlscale.architectures`."""
