"""Transports for weights from trainer ranks to engines, one module each."""
