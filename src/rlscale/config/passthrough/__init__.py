"""Keys that a group hands on to a library: `sglang.<argument>`, `megatron.<field>`. The library knows their names."""

from rlscale.config.passthrough.check import Passed, check_passed, is_passed, passing_groups

__all__ = ["Passed", "check_passed", "is_passed", "passing_groups"]
