"""One module a config group: a dataclass with a documented field for each key."""
