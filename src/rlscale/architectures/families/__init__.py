"""One module per model family, each with a constant `FAMILY`; `rlscale.architectures.family` finds them."""
