"""Independent checks of a machine: device, training, engines, weight channels, speed, and a whole run."""
