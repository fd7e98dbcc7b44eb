"""Sandboxes: places in which programs that a model wrote run. Nothing here is imported before it is used."""
