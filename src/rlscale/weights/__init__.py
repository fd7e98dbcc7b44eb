"""Carrying weights from trainers to engines, verified."""
