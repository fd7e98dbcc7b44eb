"""Generation requests through a proxy, from processes of Ray: the keys of the group `network`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.models.resolve_model import resolve_model
from tests.forward_proxy import forward_proxy
from tests.integration.conftest import SMALL, Command
from tests.integration.test_external import serve


def test_requests_go_through_the_proxy_and_are_sent_by_several_processes(
    command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSCALE_CACHE", str(cache))
    model = resolve_model(load_config(list(SMALL)).model)
    with (
        serve(model, command.folder / "server.log") as address,
        forward_proxy(command.folder, {"engine.test": address}) as proxy,
    ):
        done = command.run(
            "rollout=external",
            "rollout.external_engine_addrs=[engine.test:30000]",
            f"network.http_proxy={proxy.url}",
            "network.use_distributed_post=true",
            "cluster.num_gpus_per_node=2",
            "debug.rollout_only=true",
            "eval.interval=null",
        )
        assert done.code == 0, done.err
        assert [record["step"] for record in command.metrics()] == [0, 1, 2]
        assert proxy.requests.count("POST http://engine.test:30000/generate") >= 12
    logs = [path.read_text() for path in (command.run_dir / "logs").glob("poster_*.log")]
    senders = [re.findall(r"process (\d+) sends requests to http://engine\.test:30000", text) for text in logs]
    assert len(logs) == 2 and all(len(pids) == 1 for pids in senders)
    assert len({int(pids[0]) for pids in senders} - {os.getpid()}) == 2
