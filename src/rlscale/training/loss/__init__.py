"""The loss of a micro-batch: advantages, importance weights, policy and value loss, and functions of the user."""
