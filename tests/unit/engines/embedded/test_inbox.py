"""The inbox of the decode thread: order of commands, and the moment at which nothing is left to do."""

import queue
from collections.abc import Callable

import pytest

from rlscale.engines.embedded.inbox import ANSWER_S, IDLE_WAKE_S, Inbox


class Commands:
    """A queue without a clock: `arrivals` lists how the next waits end, with a command or with their timeout."""

    def __init__(self, arrivals: list[Callable[[], None] | None], events: list[str]) -> None:
        self._arrivals, self._events = arrivals, events

    def get(self, *, timeout: float) -> Callable[[], None]:
        self._events.append(f"wait {timeout:g}")
        arrived = self._arrivals.pop(0)
        if arrived is None:
            raise queue.Empty
        return arrived

    def get_nowait(self) -> Callable[[], None]:
        raise queue.Empty


@pytest.mark.parametrize(
    ("arrives", "expected"),
    [
        # The answer to the last command leaves in the first wait, before the idle work occupies the thread.
        ([True], [f"wait {ANSWER_S:g}", "command"]),
        ([False, True], [f"wait {ANSWER_S:g}", "idle", f"wait {IDLE_WAKE_S:g}", "command"]),
        ([False, False], [f"wait {ANSWER_S:g}", "idle", f"wait {IDLE_WAKE_S:g}"]),
    ],
)
def test_idle_work_starts_only_when_no_command_follows_soon(arrives: list[bool], expected: list[str]) -> None:
    events: list[str] = []
    inbox = Inbox()
    inbox._commands = Commands(  # type: ignore[assignment]
        [(lambda: events.append("command")) if each else None for each in arrives], events
    )
    inbox.run_all(on_idle=lambda: events.append("idle"))
    assert events == expected
