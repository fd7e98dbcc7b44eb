"""Config groups, one module each: a dataclass with a documented field per key."""
