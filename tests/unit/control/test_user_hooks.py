"""User functions in the loop: what each of them changes."""

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import BatchConfig, RunConfig, SamplingConfig
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.data.source import UserSource
from rlscale.errors import HookError
from rlscale.plugins.args_view import Args
from rlscale.plugins.load_plugin import adapt_function
from rlscale.plugins.slime_requests import post
from rlscale.plugins.user_hook import UserHook
from rlscale.rollout.group_filters import GroupFilters
from rlscale.rollout.user_generate import ThreadSession, UserGenerate
from rlscale.trajectory import Trajectory
from rlscale.types import Group, Prompt
from tests.unit.control.simulation import NUM_PROMPTS, NUM_SAMPLES, Prompts, simulation
from tests.unit.control.test_sampling import outcomes

KEEP = "sampling.dynamic_filter_path"


def document(key: str, function: Callable[..., Any], **sampling: Any) -> Callable[..., Any]:
    """A function in slime's form with the arguments of rlscale."""
    batch = BatchConfig(rollout_batch_size=NUM_PROMPTS, n_samples_per_prompt=NUM_SAMPLES)
    args = Args(RunConfig(batch=batch, sampling=SamplingConfig(**sampling)))
    return adapt_function(key, function, args=args, custom={})


def user_generate(function: Callable[..., Any], *, timeout_s: float = 30.0, **sampling: Any) -> UserGenerate:
    adapted = document("sampling.custom_generate_function_path", function, **sampling)
    return UserGenerate(adapted, timeout_s=timeout_s)


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two requests, one after the other, with two tokens of a tool in between."""
    prompt = list(map(int, [1, sample.prompt]))
    sample.tokens = list(prompt)
    for number in range(2):
        payload = {"input_ids": sample.tokens[:2], "sampling_params": sampling_params}
        output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], meta_info=output["meta_info"]
        )
        if not number:
            sample.append_response_tokens(args, tokens=[77, 78], trainable=False)
    return sample


async def test_a_generate_function_in_slimes_form_makes_the_samples_that_are_trained(tmp_path: Path) -> None:
    with simulation(tmp_path, num_rollouts=3, generate=user_generate(two_turns)) as run:
        await run.loop.run()
    assert run.trained_groups == list(range(3 * NUM_PROMPTS))
    for version, each in enumerate(run.trainers.history):
        assert each.masks == [[1, 1, 1, 0, 0, 1, 1, 1]] * NUM_PROMPTS * NUM_SAMPLES
        assert each.versions == [[version] * 8] * NUM_PROMPTS * NUM_SAMPLES
    assert set(outcomes(run.pages).values()) == {"trained"}


async def test_a_plain_function_that_blocks_delays_no_other_one(tmp_path: Path) -> None:
    all_calls = threading.Barrier(NUM_PROMPTS * NUM_SAMPLES, timeout=60)

    def blocking(args: Any, sample: Any, sampling_params: Any) -> Any:
        all_calls.wait()  # returns once every call has come here
        return asyncio.run(two_turns(args, sample, sampling_params))

    with simulation(tmp_path, num_rollouts=1, generate=user_generate(blocking)) as run:
        await run.loop.run()
    assert len(run.trained_groups) == NUM_PROMPTS


async def sleep_for_ever(args: Any, sample: Any, sampling_params: Any) -> Any:
    if sample.index == 0:
        await asyncio.sleep(1000)
    return await two_turns(args, sample, sampling_params)


def exit_program(args: Any, sample: Any, sampling_params: Any) -> Any:
    if sample.index == 0:
        sys.exit(3)
    return asyncio.run(two_turns(args, sample, sampling_params))


async def return_nothing(args: Any, sample: Any, sampling_params: Any) -> Any:
    return None if sample.index == 0 else await two_turns(args, sample, sampling_params)


async def interrupt(args: Any, sample: Any, sampling_params: Any) -> Any:
    if sample.index == 0:
        raise KeyboardInterrupt
    return await two_turns(args, sample, sampling_params)


async def exit_in_a_task(args: Any, sample: Any, sampling_params: Any) -> Any:
    async def leave() -> None:
        sys.exit(3)

    if sample.index == 0:
        await asyncio.create_task(leave())
    return await two_turns(args, sample, sampling_params)


async def stop_the_loop(args: Any, sample: Any, sampling_params: Any) -> Any:
    if sample.index == 0:
        asyncio.get_running_loop().stop()
        raise ValueError("stopped")
    return await two_turns(args, sample, sampling_params)


async def set_a_huge_reward(args: Any, sample: Any, sampling_params: Any) -> Any:
    found = await two_turns(args, sample, sampling_params)
    found.reward = 10**400 if sample.index == 0 else 1.0
    return found


async def set_a_huge_reward_directly(trajectory: Trajectory, session: ThreadSession) -> None:
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    trajectory.reward = 10**400 if trajectory.id == 0 else 1.0


@pytest.mark.parametrize(
    "function",
    [
        sleep_for_ever,
        exit_program,
        interrupt,
        exit_in_a_task,
        stop_the_loop,
        return_nothing,
        set_a_huge_reward,
        set_a_huge_reward_directly,
    ],
)
@pytest.mark.slow
async def test_a_call_that_fails_is_a_failure_of_its_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]
) -> None:
    monkeypatch.setattr("rlscale.rollout.group_generator.BACKOFF_S", 0.0)
    sampling = SamplingConfig(min_group_size=1, max_retries=1)
    generate = user_generate(function, timeout_s=0.5)
    with simulation(tmp_path, num_rollouts=2, sampling=sampling, generate=generate) as run:
        await run.loop.run()
    found = outcomes(run.pages)
    assert {index: outcome for index, outcome in found.items() if outcome != "trained"} == {0: "failed/controller"}
    assert run.trained_groups == list(range(2 * NUM_PROMPTS))


@pytest.mark.slow
async def test_a_call_that_blocks_the_event_loop_of_others_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlscale.rollout.group_generator.BACKOFF_S", 0.0)
    monkeypatch.setattr("rlscale.rollout.loop_thread.RESPONSE_S", 0.2)
    released, calls = threading.Event(), list[int]()

    async def block(args: Any, sample: Any, sampling_params: Any) -> Any:
        calls.append(sample.index)
        if sample.index == 2:
            released.wait()
        return await two_turns(args, sample, sampling_params)

    sampling = SamplingConfig(min_group_size=1, max_retries=1)
    generate = user_generate(block, timeout_s=0.5)
    try:
        with simulation(tmp_path, num_rollouts=1, sampling=sampling, generate=generate) as run:
            await run.loop.run()
    finally:
        released.set()
    found = outcomes(run.pages)
    assert {index: outcome for index, outcome in found.items() if outcome != "trained"} == {2: "failed/controller"}
    # The others started again, which is no retry of theirs; its second attempt had a separate event loop.
    assert calls.count(2) == 2


async def test_a_dynamic_filter_in_slimes_form_drops_groups(tmp_path: Path) -> None:
    def second(args: Any, samples: list[Any], **kwargs: Any) -> bool:
        return samples[0].group_index % 2 == 1

    filters = GroupFilters(dynamic=document("sampling.dynamic_filter_path", second))
    with simulation(tmp_path, num_rollouts=2, filters=filters) as run:
        await run.loop.run()
    assert run.trained_groups == [2 * i + 1 for i in range(2 * NUM_PROMPTS)]
    assert set(outcomes(run.pages).values()) == {"trained", "dropped/second"}


async def test_a_buffer_filter_in_slimes_form_selects_groups(tmp_path: Path) -> None:
    def odd(args: Any, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
        return [samples for samples in buffer if samples[0].group_index % 2][:num_samples]

    filters = GroupFilters(buffer=document("sampling.buffer_filter_path", odd))
    sampling = SamplingConfig(partial_rollout=True, over_sampling_batch_size=3 * NUM_PROMPTS, max_weight_versions=9)
    with simulation(tmp_path, num_rollouts=3, filters=filters, sampling=sampling) as run:
        await run.loop.run()
    # Groups 3 to 8 wait in the buffer after the first rollout.
    assert run.trained_groups[: 2 * NUM_PROMPTS] == [0, 1, 2, 3, 5, 7]
    assert not {4, 6, 8} & set(run.trained_groups)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_buffer_filter_runs_outside_of_the_event_loop(tmp_path: Path, staleness: int) -> None:
    main, loop, threads = threading.current_thread(), asyncio.get_running_loop(), []

    def first(buffer: list[Group], number: int) -> list[Group]:
        # Returns only if the event loop still runs: the wait fails after the deadline of the hook otherwise.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        threads.append(threading.current_thread())
        return buffer[:number]

    function = UserHook(key="sampling.buffer_filter_path", function=first, timeout_s=30.0)
    filters = GroupFilters(buffer=function)
    sampling = SamplingConfig(partial_rollout=True, over_sampling_batch_size=3 * NUM_PROMPTS, max_weight_versions=9)
    with simulation(tmp_path, num_rollouts=3, filters=filters, sampling=sampling, staleness=staleness) as run:
        await run.loop.run()
    assert threads and main not in threads
    assert len(run.trained_groups) == len(set(run.trained_groups)) == 3 * NUM_PROMPTS


async def test_a_buffer_filter_that_never_returns_ends_the_run(tmp_path: Path) -> None:
    function = UserHook(key="sampling.buffer_filter_path", function=wait_for_ever, timeout_s=0.2)
    sampling = SamplingConfig(partial_rollout=True, over_sampling_batch_size=3 * NUM_PROMPTS, max_weight_versions=9)
    with simulation(tmp_path, num_rollouts=3, filters=GroupFilters(buffer=function), sampling=sampling) as run:
        with pytest.RaisesGroup(pytest.RaisesExc(HookError), flatten_subgroups=True) as caught:
            await run.loop.run()
        # The first rollout has no buffer; the second one waits for the filter.
        assert run.trained_groups == list(range(NUM_PROMPTS))
    assert caught.group_contains(HookError, match=r"sampling\.buffer_filter_path must return within")


def hook(key: str, function: Callable[..., Any], *, timeout_s: float = 30.0) -> UserHook:
    return UserHook(key=key, function=document(key, function), timeout_s=timeout_s)


def remove_first(args: Any, data: list[list[Any]]) -> None:
    for samples in data:
        samples[0].remove_sample = True


def by_index(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    return [sample.reward for sample in samples], [sample.index / 4 for sample in samples]


def mask_second_token(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {
        "tokens": [[*sample.tokens[:-1], 99] for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [3.0 for _ in samples],
        "loss_masks": [[1, 0, 1] for _ in samples],
        "sample_indices": [sample.index for sample in samples],
    }


async def test_a_sample_filter_removes_samples_from_the_loss_and_not_from_the_batch(tmp_path: Path) -> None:
    hooks = RolloutHooks(sample_filter=hook("sampling.sample_filter_path", remove_first))
    with simulation(tmp_path, num_rollouts=2, hooks=hooks) as run:
        await run.loop.run()
    assert all(each.masks == [[0, 0, 0], [1, 1, 1]] * NUM_PROMPTS for each in run.trainers.history)
    assert set(outcomes(run.pages).values()) == {"trained"}


async def test_post_processed_rewards_are_trained_and_the_metrics_keep_the_graded_ones(tmp_path: Path) -> None:
    hooks = RolloutHooks(post_process=hook("reward.post_process_path", by_index))
    with simulation(tmp_path, num_rollouts=1, hooks=hooks) as run:
        await run.loop.run()
    assert run.trainers.history[0].rewards == [i / 4 for i in range(NUM_PROMPTS * NUM_SAMPLES)]
    assert run.sink.logged[0]["reward/mean"] == 1.0


async def test_a_conversion_replaces_columns_of_the_batch(tmp_path: Path) -> None:
    hooks = RolloutHooks(convert=hook("train.convert_samples_path", mask_second_token))
    with simulation(tmp_path, num_rollouts=1, hooks=hooks) as run:
        await run.loop.run()
    assert run.trainers.history[0].rewards == [3.0] * NUM_PROMPTS * NUM_SAMPLES
    assert run.trainers.history[0].masks == [[1, 0, 1]] * NUM_PROMPTS * NUM_SAMPLES


async def test_the_hook_of_all_samples_gets_dropped_groups_too(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def record(args: Any, all_samples: list[list[Any]], data_source: Any) -> None:
        seen.append([samples[0].group_index for samples in all_samples])

    values: dict[str, Any] = {
        "hooks": RolloutHooks(all_samples=hook("sampling.all_samples_process_path", record)),
        "filters": GroupFilters(dynamic=lambda group: group.index % 2 == 1 or "even"),
        "sampling": SamplingConfig(all_samples_process_path="a:b"),
    }
    with simulation(tmp_path, num_rollouts=2, **values) as run:
        await run.loop.run()
    assert [index for each in seen for index in each if index % 2] == run.trained_groups
    assert {index for each in seen for index in each} >= set(range(2 * 2 * NUM_PROMPTS))


async def test_a_log_function_changes_or_replaces_the_metrics_of_a_rollout(tmp_path: Path) -> None:
    def log(rollout_id: int, args: Any, samples: list[Any], extra: dict[str, float], seconds: float) -> bool:
        extra["mine/samples"] = len(samples)
        return rollout_id == 1

    hooks = RolloutHooks(rollout_log=hook("sampling.custom_rollout_log_function_path", log))
    with simulation(tmp_path, num_rollouts=2, hooks=hooks) as run:
        await run.loop.run()
    assert run.sink.logged[0]["mine/samples"] == NUM_PROMPTS * NUM_SAMPLES and "reward/mean" in run.sink.logged[0]
    assert "reward/mean" not in run.sink.logged[1] and "train/loss" in run.sink.logged[1]
    assert run.sink.logged[1]["mine/samples"] == NUM_PROMPTS * NUM_SAMPLES


async def test_a_log_function_of_evaluations_changes_or_replaces_their_metrics(tmp_path: Path) -> None:
    def log(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, float]) -> bool:
        extra["mine/rewards"] = len(data["held_out"]["rewards"])
        return rollout_id == 2

    hooks = RolloutHooks(eval_log=hook("eval.custom_log_function_path", log))
    with simulation(tmp_path, num_rollouts=2, eval_interval=1, eval_prompts=5, hooks=hooks) as run:
        await run.loop.run()
    first, last = run.sink.logged[0], run.sink.logged[1]
    assert first["mine/rewards"] == 5 and "eval/held_out/reward_mean" in first
    assert last["eval/reward_mean"] == 1.0 and "eval/held_out/reward_mean" not in last and last["mine/rewards"] == 5


def broken(*arguments: Any) -> bool:
    raise KeyError("lost")


def set_a_huge_metric(rollout_id: int, groups: Any, metrics: dict[str, Any]) -> None:
    metrics["mine/huge"] = 10**400


@pytest.mark.parametrize("function", [broken, set_a_huge_metric])
async def test_a_log_function_that_fails_is_a_warning(tmp_path: Path, function: Callable[..., Any]) -> None:
    hooks = RolloutHooks(
        rollout_log=UserHook(key="sampling.custom_rollout_log_function_path", function=function, timeout_s=9.0)
    )
    with simulation(tmp_path, num_rollouts=1, hooks=hooks) as run:
        await run.loop.run()
    assert run.sink.logged[0]["reward/mean"] == 1.0


def wait_for_ever(*arguments: Any) -> None:
    threading.Event().wait()


KEYS = {
    "sample_filter": "sampling.sample_filter_path",
    "all_samples": "sampling.all_samples_process_path",
    "post_process": "reward.post_process_path",
    "convert": "train.convert_samples_path",
}


@pytest.mark.parametrize(
    ("field", "function", "message"),
    [
        ("sample_filter", lambda args, data: sys.exit(3), "sampling.sample_filter_path failed .*SystemExit: 3"),
        ("all_samples", wait_for_ever, "sampling.all_samples_process_path must return within sampling.hook_timeout_s"),
        ("post_process", lambda args, samples: ([], [1.0]), "reward.post_process_path must return 6 finite numbers"),
        ("post_process", lambda args, samples: ([], [10**400] * 6), "must return 6 finite numbers"),
        ("convert", lambda args, samples: {"tokens": [[1]]}, "train.convert_samples_path .*must have 6 entries, got 1"),
        ("convert", lambda args, samples: {"rewards": [float("nan")] * 6}, "got a reward that is no finite number"),
    ],
)
async def test_a_hook_that_fails_ends_the_run_with_its_key(
    tmp_path: Path, field: str, function: Callable[..., Any], message: str
) -> None:
    hooks = RolloutHooks(**{field: hook(KEYS[field], function, timeout_s=0.3)})
    with simulation(tmp_path, num_rollouts=1, hooks=hooks) as run, pytest.raises(BaseExceptionGroup) as caught:
        await run.loop.run()
    found = caught.value.subgroup(HookError)
    assert found is not None and re.search(message, str(found.exceptions[0])), found


async def test_a_filter_runs_outside_of_the_event_loop_and_within_a_deadline(tmp_path: Path) -> None:
    threads = set[int]()

    def keep(args: Any, samples: list[Any], **kwargs: Any) -> bool:
        threads.add(threading.get_ident())
        return True

    with simulation(tmp_path, num_rollouts=1, filters=GroupFilters(dynamic=hook(KEEP, keep))) as run:
        await run.loop.run()
    assert threads and threading.get_ident() not in threads and run.trained_groups == list(range(NUM_PROMPTS))
    slow = GroupFilters(dynamic=hook(KEEP, wait_for_ever, timeout_s=0.2))
    with (
        simulation(tmp_path / "slow", num_rollouts=1, filters=slow) as run,
        pytest.raises(BaseExceptionGroup) as caught,
    ):
        await run.loop.run()
    assert caught.value.subgroup(HookError) is not None


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (GroupFilters(dynamic=lambda group: 10**400), "dynamic_filter_path must return a bool or the reason"),
        (GroupFilters(dynamic=lambda group: 10**5000), "got a value of type int without a text"),
        (GroupFilters(buffer=lambda buffer, number: 10**400), "buffer_filter_path must return groups of the buffer"),
        (GroupFilters(buffer=lambda buffer, number: buffer * 2), "each once"),
    ],
)
async def test_a_filter_that_returns_something_else_ends_the_run(
    tmp_path: Path, filters: GroupFilters, message: str
) -> None:
    sampling = SamplingConfig(partial_rollout=True, over_sampling_batch_size=3 * NUM_PROMPTS, max_weight_versions=9)
    with (
        simulation(tmp_path, num_rollouts=3, filters=filters, sampling=sampling) as run,
        pytest.RaisesGroup(pytest.RaisesExc(HookError), flatten_subgroups=True) as caught,
    ):
        await run.loop.run()
    assert caught.group_contains(HookError, match=message)


class Stuck:
    """A source of prompts whose second call never returns."""

    def __init__(self) -> None:
        self._prompts, self._num_calls = Prompts(), 0

    def __len__(self) -> int:
        return 8

    def take(self, num_prompts: int) -> list[Prompt]:
        self._num_calls += 1
        if self._num_calls > 1:
            wait_for_ever()
        return self._prompts.take(num_prompts)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


async def test_a_data_source_that_never_returns_ends_the_run(tmp_path: Path) -> None:
    prompts, sampling = UserSource(Stuck(), path="a:b"), SamplingConfig(hook_timeout_s=0.2)
    with (
        simulation(tmp_path, num_rollouts=2, prompts=prompts, sampling=sampling) as run,
        pytest.RaisesGroup(pytest.RaisesExc(HookError), flatten_subgroups=True) as caught,
    ):
        await run.loop.run()
    assert caught.group_contains(HookError, match=r"data\.data_source_path must return within sampling\.hook_timeout_s")
    assert run.trained_groups == list(range(NUM_PROMPTS))


@pytest.mark.parametrize("name", ["dynamic", "buffer", "log", "eval_log", *KEYS])
async def test_a_cancelled_run_waits_for_no_function(tmp_path: Path, name: str) -> None:
    """Ctrl-C cancels the run; a function of any kind that never returns must not delay its end."""
    called, values = threading.Event(), dict[str, Any]()

    def hang(*arguments: Any) -> None:
        called.set()
        wait_for_ever()

    function = UserHook(key="a.b", function=hang, timeout_s=3600.0)
    if name in ("dynamic", "buffer"):
        values["filters"] = GroupFilters(**{name: function})
    else:
        field = {"log": "rollout_log", "eval_log": "eval_log"}.get(name, name)
        values |= {"hooks": RolloutHooks(**{field: function}), "eval_interval": 1, "eval_prompts": 2}
    values["sampling"] = SamplingConfig(
        partial_rollout=True, over_sampling_batch_size=3 * NUM_PROMPTS, max_weight_versions=9
    )
    with simulation(tmp_path, num_rollouts=3, **values) as run:
        running = asyncio.create_task(run.loop.run())
        while not called.is_set():
            await asyncio.sleep(0.001)
        running.cancel()
        # The test's time limit is the deadline: the function never returns.
        with pytest.raises(asyncio.CancelledError):
            await running
