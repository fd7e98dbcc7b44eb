"""Ray at the end of a run: signals that reach every process of a job, and a Ray that is gone before the driver."""

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import ray

END_TIMEOUT_S = 3.0
"""Limit of one call at the end. Without its control store Ray waits for 60 s and then ends the driver, without a word
about the run."""

REMOVE_GROUPS = "remove the placement groups of the run"

_logger = logging.getLogger(__name__)


def end_ray() -> None:
    """Disconnects from Ray, and ends its daemons if this process started them."""
    if not call_or_leave(ray.shutdown, "end; its processes are killed"):
        atexit.unregister(ray.shutdown)  # it would wait again


def call_or_leave(call: Callable[[], Any], purpose: str) -> bool:
    """Calls a function of Ray that may wait for ever where Ray is gone, e.g. because a scheduler signals every process.

    Args:
        purpose: completes the warning "Ray did not ...".

    Returns:
        Whether it has returned within `END_TIMEOUT_S`. Its error is raised.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # any type: belongs to the caller
            done.set_exception(error)
        else:
            done.set_result(None)

    # Not a thread pool: the interpreter would wait for its threads.
    threading.Thread(target=run, name="ray end", daemon=True).start()
    wait_for([done], timeout=END_TIMEOUT_S)
    if done.done():
        done.result()
        return True
    _logger.warning("within %g s Ray did not %s", END_TIMEOUT_S, purpose)
    return False
