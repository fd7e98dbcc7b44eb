"""Calls of Ray at the end of a run, when Ray may be gone."""

import logging
import socket
import threading
from types import SimpleNamespace

import pytest
import ray

from rlscale.cluster import ray_end
from rlscale.cluster.ray_end import call_ray_or_leave, end_ray
from rlscale.control import left_calls


def test_without_ray_a_call_that_never_returns_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_end, "END_TIMEOUT_S", 0.05)
    forever = threading.Event()
    with caplog.at_level(logging.WARNING):
        assert not call_ray_or_leave(forever.wait, "remove the placement group")
    assert caplog.messages == ["within 0.05 s Ray did not remove the placement group"]
    forever.set()
    left_calls._left.pop().join()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ray_has_more_time_to_end_while_its_control_store_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    store = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    address = f"[{host}]:{store.getsockname()[1]}" if ":" in host else f"{host}:{store.getsockname()[1]}"
    forever = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
    monkeypatch.setattr(ray, "shutdown", forever.wait)
    monkeypatch.setattr(ray_end, "END_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ray_end, "ALIVE_END_TIMEOUT_S", 0.1)
    with caplog.at_level(logging.WARNING):
        end_ray()
        assert not call_ray_or_leave(forever.wait, "remove the placement group")
        store.close()
        end_ray()
    forever.set()
    for _ in range(3):
        left_calls._left.pop().join()
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "within 0.1 s Ray did not end",
        "within 0.05 s Ray did not remove the placement group",
        "within 0.05 s Ray did not end",
    ]
