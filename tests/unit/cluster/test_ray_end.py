"""Calls of Ray at the end of a run, when Ray may be gone."""

import logging
import threading

import pytest

from rlscale.cluster import ray_end
from rlscale.cluster.ray_end import call_or_leave


def test_a_call_that_returns_is_waited_for() -> None:
    calls: list[str] = []
    assert call_or_leave(lambda: calls.append("ended"), "end")
    assert calls == ["ended"]


def test_its_error_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no such group")

    with pytest.raises(RuntimeError, match="no such group"):
        call_or_leave(fail, "end")


def test_a_call_that_never_returns_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ray_end, "END_TIMEOUT_S", 0.05)
    forever = threading.Event()
    with caplog.at_level(logging.WARNING):
        assert not call_or_leave(forever.wait, "remove the placement group")
    assert caplog.messages == ["within 0.05 s Ray did not remove the placement group"]
    forever.set()
