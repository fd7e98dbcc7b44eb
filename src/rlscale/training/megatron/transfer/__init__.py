"""Weights of all ranks brought together: `plan` says which rank sends what to whom, `carry` does it."""
