"""Summary at the end of a run."""

import io
import re
from dataclasses import replace
from pathlib import Path

from rlscale.observe.summary import RunSummary, phase_seconds, print_summary
from tests.unit.observe.terminal import FakeTerminal

LONG = Path("/a/rather/long/folder/for/runs/that/is/longer/than/a/narrow/terminal/is/wide/runs/quickstart-1a2b3c4d")

SUMMARY = RunSummary(
    title="quickstart-1a2b3c4d",
    reward_before=0.2314,
    reward_after=0.9375,
    num_steps=220,
    num_tokens=180_000,
    seconds=45.0,
    run_dir=LONG,
    checkpoint=LONG / "checkpoints" / "220",
    hf_folder=LONG / "hf",
    metrics_file=LONG / "metrics.jsonl",
    seconds_by_phase={"rollout": 20.0, "train": 15.0, "sync": 5.0},
    warnings=["logprobs differ"],
    next_commands=[("rlscale-train algo=gspo", "another algorithm"), ("rlscale-train optim.lr=0", "the control")],
)


def shown(summary: RunSummary, stream: io.StringIO) -> str:
    print_summary(summary, stream=stream)
    return stream.getvalue()


def test_the_plain_summary_is_lines() -> None:
    assert shown(SUMMARY, io.StringIO()).splitlines() == [
        "== quickstart-1a2b3c4d",
        "held-out reward  0.231 before, 0.938 after",
        "steps            220 in 45.0 s",
        "tokens           180,000, 4,000 tokens/s",
        "time by phase    rollout 20.0 s (50%), train 15.0 s (38%), sync 5.0 s (12%)",
        f"run folder       {LONG}",
        f"checkpoint       {LONG}/checkpoints/220",
        f"model            {LONG}/hf",
        f"metrics          {LONG}/metrics.jsonl",
        "warning: logprobs differ",
        "next steps",
        "  # another algorithm",
        "  rlscale-train algo=gspo",
        "  # the control",
        "  rlscale-train optim.lr=0",
    ]


def test_outcomes_are_a_line_if_some_trajectories_were_not_trained_on() -> None:
    text = shown(replace(SUMMARY, trajectories="90 trained, 6 (6.2%) failed by grader"), io.StringIO())
    assert "\ntrajectories     90 trained, 6 (6.2%) failed by grader\n" in text


def test_paths_and_commands_are_not_wrapped_on_a_terminal() -> None:
    text = shown(SUMMARY, FakeTerminal())
    for whole in (str(LONG / "checkpoints" / "220"), str(LONG / "metrics.jsonl"), "rlscale-train algo=gspo"):
        assert whole in text
    assert "0.231 before, 0.938 after" in text
    assert "warning: logprobs differ" in text


def test_brackets_in_names_are_no_markup() -> None:
    folder = Path("/runs/[dim]a")
    text = shown(replace(SUMMARY, title=folder.name, run_dir=folder), FakeTerminal())
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in text.splitlines()]
    assert "run folder   /runs/[dim]a" in lines and " [dim]a " in lines[0]


def test_missing_results_are_not_shown() -> None:
    bare = replace(
        SUMMARY, reward_before=None, reward_after=None, checkpoint=None, hf_folder=None, seconds=0.0, next_commands=()
    )
    text = shown(bare, io.StringIO())
    for absent in ("held-out", "checkpoint ", "model ", "next steps"):
        assert absent not in text
    assert "180,000, 0 tokens/s" in text


def test_a_missing_first_reward_is_reported() -> None:
    assert "not measured before, 0.938 after" in shown(replace(SUMMARY, reward_before=None), io.StringIO())


def test_a_resumed_run_reports_the_steps_of_this_start() -> None:
    resumed = shown(replace(SUMMARY, num_steps=50, num_steps_before=10, seconds=20.0), io.StringIO())
    assert "50 in 20.0 s, after 10 in earlier starts" in resumed


def test_seconds_by_phase_are_summed_over_records() -> None:
    records = [{"time/rollout_s": 1.0, "time/train_s": 2.0}, {"time/rollout_s": 0.5, "reward/mean": 1.0}]
    assert phase_seconds(records, ("rollout", "train", "save")) == {"rollout": 1.5, "train": 2.0}
