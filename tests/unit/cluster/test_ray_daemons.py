"""Which daemons Ray starts for a run, and in which session."""

import pytest
from ray._private import services
from ray._private.node import Node

from rlscale.cluster.ray_daemons import NOT_NEEDED, needed_daemons


def test_daemons_have_their_own_session_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(services, "ConsolePopen", lambda command, **options: given.append(options))
    with needed_daemons():
        services.ConsolePopen(["raylet"])
    services.ConsolePopen(["raylet"])
    assert given == [{"start_new_session": True}, {}]


def test_ray_starts_those_of_no_use_only_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: the pinned version of Ray still has the three methods."""
    started: list[str] = []
    for name in NOT_NEEDED:
        monkeypatch.setattr(Node, name, lambda self, *, name=name, **options: started.append(name))
    node = object.__new__(Node)
    with needed_daemons():
        node.start_monitor()
        node.start_log_monitor()
        node.start_api_server(include_dashboard=False, raise_on_failure=False)
    assert started == []
    node.start_monitor()
    node.start_log_monitor()
    node.start_api_server(include_dashboard=False, raise_on_failure=False)
    assert started == list(NOT_NEEDED)
