"""A run with two models from the file of `sglang.config`: the weights of one of them are updated."""

from pathlib import Path

import pytest

from tests.fake_sglang import install_fake_sglang, records
from tests.integration.conftest import Command

pytestmark = pytest.mark.slow

REWARD = """
async def length(sample, judge):
    return float(len(await judge.generate(sample.response + "?", max_new_tokens=4)))
"""
MODELS = """
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {page_size: 1}}
  - name: judge
    update_weights: false
    server_groups:
      - {worker_type: regular, num_gpus: 1, overrides: {mem_fraction_static: 0.4, context_length: 180}}
"""


def test_only_the_policy_gets_weights_and_each_model_its_arguments(command: Command, tmp_path: Path) -> None:
    (command.folder / "my_reward.py").write_text(REWARD)
    (command.folder / "models.yaml").write_text(MODELS)
    done = command.run(
        "rollout=sglang",
        f"sglang.python={install_fake_sglang(tmp_path / 'interpreter')}",
        "sglang.config=models.yaml",
        "reward.engine.name=judge",
        "reward.type=null",
        "reward.custom_path=my_reward:length",
        "router.use_middleware_router=true",
        "eval.interval=null",
    )
    assert done.code == 0, done.err
    logs = command.run_dir / "logs"
    assert [len(records(logs, name, "weights")) > 2 for name in ("engine 0", "engine 1")] == [True, True]
    assert records(logs, "reward engine 0", "weights") == []
    arguments = {name: records(logs, name, "launches")[-1]["arguments"] for name in ("engine 0", "reward engine 0")}
    assert arguments["engine 0"]["page_size"] == 1 and "page_size" not in arguments["reward engine 0"]
    judge = arguments["reward engine 0"]
    assert judge["mem_fraction_static"] == 0.4 and judge["context_length"] == 180
    assert all(record["reward/mean"] > 0 for record in command.metrics() if "reward/mean" in record)


def test_a_file_that_cannot_be_used_ends_the_command_before_ray(command: Command) -> None:
    (command.folder / "models.yaml").write_text(MODELS.replace("regular, num_gpus: 2", "prefill, num_gpus: 2"))
    done = command.run("rollout=sglang", "sglang.config=models.yaml", "reward.engine.name=judge")
    assert done.code == 2 and "Traceback" not in done.err
    assert "have regular as sglang[0].server_groups[0].worker_type, got prefill" in done.err
    assert not command.run_dir.exists()
