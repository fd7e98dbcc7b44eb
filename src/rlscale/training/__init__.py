"""Training backends, and what they share: process group, schedule, optimiser, packing, the loss of a micro-batch."""
