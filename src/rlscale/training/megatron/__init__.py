"""Trainers over Megatron-core: tensor, pipeline, context and expert parallelism."""
