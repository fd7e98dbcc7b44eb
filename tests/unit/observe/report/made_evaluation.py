"""Writes evaluations of synthetic runs. Contains no tests."""

from pathlib import Path

from rlscale.observe.evaluation_files import EvaluationFiles, Measured
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus
from tests.unit.observe.report.made_run import ATTACK

METRICS = {
    "eval/a/num_prompts": 30.0,
    "eval/a/num_samples": 60.0,
    "eval/a/reward_mean": 0.5,
    "eval/a/reward_ci_low": 0.25,
    "eval/a/reward_ci_high": 0.75,
    "eval/a/truncated_share": 0.125,
    "eval/a/response_len_mean": 3.0,
    "eval/a/pass@2": 0.625,
    "eval/a/pass@2_ci_low": 0.1,
}


def made_group(row: int, *, num_samples: int = 2, text: str = ATTACK) -> Group:
    prompt = Prompt(index=row, text=f"prompt {row} {ATTACK}", token_ids=(1,), label=ATTACK)
    samples = []
    for i in range(num_samples):
        sample = Sample(index=i, group_index=row, prompt=prompt, seed=0)
        sample.append([5], logprobs=[0.0], weight_versions=[7])
        sample.response, sample.reward, sample.status = text, 0.5, SampleStatus.completed
        samples.append(sample)
    last = samples.pop()
    last.reward, last.status = None, SampleStatus.failed
    last.failure = Failure(cause=FailureCause.grader, message=f"no reward {ATTACK}")
    return Group(index=row, prompt=prompt, samples=samples, failed=[last])


def write_evaluations(
    run: Path, *versions: int, num_prompts: int = 30, num_samples: int = 2, text: str = ATTACK
) -> None:
    files = EvaluationFiles(run, keep_last=None, resume_at=99)
    for version in versions:
        writer = files.open(Measured.of_run(version, version), {"a": {"reward": "math", "path": ATTACK}})
        assert writer is not None
        for row in reversed(range(num_prompts)):
            writer.add("a", made_group(row, num_samples=num_samples, text=text))
        writer.commit({**METRICS, "eval/a/num_prompts": float(num_prompts)})
