"""The model of the Megatron-core backend: its layers, inputs and output, and the patches that run it on a CPU."""
