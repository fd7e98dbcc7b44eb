"""Completes a valid config: fills unset keys and records each derived value with its reason."""
