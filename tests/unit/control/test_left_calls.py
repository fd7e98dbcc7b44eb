"""Calls that may never return."""

import logging
import threading

import pytest

from rlscale.control import left_calls
from rlscale.control.left_calls import call_or_leave, exit_process


def test_a_call_that_returns_is_waited_for() -> None:
    calls: list[str] = []
    assert call_or_leave(lambda: calls.append("ended"), "Ray", "end", timeout_s=5)
    assert calls == ["ended"]


def test_its_error_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no such group")

    with pytest.raises(RuntimeError, match="no such group"):
        call_or_leave(fail, "Ray", "end", timeout_s=5)


def test_a_call_that_never_returns_is_left(caplog: pytest.LogCaptureFixture) -> None:
    forever = threading.Event()
    with caplog.at_level(logging.WARNING):
        assert not call_or_leave(forever.wait, "Ray", "remove the group", timeout_s=0.05)
    assert caplog.messages == ["within 0.05 s Ray did not remove the group"]
    forever.set()
    left_calls._left.pop().join()


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_that_left_nothing_ends_as_others_do(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    # Threads of other tests may not have ended yet; then it would end this process.
    monkeypatch.setattr(left_calls, "_left", [])
    with pytest.raises(SystemExit) as raised:
        exit_process(code)
    assert raised.value.code == code
