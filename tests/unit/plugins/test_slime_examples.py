"""Functions with the imports and signatures of slime's examples run with `run.slime_modules`."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlscale.config.slime_modules import install_slime_modules, remove_slime_modules
from rlscale.plugins.args_view import Args
from rlscale.plugins.contracts import check_generate, check_reward
from rlscale.plugins.example_groups import example_groups
from rlscale.plugins.load_plugin import load_plugin
from rlscale.plugins.sample_view import ATTRIBUTES
from rlscale.types import Sample
from tests.unit.config.rules.valid_config import config_with

SEARCH = '''
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Sends text; its stop strings and columns are its own."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.loss_mask, response, ids = list(prompt), [], "", []
    mask = sample.loss_mask
    sampling_params = {**sampling_params, "stop": ["</search>"]}
    for _ in range(2):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        found = [pair[1] for pair in pairs]
        sample.append_response_tokens(
            args, tokens=found, log_probs=[pair[0] for pair in pairs], trainable=True, meta_info=output["meta_info"]
        )
        observation = state.tokenizer("[4]", add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=observation, trainable=False)
        response += output["text"] + "[4]"
        ids += found + observation
    sample.tokens, sample.response_length, sample.response = prompt + ids, len(ids), response
    sample.loss_mask = mask
    sample.status = Sample.Status.COMPLETED
    sample.tool_call_count = 2
    return sample
'''

AGENTS = """
import asyncio
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample


async def solve(args, prompt):
    sample = deepcopy(args.sample)
    sample.prompt, sample.tokens = prompt, args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": args.sampling_params})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], meta_info=output["meta_info"]
    )
    sample.response, sample.status = output["text"], Sample.Status.COMPLETED
    args.results.append(sample)


async def run_agents(args, sample):
    args.sample, args.results = sample, []
    await asyncio.gather(*[solve(args, sample.prompt) for _ in range(2)], solve(args, "select: " + sample.prompt))
    rewards = await batched_async_rm(args, args.results)
    for each, reward in zip(args.results, rewards):
        each.reward = reward
    return args.results


async def generate_with_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    args.sampling_params = sampling_params
    from slime.rollout.sglang_rollout import GenerateState
    args.tokenizer = GenerateState(args).tokenizer
    return await load_function("agents_for_test.run_agents")(args, sample)
"""

GRADE = """
from slime.rollout.rm_hub.math_dapo_utils import compute_score as math_dapo_compute_score
from slime.utils.types import Sample


async def reward_func(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    result = math_dapo_compute_score(f"Answer: {sample.response}", str(sample.label), strict_box_verify=False)
    return result["score"] + 0.1 * getattr(sample, "tool_call_count", 0)
"""

QA = """
async def reward_func(args, sample, **kwargs):
    known = sample.label["ground_truth"]["target"]
    return float(sample.response in known) + 0.5 * len(sample.label["aliases"])
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {"search_for_test": SEARCH, "agents_for_test": AGENTS, "grade_for_test": GRADE, "qa_for_test": QA}
    for name, text in names.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    install_slime_modules()
    yield
    remove_slime_modules()
    for name in names:
        sys.modules.pop(name, None)


def load(key: str, path: str) -> Any:
    config = config_with({"reward.type": "exact_match"})
    return load_plugin(key, path, args=Args(config), custom={})


def generated(path: str) -> list[Sample]:
    return check_generate(load("sampling.custom_generate_function_path", path))


def test_a_search_agent_runs() -> None:
    sample, _ = generated("search_for_test:generate")
    assert sample.response == "2[4]2[4]" and sample.loss_mask.tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    assert sample.weight_versions[sample.loss_mask == 1].tolist() == [1, 1]
    assert sample.metadata[ATTRIBUTES] == {"tool_call_count": 2}


def test_agents_that_write_to_args_run_and_share_a_reward() -> None:
    samples = generated("agents_for_test:generate_with_agents")
    first = [sample for sample in samples if sample.group_index == 0]
    assert len(first) == 3 and {sample.prompt.text for sample in first} == {"1+1=", "select: 1+1="}
    assert {sample.reward for sample in first} == {1.0}
    assert {sample.reward for sample in samples if sample.group_index == 1} == {0.0}
    assert all(sample.loss_mask.tolist() == [1] for sample in samples)


def test_a_reward_with_the_grader_of_dapo_runs() -> None:
    rewards = check_reward(load("reward.custom_path", "grade_for_test:reward_func"))
    assert rewards == [1.0] + [-1.0] * 7


def test_a_reward_reads_a_label_that_is_a_mapping() -> None:
    groups = example_groups()
    for group in groups:
        label = {"ground_truth": {"target": [group.samples[0].response]}, "aliases": []}
        group.prompt = replace(group.prompt, label=label)
        for sample in group.samples:
            sample.prompt = group.prompt
    rewards = check_reward(load("reward.custom_path", "qa_for_test:reward_func"), groups)
    expected = [float(s.response == g.samples[0].response) for g in groups for s in g.samples]
    assert rewards == expected and 0.0 < sum(rewards) < len(rewards)
