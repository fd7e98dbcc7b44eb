"""Models of the Megatron-core backend: layers, attention, rotary embedding."""
