"""Calls a user function with a small made example and checks what it returns: the contract of each kind of function.

`rlscale-check-plugin` runs these checks in a child process, `rlscale.testing` in a test of the user.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutinefunction, signature
from types import MappingProxyType
from typing import Any

from rlscale.config import BatchConfig, RunConfig
from rlscale.config.user_functions import LOGITS
from rlscale.plugins.batch_conversion import BATCH_RULE, batch_problem
from rlscale.plugins.daemon_call import call_in_daemon, exit_fork
from rlscale.plugins.example_groups import example_batch, example_groups
from rlscale.plugins.example_session import ExampleRollout, ExampleSession, ExampleTokenizer
from rlscale.plugins.group_adapters import as_list
from rlscale.plugins.user_hook import is_finite, own_metrics, shown
from rlscale.trajectory import Trajectory
from rlscale.types import Group, Prompt, Sample, SampleStatus, TokenColumns, TrainBatch


class ContractError(Exception):
    """A user function does not do what its kind requires.

    Attributes:
        rule: completes "<key> must ...".
        found: what it did instead: a value that it returned, or with `says_why` a sentence.
    """

    def __init__(self, rule: str, found: str, *, says_why: bool = False) -> None:
        super().__init__(f"must {rule}: {found}" if says_why else f"must {rule}, got {found}")
        self.rule, self.found, self.says_why = rule, found, says_why


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """A kind of user function."""

    kind: str
    key: str  # that names the function
    call: str  # the arguments and the result, for people
    check: Callable[[Any], str]  # calls an adapted function; describes the result


def check_reward(reward: Callable[..., Any], groups: Sequence[Group] | None = None) -> list[Any]:
    """Calls a reward with each sample and returns the values.

    Raises:
        ContractError: a value is neither a finite number nor numbers by name.
    """
    return asyncio.run(_score(reward, [sample for group in groups or example_groups() for sample in group.samples]))


def check_group_reward(reward: Callable[..., Any], groups: Sequence[Group] | None = None) -> list[list[Any]]:
    """Calls a reward with the samples of each group and returns the values.

    Raises:
        ContractError: it returns no list with a value for each sample.
    """

    async def score() -> list[list[Any]]:
        values: list[list[Any]] = []
        pid = os.getpid()
        for group in groups or example_groups():
            found = reward(group.samples)
            exit_fork(pid)
            values.append(_checked_list(await found if isawaitable(found) else found, len(group.samples)))
        return values

    return asyncio.run(score())


def check_generate(generate: Callable[..., Any], groups: Sequence[Group] | None = None) -> list[Sample]:
    """Calls a generate function for the prompt of each group and returns the samples.

    Its requests are answered with the text "2"; no engine runs.

    Raises:
        ContractError: it sets no status, or makes no sample that can be trained on.
    """

    async def run() -> list[Sample]:
        samples: list[Sample] = []
        for group in groups or example_groups():
            trajectory = Trajectory(id=group.index, group_index=group.index, prompt=group.prompt, seed=0)
            try:
                if iscoroutinefunction(generate) or iscoroutinefunction(type(generate).__call__):
                    await generate(trajectory, ExampleSession())
                else:
                    await call_in_daemon(generate, trajectory, ExampleSession())
            except ValueError as error:
                raise ContractError("make samples that can be trained on", str(error), says_why=True) from error
            if trajectory.status == SampleStatus.pending:
                raise ContractError("set trajectory.status", "a pending trajectory; call add_generation")
            samples += trajectory.samples()
        return samples

    return asyncio.run(run())


def check_dynamic_filter(keep: Callable[..., Any], groups: Sequence[Group] | None = None) -> list[bool | str]:
    """Calls a filter with each group and returns its verdicts.

    Raises:
        ContractError: a verdict is neither a bool nor the reason to drop the group.
    """
    verdicts = [keep(group) for group in groups or example_groups()]
    for verdict in verdicts:
        if not isinstance(verdict, bool | str) or verdict == "":
            raise ContractError("return a bool, or a reason to drop the group", repr(verdict))
    return verdicts


def check_buffer_filter(choose: Callable[..., Any], groups: Sequence[Group] | None = None) -> list[int]:
    """Calls a buffer filter with all groups and returns the indices of those that it selects.

    Raises:
        ContractError: it selects too many groups, one twice, or one that is not in the buffer.
    """
    buffer = list(groups or example_groups())
    num_groups = max(1, len(buffer) - 1)
    found = choose(list(buffer), num_groups)
    known = {group.index for group in buffer}
    rule = f"return at most {num_groups} groups of the buffer, each once"
    if not isinstance(found, Sequence) or not all(isinstance(group, Group) for group in found):
        raise ContractError(rule, shown(found))
    chosen = [group.index for group in found]
    if len(chosen) > num_groups or len(set(chosen)) < len(chosen) or not known.issuperset(chosen):
        raise ContractError(rule, f"groups {chosen}")
    return chosen


def check_sample_filter(mask: Callable[..., Any], groups: Sequence[Group] | None = None) -> int:
    """Calls a sample filter and returns the number of samples that it masks.

    Raises:
        ContractError: it changed anything but loss masks and metadata, or set a mask to another length.
    """
    changed = list(groups or example_groups())
    before = copy.deepcopy(changed)
    mask(changed)
    numbers = [len(_samples(each)) for each in (before, changed)]
    if numbers[0] != numbers[1]:
        raise ContractError("keep all samples, and set the loss masks of some to 0", f"{numbers[1]} of {numbers[0]}")
    for old, new in zip(_samples(before), _samples(changed), strict=True):
        same = list(old.tokens) == list(new.tokens) and old.reward == new.reward
        if not same or len(old.loss_mask) != len(new.loss_mask):
            raise ContractError("change loss masks only, and keep their length", f"other changes of sample {new.index}")
    return sum(not any(sample.loss_mask) for sample in _samples(changed))


def check_all_samples_hook(process: Callable[..., Any], groups: Sequence[Group] | None = None) -> None:
    """Calls the hook with all groups; it may only read them."""
    process(list(groups or example_groups()))


def check_reward_post_process(process: Callable[..., Any], groups: Sequence[Group] | None = None) -> list[float]:
    """Calls the function and returns the rewards for advantages.

    Raises:
        ContractError: it does not return a finite number for each sample.
    """
    given = list(groups or example_groups())
    values = _checked_list(process(given), len(_samples(given)))
    if wrong := [value for value in values if isinstance(value, Mapping)]:
        raise ContractError("return a number for each sample", repr(wrong[0]))
    return values


def check_batch_conversion(convert: Callable[..., Any], groups: Sequence[Group] | None = None) -> TrainBatch:
    """Calls a conversion with the batch of all groups and returns its batch.

    Raises:
        ContractError: a row is missing, or its columns do not fit each other.
    """
    given = list(groups or example_groups())
    before = example_batch(given)
    after = convert(given, before)
    if found := batch_problem(before, after):
        raise ContractError(BATCH_RULE, found)
    return after  # type: ignore[no-any-return]


def check_data_source(make: Callable[..., Any], config: RunConfig | None = None, num_prompts: int = 2) -> list[Prompt]:
    """Creates the source twice, restores a position of the first in the second, and returns the first prompts.

    Raises:
        ContractError: it returns other prompts than asked for, its position is no JSON value, or is not restored.
    """
    given = config or RunConfig(batch=BatchConfig(rollout_batch_size=num_prompts, n_samples_per_prompt=1))
    first, second = make(given, ExampleTokenizer()), make(given, ExampleTokenizer())
    if not hasattr(first, "take"):
        raise ContractError("return a source of prompts, with a method take", shown(first))
    prompts = _checked_prompts(first, num_prompts)
    state = first.state_dict()
    try:
        is_json = isinstance(state, dict) and json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise ContractError("return a dict of JSON values from state_dict()", shown(state))
    following = _checked_prompts(first, num_prompts)
    second.load_state_dict(state)
    restored = _checked_prompts(second, num_prompts)
    if restored != following:
        rule = f"continue at its position with {[prompt.text for prompt in following]}"
        raise ContractError(rule, str([prompt.text for prompt in restored]))
    return prompts


def check_rollout(rollout: Callable[..., Any], num_groups: int = 2) -> list[Group]:
    """Calls a rollout function with made prompts and returns its groups.

    Raises:
        ContractError: it returns other groups than it drew, or a sample without a reward.
    """
    context = ExampleRollout(example_groups(20 * num_groups), num_groups)
    found = asyncio.run(call_in_daemon(rollout, 0, context))
    rule = f"return {num_groups} groups that it drew, each once"
    if not isinstance(found, list | tuple) or not all(isinstance(group, Group) for group in found):
        raise ContractError(rule, shown(found))
    indices = [group.index for group in found]
    if len(found) != num_groups or len(set(indices)) < num_groups or not set(indices) <= set(context.drawn):
        raise ContractError(rule, f"groups {indices}")
    for sample in _samples(found):
        if sample.reward is None or not is_finite(sample.reward):
            raise ContractError("grade every sample with a finite number", f"{sample.reward} of sample {sample.index}")
    return list(found)


def check_evaluation(evaluate: Callable[..., Any]) -> dict[str, list[float]]:
    """Calls an eval function and returns the rewards of each set.

    Raises:
        ContractError: it returns no sets with finite rewards.
    """
    found = asyncio.run(call_in_daemon(evaluate, 0, ExampleRollout([], 0)))
    is_right = isinstance(found, Mapping) and bool(found)
    if not is_right or not all(len(each) and all(map(is_finite, each)) for each in found.values()):
        raise ContractError("return rewards by the name of their set", shown(found))
    return {str(name): list(each) for name, each in found.items()}


def check_rollout_log(log: Callable[..., Any], groups: Sequence[Group] | None = None) -> dict[str, float]:
    """Calls the log function and returns the metrics that a run would log.

    Raises:
        ContractError: it returns something else than a bool or None, or a metric is no finite number.
    """
    return _checked_log(partial(log, 0, list(groups or example_groups())), {"reward/mean": 0.5, "time/rollout_s": 1.5})


def check_eval_log(log: Callable[..., Any], groups: Sequence[Group] | None = None) -> dict[str, float]:
    """Calls the log function of evaluations and returns the metrics that a run would log. See `check_rollout_log`."""
    return _checked_log(
        partial(log, 0, {"example": list(groups or example_groups())}), {"eval/example/reward_mean": 0.5}
    )


async def _score(reward: Callable[..., Any], samples: Sequence[Sample]) -> list[Any]:
    found: list[Any] = []
    pid = os.getpid()
    for sample in samples:
        found.append(reward(sample))
        exit_fork(pid)
    values = [await each if isawaitable(each) else each for each in found]
    return [_checked_value(value) for value in values]


def _checked_prompts(source: Any, number: int) -> list[Prompt]:
    prompts = source.take(number)
    is_list = isinstance(prompts, list | tuple)
    if not is_list or len(prompts) != number or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise ContractError(f"return {number} prompts", shown(prompts))
    if empty := [prompt.index for prompt in prompts if not prompt.token_ids]:
        raise ContractError("return prompts of at least one token", f"none in prompt {empty[0]}")
    return list(prompts)


def _checked_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        if not any(is_finite(each) for each in value.values()):
            raise ContractError("return a finite number, or numbers by name", repr(dict(value))[:80])
        return {str(name): each for name, each in value.items()}
    if not is_finite(value):
        raise ContractError("return a finite number, or numbers by name", shown(value))
    return float(value)


def _checked_list(values: Any, count: int) -> list[Any]:
    rule = f"return a list of {count} numbers, one for each sample"
    if isinstance(values, str | Mapping) or not (hasattr(values, "tolist") or isinstance(values, Sequence)):
        raise ContractError(rule, type(values).__name__)
    found = as_list(values)
    if len(found) != count:
        raise ContractError(rule, str(len(found)))
    return [_checked_value(value) for value in found]


def _checked_log(log: Callable[[dict[str, float]], Any], builtin: dict[str, float]) -> dict[str, float]:
    metrics = dict(builtin)
    replaces = log(metrics)
    if not isinstance(replaces, bool | None):
        raise ContractError("return true, false or nothing", shown(replaces))
    for name, value in metrics.items():
        if not is_finite(value):
            raise ContractError("set finite numbers as metrics", f"{shown(value)} for {name}")
    return own_metrics(builtin, metrics) if replaces else metrics


def check_loss(loss: Callable[..., Any]) -> tuple[Any, dict[str, tuple[float, float]]]:
    """Calls a loss with six tokens of two samples, the last one masked; returns the loss at each and the metrics.

    Raises:
        ContractError: it returns no finite loss with a gradient at each token, or no metrics.
    """
    import torch  # takes seconds; the other contracts need none

    logits = torch.linspace(-1.0, 1.0, 30).reshape(6, 5).sin().requires_grad_()
    table = logits.log_softmax(-1)
    logprobs = table[torch.arange(6), torch.arange(6) % 5]
    fixed = logprobs.detach()
    tokens = TokenColumns(
        mask=torch.arange(6) < 5,
        sample_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_samples=2,
        old_logprobs=fixed - 0.1,
        rollout_logprobs=fixed - 0.1,
        ref_logprobs=fixed + 0.1,
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        entropy=-(table.exp() * table).sum(-1),
    )
    given = {LOGITS: logits} if LOGITS in signature(loss).parameters else {}
    found = loss(logprobs, tokens, **given)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise ContractError("return (the loss at each token, {metric: (sum, count)})", shown(found))
    losses, metrics = found
    if not isinstance(losses, torch.Tensor) or losses.shape != logprobs.shape:
        raise ContractError("return a tensor with the loss at each of the 6 tokens", shown(losses))
    if not losses.requires_grad or not losses[tokens.mask].isfinite().all():
        raise ContractError("return finite losses that depend on logprobs", shown(losses))
    sums: dict[str, tuple[float, float]] = {}
    for name, pair in metrics.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ContractError("return metrics as (sum, count)", f"{shown(pair)} for {name}")
        values = [part.item() if isinstance(part, torch.Tensor) and part.numel() == 1 else part for part in pair]
        if not all(is_finite(value) for value in values):
            raise ContractError("return metrics of single finite numbers", f"{shown(pair)} for {name}")
        sums[str(name)] = (float(values[0]), float(values[1]))
    return losses, sums


def _describe_loss(loss: Callable[..., Any]) -> str:
    losses, metrics = check_loss(loss)
    return f"losses {[round(value, 4) for value in losses.tolist()]}, metrics {metrics}"


def _describe_all_samples(process: Callable[..., Any]) -> str:
    check_all_samples_hook(process)
    return "without an error; the result is not used"


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        contract.kind: contract
        for contract in (
            Contract(
                kind="loss",
                key="algo.custom_loss_function_path",
                call="(logprobs, tokens), maybe with logits -> the loss at each token and {metric: (sum, count)}",
                check=_describe_loss,
            ),
            Contract(
                kind="data_source",
                key="data.data_source_path",
                call="(config, tokenizer) or (args) -> a source of prompts",
                check=lambda function: f"prompts {[prompt.text for prompt in check_data_source(function)]}",
            ),
            Contract(
                kind="reward",
                key="reward.custom_path",
                call="(sample) or (args, sample, **kwargs), plain or async -> a number, or numbers by name",
                check=lambda function: f"rewards {check_reward(function)}",
            ),
            Contract(
                kind="group_reward",
                key="reward.custom_path",
                call="(samples) or (args, samples, **kwargs), plain or async -> a list of numbers",
                check=lambda function: f"rewards of each group {check_group_reward(function)}",
            ),
            Contract(
                kind="generate",
                key="sampling.custom_generate_function_path",
                call="(trajectory, session) or (args, sample, sampling_params) -> a sample or a list; plain or async",
                check=lambda function: f"responses {[sample.response for sample in check_generate(function)]}",
            ),
            Contract(
                kind="dynamic_filter",
                key="sampling.dynamic_filter_path",
                call="(group) or (args, samples, **kwargs) -> a bool, a reason, or an object with keep and reason",
                check=lambda function: f"verdicts {check_dynamic_filter(function)}",
            ),
            Contract(
                kind="buffer_filter",
                key="sampling.buffer_filter_path",
                call="(buffer, num_groups) or (args, rollout_id, buffer, num_samples) -> groups of the buffer",
                check=lambda function: f"indices of the groups {check_buffer_filter(function)}",
            ),
            Contract(
                kind="reward_post_process",
                key="reward.post_process_path",
                call="(groups) -> a number for each sample, or (args, samples) -> (raw_rewards, rewards)",
                check=lambda function: f"rewards for advantages {check_reward_post_process(function)}",
            ),
            Contract(
                kind="rollout",
                key="rollout.function_path",
                call="(rollout_id, context) -> groups, or (args, rollout_id, data_source, evaluation=False)",
                check=lambda function: f"groups {[group.index for group in check_rollout(function)]}",
            ),
            Contract(
                kind="eval",
                key="eval.function_path",
                call="(rollout_id, context) -> rewards by set, or (args, rollout_id, data_source, evaluation=True)",
                check=lambda function: f"rewards {check_evaluation(function)}",
            ),
            Contract(
                kind="sample_filter",
                key="sampling.sample_filter_path",
                call="(groups) sets loss masks, or (args, samples), lists of a group each, sets remove_sample",
                check=lambda function: f"number of masked samples {check_sample_filter(function)}",
            ),
            Contract(
                kind="all_samples",
                key="sampling.all_samples_process_path",
                call="(groups) or (args, samples, data_source)",
                check=_describe_all_samples,
            ),
            Contract(
                kind="batch_conversion",
                key="train.convert_samples_path",
                call="(groups, batch) -> a batch, or (args, samples) -> a dict of lists",
                check=lambda function: f"a batch of {check_batch_conversion(function).num_samples} samples",
            ),
            Contract(
                kind="eval_log",
                key="eval.custom_log_function_path",
                call="(rollout_id, groups, metrics) or (rollout_id, args, data, extra_metrics)"
                " -> true to replace the built-in metrics",
                check=lambda function: f"metrics {check_eval_log(function)}",
            ),
            Contract(
                kind="rollout_log",
                key="sampling.custom_rollout_log_function_path",
                call="(rollout_id, groups, metrics) or (rollout_id, args, samples, rollout_extra_metrics, rollout_time)"
                " -> true to replace the built-in metrics",
                check=lambda function: f"metrics {check_rollout_log(function)}",
            ),
        )
    }
)
"""The contracts by `--kind`."""
