"""The trainer's forward pass in the shapes of the embedded engine, so that both give the same bits."""
