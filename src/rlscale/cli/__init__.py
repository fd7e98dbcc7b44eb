"""The commands of rlscale, one module each."""
