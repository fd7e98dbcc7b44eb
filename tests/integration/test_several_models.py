"""A run with three models from the file of `sglang.config`: the weights of one of them are updated."""

import json
from pathlib import Path

import pytest

from tests.fake_sglang import install_fake_sglang, records
from tests.integration.conftest import Command

pytestmark = pytest.mark.slow

REWARD = """
async def length(sample, judge):
    reference = await judge.model("ref").request("/generate", {
        "text": sample.response + "?", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True,
    })
    assert len(reference["meta_info"]["output_token_logprobs"]) <= 2
    return float(len(await judge.generate(sample.response + "?", max_new_tokens=4)))
"""
GENERATE = """
async def generate(trajectory, session):
    trajectory.metadata["opinion"] = await session.model("ref").generate("1+1=", max_new_tokens=2)
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
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
  - name: ref
    update_weights: false
    server_groups:
      - {worker_type: regular, num_gpus: 1, overrides: {context_length: 90}}
"""


@pytest.mark.nightly
def test_only_the_policy_gets_weights_and_user_code_asks_the_others(command: Command, tmp_path: Path) -> None:
    (command.folder / "my_reward.py").write_text(REWARD)
    (command.folder / "my_generate.py").write_text(GENERATE)
    (command.folder / "models.yaml").write_text(MODELS)
    done = command.run(
        "rollout=sglang",
        f"sglang.python={install_fake_sglang(tmp_path / 'interpreter')}",
        "sglang.config=models.yaml",
        "reward.engine.name=judge",
        "reward.type=null",
        "reward.custom_path=my_reward:length",
        "sampling.custom_generate_function_path=my_generate:generate",
        'debug.save_rollout_data="dumps/{rollout_id}.jsonl"',
        "router.use_middleware_router=true",
        "eval.interval=null",
    )
    assert done.code == 0, done.err
    logs = command.run_dir / "logs"
    assert [len(records(logs, name, "weights")) > 2 for name in ("engine 0", "engine 1")] == [True, True]
    assert [records(logs, name, "weights") for name in ("reward engine 0", "ref engine 0")] == [[], []]
    names = ("engine 0", "reward engine 0", "ref engine 0")
    arguments = {name: records(logs, name, "launches")[-1]["arguments"] for name in names}
    assert arguments["engine 0"]["page_size"] == 1 and "page_size" not in arguments["reward engine 0"]
    judge = arguments["reward engine 0"]
    assert judge["mem_fraction_static"] == 0.4 and judge["context_length"] == 180
    assert arguments["ref engine 0"]["context_length"] == 90
    assert "ref engine 0 will serve" in done.out and "to user code as model ref" in done.out
    dumped = [json.loads(line) for line in (command.folder / "dumps" / "0.jsonl").read_text().splitlines()]
    assert all(isinstance(record["metadata"]["opinion"], str) for record in dumped)
    assert all(record["reward/mean"] > 0 for record in command.metrics() if "reward/mean" in record)


def test_a_file_that_cannot_be_used_ends_the_command_before_ray(command: Command) -> None:
    (command.folder / "models.yaml").write_text(MODELS.replace("regular, num_gpus: 2", "prefill, num_gpus: 2"))
    done = command.run("rollout=sglang", "sglang.config=models.yaml", "reward.engine.name=judge")
    assert done.code == 2 and "Traceback" not in done.err
    assert "have a prefill and a decode group in sglang[0].server_groups, got no decode group" in done.err
    assert not command.run_dir.exists()
