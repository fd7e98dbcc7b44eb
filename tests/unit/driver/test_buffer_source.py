"""The source of a run that reads from the rollout buffer, from its keys."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlscale.config import load_config
from rlscale.driver.buffer_source import build_buffer_source
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import ServiceError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.group_filters import GroupFilters
from tests.unit.control.simulation import SimulatedEngine


@pytest.mark.parametrize("number", [0, 1])
async def test_a_call_is_repeated_as_often_as_the_key_says(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlscale.services.buffer_client.FIRST_PAUSE_S", 0.0)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    # Nothing listens on the port.
    keys = ("buffer.url=http://127.0.0.1:9", f"buffer.fetch_trajectory_retry_times={number}")
    config = load_config(["experiment=quickstart", *keys])
    prepared = cast(PreparedRun, SimpleNamespace(config=config, model_path=str(tmp_path)))
    pool = EnginePool(list[Any]([SimulatedEngine()]))
    source = build_buffer_source(prepared, pool, folder=tmp_path, filters=GroupFilters())
    ((index, prompt),) = await source.draw(0, 1)
    with pytest.raises(ServiceError, match=f"after buffer.fetch_trajectory_retry_times={number} retries"):
        await source.group(index, prompt, oldest=0, newest=0)
    assert sum("; retry " in record.message for record in caplog.records) == number
