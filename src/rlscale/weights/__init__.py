"""Synchronises weights from trainers to engines, verified."""
