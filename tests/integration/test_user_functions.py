"""Complete runs with functions of users in the working directory."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.conftest import REWARDED, Command

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-loss.md"


@pytest.mark.nightly
def test_user_functions_train_and_get_the_custom_node(command: Command) -> None:
    for text, name in re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE.read_text(), re.DOTALL):
        (command.folder / f"{name}.py").write_text(text)
    done = command.run(
        "algo.custom_advantage_function_path=my_advantages:best_only",
        "algo.use_tis=true",
        "algo.custom_tis_function_path=my_weights:near",
        "algo.custom_reducer_function_path=my_reducer:by_prompt",
        "train.rollout_data_postprocess_path=my_postprocess:bounded",
        "custom.max_advantage=0.5",
        "cluster.actor_num_gpus_per_node=2",
        "eval.prompt_data=null",
        "eval.interval=null",
    )
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert len(steps) == 3
    # Advantages are 1 for the best of a prompt and 0 for others, so the bound of 0.5 cuts those of the best.
    assert all(0 < m["rollout/bounded"] <= 1 and m["train/near"] > 0.99 for m in steps)


PLUGINS = """
import os


async def generate(args, sample, sampling_params, evaluation=False):
    from rlscale.plugins.slime_requests import post

    sample.tokens = [4, 11, 4, 12]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], meta_info=output["meta_info"],
        text=output["text"],
    )
    if sample.index == 1 and not evaluation:
        os._exit(3)  # the process of the function, and not that of the run
    return sample


def keep(args, samples, **kwargs):
    return True


def remove_first(args, data):
    for samples in data:
        samples[0].remove_sample = True


def halve(args, samples):
    return [s.reward for s in samples], [s.reward / 2 - 0.25 for s in samples]


def convert(args, samples):
    return {"sample_indices": [s.index for s in samples]}


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["mine/removed"] = sum(s.effective_response_length == 0 for s in samples)
    return False


def log_eval(rollout_id, args, data, extra_metrics):
    extra_metrics["mine/eval_sets"] = len(data)
    return True


async def rollout(rollout_id, context):
    if not hasattr(context, "num_groups"):
        return {"own": [1.0, 0.0]}
    return [await context.generate(group) for group in context.draw(context.num_groups)]
"""


def test_functions_in_slimes_form_have_an_effect_in_a_run(command: Command) -> None:
    (command.folder / "my_plugins.py").write_text(PLUGINS)
    done = command.run(
        REWARDED,
        "data.num_rollout=2",
        "sampling.custom_generate_function_path=my_plugins:generate",
        "sampling.dynamic_filter_path=my_plugins:keep",
        "sampling.sample_filter_path=my_plugins:remove_first",
        "reward.post_process_path=my_plugins:halve",
        "train.convert_samples_path=my_plugins:convert",
        "sampling.custom_rollout_log_function_path=my_plugins:log",
        "eval.custom_log_function_path=my_plugins:log_eval",
    )
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert [m["mine/removed"] for m in steps] == [4.0, 4.0]
    ledger = [json.loads(line) for line in (command.run_dir / "ledger.jsonl").read_text().splitlines()]
    # The exit of its process ends one trajectory; all others are trained.
    assert [page.get("failed/controller") for page in ledger] == [["1"], None], ledger
    assert [page["trained"] for page in ledger] == [["0", "2-15"], ["16-31"]]
    evaluated = [m for m in command.metrics() if "eval/reward_mean" in m]
    assert evaluated and not any(name.startswith("eval/arithmetic") for m in evaluated for name in m)


@pytest.mark.nightly
def test_a_rollout_function_replaces_the_loop_and_the_evaluation_of_a_run(command: Command) -> None:
    (command.folder / "my_plugins.py").write_text(PLUGINS)
    done = command.run(REWARDED, "data.num_rollout=2", "rollout.function_path=my_plugins:rollout")
    assert done.code == 0, done.err
    metrics = command.metrics()
    assert len([m for m in metrics if "train/loss" in m]) == 2
    assert any(m.get("eval/own/reward_mean") == 0.5 for m in metrics)
