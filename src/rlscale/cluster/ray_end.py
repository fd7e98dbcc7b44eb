"""Ray at the end of a run: signals that reach every process of a job, and a Ray that is gone before the driver."""

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import services

END_TIMEOUT_S = 3.0
"""Limit of one call at the end. Without its control store Ray waits for 60 s and then ends the driver, without a word
about the run."""

REMOVE_GROUPS = "remove the placement groups of the run"

_POPEN = "ConsolePopen"  # in a private module of Ray: a subclass of subprocess.Popen that starts its daemons

_logger = logging.getLogger(__name__)


@contextmanager
def daemons_in_own_session() -> Iterator[None]:
    """Ray's daemons that are started inside are not in the driver's process group.

    `timeout`, a shell that ends its jobs, and a terminal that is closed signal the whole group. Ray's daemons would end
    at once, and the driver needs them to end the run.
    """
    before = getattr(services, _POPEN)
    setattr(services, _POPEN, partial(before, start_new_session=True))
    try:
        yield
    finally:
        setattr(services, _POPEN, before)


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
