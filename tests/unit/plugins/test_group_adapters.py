from functools import partial
from typing import Any

import numpy as np
import pytest

from rlscale.plugins.args_view import Args
from rlscale.plugins.group_adapters import (
    DocumentAllSamplesHook,
    DocumentBufferFilter,
    DocumentDynamicFilter,
    DocumentEvalLog,
    DocumentRewardPostProcess,
    DocumentRolloutLog,
    DocumentSampleFilter,
)
from tests.unit.config.rules.valid_config import config_with
from tests.unit.plugins.document_cases import make_group

ARGS = Args(config_with({"custom": {"limit": 0.5}}))


class Verdict:
    def __init__(self, keep: bool, reason: str | None = None) -> None:
        self.keep, self.reason = keep, reason


def spread(args: Any, samples: list[Any], **kwargs: Any) -> Any:
    rewards = [sample.get_reward_value(args) for sample in samples]
    return np.std(rewards) > 0


def verdict(args: Any, samples: list[Any], **kwargs: Any) -> Any:
    good = samples[0].reward > args.limit
    return Verdict(good, None if good else "low")


def nothing(args: Any, samples: list[Any]) -> Any:
    return None


def test_a_dynamic_filter_returns_a_bool_or_an_object_with_a_reason() -> None:
    keep = DocumentDynamicFilter(spread, ARGS)
    assert keep(make_group(0.0, 1.0)) is True
    assert keep(make_group(1.0, 1.0)) == "spread"
    judge = DocumentDynamicFilter(verdict, ARGS)
    assert judge(make_group(1.0)) is True
    assert judge(make_group(0.0)) == "low"
    assert DocumentDynamicFilter(partial(spread, extra=1), ARGS)(make_group(1.0, 1.0)) == "spread"


def test_a_dynamic_filter_that_returns_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="nothing must return a bool or an object with `keep`, got None"):
        DocumentDynamicFilter(nothing, ARGS)(make_group(1.0))


def test_a_group_with_several_samples_of_a_trajectory_is_nested() -> None:
    group = make_group(0.0, 1.0, 1.0)
    group.samples[1].index = group.samples[0].index
    seen: list[Any] = []

    def record(args: Any, samples: Any, **kwargs: Any) -> bool:
        seen.append([[sample.reward for sample in part] for part in samples])
        return True

    DocumentDynamicFilter(record, ARGS)(group)
    assert seen == [[[0.0, 1.0], [1.0]]]


def test_a_buffer_filter_selects_groups_and_may_pop_them() -> None:
    buffer = [make_group(0.0, index=i) for i in range(3)]
    buffer[1].samples.clear()  # not started
    seen: list[Any] = []

    def pop_last(args: Any, rollout_id: Any, buffer: Any, num_samples: int) -> Any:
        seen.extend((rollout_id, [sample.status.value for sample in samples]) for samples in buffer)
        chosen = buffer[-num_samples:]
        del buffer[-num_samples:]
        return chosen

    assert DocumentBufferFilter(pop_last, ARGS)(buffer, 2) == buffer[1:]
    assert seen == [(None, ["completed"]), (None, ["pending"] * ARGS.n_samples_per_prompt), (None, ["completed"])]
    with pytest.raises(ValueError, match="must return groups of the buffer, got "):
        DocumentBufferFilter(lambda *given: [[1]], ARGS)(buffer, 2)


def test_a_sample_filter_masks_samples() -> None:
    groups = [make_group(0.0, 1.0, index=i) for i in range(2)]

    def remove_wrong(args: Any, data: list[list[Any]]) -> None:
        for samples in data:
            for sample in samples:
                sample.remove_sample = sample.reward < args.limit
        data.clear()  # the list is a copy

    DocumentSampleFilter(remove_wrong, ARGS)(groups)
    assert [[list(sample.loss_mask) for sample in group.samples] for group in groups] == [[[0, 0], [1, 1]]] * 2


def test_the_hook_of_all_samples_gets_every_group() -> None:
    seen: list[Any] = []

    def process(args: Any, all_samples: Any, data_source: Any) -> None:
        seen.append(([len(samples) for samples in all_samples], data_source))

    DocumentAllSamplesHook(process, ARGS)([make_group(0.0, 1.0), make_group(1.0)])
    assert seen == [([2, 1], None)]


def test_post_processed_rewards_are_the_second_list() -> None:
    def halve(args: Any, samples: Any) -> Any:
        raw = [sample.reward for sample in samples]
        return raw, np.asarray(raw) / 2

    assert DocumentRewardPostProcess(halve, ARGS)([make_group(0.0, 1.0), make_group(3.0)]) == [0.0, 0.5, 1.5]
    with pytest.raises(TypeError, match=r"must return \(raw_rewards, rewards\), got float"):
        DocumentRewardPostProcess(lambda args, samples: 1.0, ARGS)([make_group(0.0)])


def test_a_log_function_gets_samples_and_metrics_and_may_replace_the_metrics() -> None:
    seen: list[Any] = []

    def log(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
        seen.append((rollout_id, [sample.reward for sample in samples], rollout_time))
        rollout_extra_metrics["mine"] = 1.0
        return True

    metrics = {"time/rollout_s": 2.5}
    assert DocumentRolloutLog(log, ARGS)(4, [make_group(0.0, 1.0)], metrics) is True
    assert seen == [(4, [0.0, 1.0], 2.5)] and metrics["mine"] == 1.0
    assert DocumentRolloutLog(lambda *values: None, ARGS)(4, [], {}) is False


def test_the_log_function_of_an_evaluation_gets_the_data_of_each_set() -> None:
    seen: list[Any] = []

    def log(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> None:
        seen.extend((name, of["rewards"], of["truncated"], len(of["samples"])) for name, of in data.items())

    assert DocumentEvalLog(log, ARGS)(4, {"aime": [make_group(0.0, 1.0)]}, {}) is False
    assert seen == [("aime", [0.0, 1.0], [False, False], 2)]
