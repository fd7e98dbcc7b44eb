"""The processes that Ray starts on this machine: which ones, and in which session."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ray._private import services
from ray._private.node import Node

_POPEN = "ConsolePopen"  # in a private module of Ray: a subclass of subprocess.Popen that starts its daemons

NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's private `Node` that each start a daemon which no run uses.

The first adds nodes to a cluster, which here is this machine. The second forwards what workers print, which is off
(`log_to_driver`). The third serves the dashboard, and without it only reports usage, which is off, too.
"""


@contextmanager
def needed_daemons() -> Iterator[None]:
    """Ray that is started inside has only the daemons that a run needs, outside of the driver's process group.

    The others take 2.3 s of a core and 160 MB, and Ray's start waits for the dashboard's.

    `timeout`, a shell that ends its jobs, and a terminal that is closed signal the whole group. Ray's daemons would end
    at once, and the driver needs them to end the run.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(services, _POPEN, partial(getattr(services, _POPEN), start_new_session=True)))
        for name in NOT_NEEDED:
            # Another version of Ray may start its daemons elsewhere: then it has all of them.
            if hasattr(Node, name):
                stack.enter_context(_replaced(Node, name, _start_nothing))
        yield


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _start_nothing(node: Node, **options: Any) -> None: ...
