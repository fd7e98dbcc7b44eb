"""Trajectories of mixed agents: every token that is trained is one of the engine's own log, and none of it is lost."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlscale.cli import serve
from rlscale.config import ModelBuild, ModelConfig
from rlscale.gateway.gateway_client import GatewayClient
from rlscale.gateway.gateway_process import GatewayLaunch, GatewayProcess
from rlscale.models.tiny import build_model
from rlscale.types import EngineAddress
from tests.gateway_fixtures import EngineEntry
from tests.mixed_agents import KINDS, NUM_SAMPLES, draws, logged_calls, mixed_run, serve_logged
from tests.scripted_engine import build_codec, scripted_engine


async def run_and_compare(
    folder: Path, engine: EngineAddress, entries: Sequence[EngineEntry], *, num_groups: int, max_new_tokens: int
) -> dict[str, int]:
    """Runs groups of all agents, compares their tokens with the log, and returns the figures of the run."""
    codec = {"factory": "tests.scripted_engine:build_codec", "arguments": {}}
    launch = GatewayLaunch(folder=folder / "sessions", log_folder=folder, model="policy", codec=codec)
    gateway = GatewayProcess(launch, [engine])
    gateway.start()
    try:
        client = GatewayClient(gateway.address)
        async with mixed_run(engine, client, build_codec(), folder, max_new_tokens=max_new_tokens) as run:
            await run.run(num_groups)
        assert (await client.status())["num_sessions"] == 0 and not list((folder / "sessions").iterdir())
        await client.close()
    finally:
        gateway.stop()
    failed = [sample.failure for group in run.groups for sample in group.failed]
    assert not failed, failed[:3]
    captured, logged = run.trained_calls(), logged_calls(entries)
    assert captured == logged, f"{(captured - logged).total()} only captured, {(logged - captured).total()} only logged"
    counts = run.counts()
    assert counts["trajectories"] == num_groups * NUM_SAMPLES
    assert counts["sampled tokens"] == sum(len(each.output_ids) for each in entries)
    assert counts["samples"] > counts["trajectories"], "some of the agents branch"
    return counts


@pytest.mark.slow
async def test_mixed_agents_have_the_tokens_of_the_embedded_engine(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = ModelConfig(build=ModelBuild.tiny_qwen3_agent, num_key_value_heads=1, head_dim=16, **sizes)
    model = build_model(config, tmp_path / "cache")
    arguments = serve.make_parser().parse_args([f"--model-path={model}", "--num-threads=1"])
    service, scheduler, _ = serve.build(arguments)
    scheduler.start()
    try:
        with serve_logged(service) as log:
            await run_and_compare(tmp_path, log.address, log.entries, num_groups=2 * len(KINDS), max_new_tokens=90)
    finally:
        scheduler.close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_a_thousand_trajectories_of_mixed_agents_have_the_tokens_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the figures of the run."""
    with scripted_engine(draws) as engine:
        counts = await run_and_compare(tmp_path, engine.address, engine.entries, num_groups=250, max_new_tokens=2_000)
    with capsys.disabled():
        print(json.dumps(counts))
