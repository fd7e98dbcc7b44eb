"""The scripted engine: answers come from a function or a file of the user, without a model."""
