"""SPMD ranks without Ray: plain classes that `cluster` turns into actors."""
