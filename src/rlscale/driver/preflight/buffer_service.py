"""Check of the rollout buffer service that the run reads from."""

from __future__ import annotations

import asyncio

from rlscale.config import RunConfig
from rlscale.config.addresses import public_url
from rlscale.config.rules import reads_buffer
from rlscale.errors import Problem


def check_buffer(config: RunConfig) -> list[Problem]:
    """The problem of a service that does not answer, or refuses the key."""
    if not reads_buffer(config) or config.run.rehearsal:
        return []
    # Imported here: the HTTP client takes a tenth of a second, and few runs read from a service.
    from rlscale.driver.buffer_source import buffer_address
    from rlscale.services.buffer_client import find_buffer_fault

    fault = asyncio.run(find_buffer_fault(buffer_address(config), task_type=config.buffer.task_type))
    if fault is None:
        return []
    value = f"{public_url(str(config.buffer.url))} ({fault})"
    fix = "start it with rlscale-buffer, or remove the key"
    return [Problem(path="buffer.url", rule="name a rollout buffer that answers", value=value, fix=fix)]
