"""Forward pass of the trainer in the batch shapes of the embedded engine, so that both are bitwise equal."""
