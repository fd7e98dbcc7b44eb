"""Keys that a group passes to a library: `sglang.<argument>`, `megatron.<field>`. The library defines their names."""

from rlscale.config.passthrough.check import (
    PassthroughValues,
    check_passthrough,
    check_resolved,
    is_passthrough,
    passthrough_groups,
)

__all__ = ["PassthroughValues", "check_passthrough", "check_resolved", "is_passthrough", "passthrough_groups"]
