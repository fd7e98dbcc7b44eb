"""Reduction of metrics for the page."""

from rlscale.observe.report.series import (
    MAX_BINS,
    MAX_POINTS,
    heatmap,
    metric_columns,
    non_finite_warnings,
    phase_seconds,
)


def test_columns_are_aligned_and_keep_gaps() -> None:
    records = [
        {"step": 0, "time": 1.0, "eval/reward_mean": 0.1},
        {"step": 0, "time": 2.0, "train/loss": 1.0},
        {"step": 1, "time": 3.0, "train/loss": "nan", "eval/reward_mean": 0.5},
        {"step": 2, "time": 4.0, "train/loss": 3.0},
        {"step": 3, "time": 5.0, "eval/reward_mean": 0.75},
    ]
    assert metric_columns(records) == {
        "steps": [-1, 0, 1, 2, 3],  # -1: the evaluation before the first rollout
        "columns": {
            "train/loss": [None, 1.0, None, 3.0, None],
            "eval/reward_mean": [0.1, None, 0.5, None, 0.75],
        },
        "stride": 1,
    }


def test_an_evaluation_reported_later_joins_its_rollout() -> None:
    records = [
        {"step": 0, "train/loss": 1.0},
        {"step": 1, "train/loss": 2.0},
        {"step": 0, "eval/reward_mean": 0.5, "time/eval_s": 1.0},
    ]
    assert metric_columns(records)["columns"]["eval/reward_mean"] == [0.5, None]


def test_long_runs_are_averaged() -> None:
    columns = metric_columns([{"step": i, "train/loss": float(i)} for i in range(2 * MAX_POINTS)])
    assert columns["stride"] == 2
    assert len(columns["steps"]) == MAX_POINTS
    assert columns["columns"]["train/loss"][:2] == [0.5, 2.5]


def test_an_empty_run_has_no_columns() -> None:
    columns = metric_columns([])
    assert columns == {"steps": [], "columns": {}, "stride": 1}
    assert phase_seconds([])["steps"] == []
    assert heatmap([], "reward") is None


def test_non_finite_values_are_counted() -> None:
    records = [
        {"step": 0, "time": 1.0, "train/loss": 1.0, "train/kl": "inf"},
        {"step": 1, "time": 2.0, "train/loss": "nan"},
        {"step": 2, "time": 3.0, "train/loss": "inf", "reward/mean": 0.5},
    ]
    assert non_finite_warnings(records) == [
        "not a finite number, of 3 records: train/kl in 1, first in rollout 0; train/loss in 2, first in rollout 1"
    ]
    assert non_finite_warnings([{"step": 0, "train/loss": 1.0}]) == []


def test_the_remainder_of_a_step_is_other() -> None:
    records = [
        {"step": 0, "time/step_s": 4.0, "time/rollout_s": 1.0, "time/train_s": 2.0, "train/loss": 1.0},
        {"step": 1, "time/step_s": 2.0, "time/rollout_s": 1.5, "time/train_s": 1.0, "train/loss": 1.0},
        {"step": 2, "eval/reward_mean": 1.0},
    ]
    found = phase_seconds(records)
    assert found["steps"] == [0, 1]
    assert list(found["phases"]) == ["rollout", "train", "other"]
    assert found["phases"]["other"] == [1.0, 0.0]  # in the second step, the rollout overlapped with training
    assert found["total"] == {"rollout": 2.5, "train": 3.0, "other": 1.0}
    assert found["step"] == [4.0, 2.0]


def test_a_phase_of_some_steps_has_its_true_share_of_a_long_run() -> None:
    records = [
        {"step": i, "train/loss": 1.0, "time/step_s": 2.0, "time/train_s": 2.0} for i in range(4 * MAX_POINTS + 1)
    ]
    for record in records[::4]:
        record |= {"time/step_s": 8.0, "time/eval_s": 6.0}
    found = phase_seconds(records)
    assert found["total"] == {
        "train": 2.0 * len(records),
        "eval": 6.0 * (MAX_POINTS + 1),
        "other": 0.0,
    }
    # Five steps a point: of the first five, two have an evaluation.
    assert (found["step"][0], found["phases"]["eval"][0]) == (4.4, 2.4)
    assert len(found["steps"]) == len(found["phases"]["eval"]) == (4 * MAX_POINTS + 5) // 5


def test_few_values_have_one_bin_each() -> None:
    records = [{"step": 0, "reward": [[0.0, 3], [1.0, 1]]}, {"step": 1, "reward": [[0.5, 4]]}]
    assert heatmap(records, "reward") == {
        "steps": [0, 1],
        "edges": [-0.25, 0.25, 0.75, 1.25],
        "labels": [0.0, 0.5, 1.0],
        "counts": [[3, 0, 1], [0, 4, 0]],
    }


def test_many_values_share_bins_with_the_same_total() -> None:
    records = [{"step": 0, "response_len": [[float(i), 2] for i in range(100)]}]
    found = heatmap(records, "response_len")
    assert found is not None and found["labels"] is None
    assert len(found["counts"][0]) == MAX_BINS == len(found["edges"]) - 1
    assert sum(found["counts"][0]) == 200
    assert (found["edges"][0], found["edges"][-1]) == (0.0, 99.0)


def test_a_single_value_is_drawn() -> None:
    found = heatmap([{"step": 0, "reward": [[1.0, 8]]}], "reward")
    assert found is not None and found["counts"] == [[8]] and found["edges"] == [0.5, 1.5]
