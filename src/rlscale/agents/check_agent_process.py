"""The process of `rlscale-check-plugin` for tools and environments; see `rlscale.plugins.check_process`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rlscale.agents.agent_contracts import AGENT_CONTRACTS
from rlscale.agents.load_tools import load_tools
from rlscale.config import RunConfig
from rlscale.config.groups.custom import with_custom
from rlscale.config.user_functions import load_hook
from rlscale.plugins.check_process import main, run_contract


def check(path: str, kind: str, config: RunConfig) -> list[str]:
    """Lines that describe the tools or the environment. Raises ConfigError as `check_process.check`."""
    contract = AGENT_CONTRACTS[kind]
    if kind == "tool":
        tools = load_tools([path])
        names = [f"{each.name}({', '.join(each.arguments.model_fields)}): {each.description}" for each in tools]
        names += [
            f"{each.name} gets {count} of the row's images as {name}; the policy does not see this parameter"
            for each in tools
            for name, count in each.image_parameters.items()
        ]
        return [*names, f"returned: {run_contract(contract, tools, path)}"]
    create: Callable[..., Any] = with_custom(load_hook(contract.key, path), config.custom)
    return [f"returned: {run_contract(contract, create, path)}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], check))
