"""Ray at the end of a run: signals that reach every process of a job, and a Ray that is gone before the driver."""

import atexit
import socket
from collections.abc import Callable
from typing import Any

import ray

from rlscale.control.left_calls import call_or_leave

END_TIMEOUT_S = 3.0
"""Limit of one call at the end. Without its control store Ray waits for 60 s and then ends the driver, without a word
about the run."""

ALIVE_END_TIMEOUT_S = 5.0
"""Limit of Ray's own end while the control store answers: on a busy machine it takes seconds. With the call before it,
a run still ends within 10 s of Ctrl-C."""

REMOVE_GROUPS = "remove the placement groups of the run"


def end_ray() -> None:
    """Disconnects from Ray, and ends its daemons if this process started them."""
    limit_s = ALIVE_END_TIMEOUT_S if _is_alive() else END_TIMEOUT_S
    if not call_or_leave(ray.shutdown, "Ray", "end; its processes are killed", timeout_s=limit_s):
        atexit.unregister(ray.shutdown)  # it would wait again


def call_ray_or_leave(call: Callable[[], Any], purpose: str) -> bool:
    """Calls a function of Ray that may wait for ever where Ray is gone, e.g. because a scheduler signals every process.

    Args:
        purpose: completes the warning "Ray did not ...".

    Returns:
        Whether it has returned in time. Its error is raised.
    """
    return call_or_leave(call, "Ray", purpose, timeout_s=END_TIMEOUT_S)


def _is_alive() -> bool:
    """Whether Ray's control store accepts connections."""
    if not ray.is_initialized():
        return False
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return True
    except OSError:
        return False
