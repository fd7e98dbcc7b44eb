"""Models that only score: reference, teacher and earlier versions of the policy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.errors import ConfigError, DataError
from rlscale.training.distributed import make_data_mesh
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.scorers import FsdpTeacher
from rlscale.training.spec import ModelSource
from rlscale.types import TrainBatch, TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_model

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
ONE = [[[*range(8)]]]
KL = {"use_kl_loss": True, "kl_loss_type": "k2"}


def backend(model_path: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(spec(model_path, **changes), rank=0, world_size=1)


def train(trainer: FsdpBackend, batch: TrainBatch = BATCH) -> TrainResult:
    return trainer.train(batch, [plan(batch, ONE)])


def logprobs(trainer: FsdpBackend, batch: TrainBatch = BATCH) -> Tensor:
    """Old logprobs, by earlier versions where they generated the token."""
    rollout, _ = trainer.prepare(batch, [plan(batch, ONE)])
    column = trainer.policy.compute_old_logprobs(rollout, entropies=None)
    return column if trainer._snapshots is None else trainer._snapshots.score(rollout, column)


def of_version(batch: TrainBatch, version: int, *, made_by: dict[int, int] | None = None) -> TrainBatch:
    """The batch at `version`; samples in `made_by` (sample: version) are of earlier versions."""
    versions = np.where(batch.loss_mask, version, -1).astype(np.int32)
    for sample, older in (made_by or {}).items():
        rows = slice(int(batch.offsets[sample]), int(batch.offsets[sample + 1]))
        versions[rows] = np.where(batch.loss_mask[rows], older, -1)
    return replace(batch, weight_versions=versions, version=version)


def test_a_reference_can_be_a_checkpoint_of_a_trainer(model_path: str, tmp_path: Path) -> None:
    first = backend(model_path)
    train(first)
    first.save(tmp_path)
    train(first)
    follower = backend(model_path, algo=KL, ref_path=model_path, ref_checkpoint=tmp_path)
    assert train(follower).steps[0]["kl_loss"] > 1e-4  # the reference is one step ahead of the policy
    follower.load(tmp_path)
    assert train(follower).steps[0]["kl_loss"] == pytest.approx(0.0, abs=1e-9)


def test_a_reference_checkpoint_that_does_not_fit_raises(model_path: str, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a checkpoint of a trainer, got none there"):
        backend(model_path, algo=KL, ref_path=model_path, ref_checkpoint=tmp_path)
    backend(tiny_model(cache)).save(tmp_path)
    with pytest.raises(DataError, match=r"must contain model\.lm_head\.weight with shape .*, got no such weight"):
        backend(model_path, algo=KL, ref_path=tiny_model(cache, tied=False), ref_checkpoint=tmp_path)


def test_a_teacher_adds_its_log_ratio_to_the_advantages(model_path: str, cache: Path) -> None:
    teacher = ModelSource(path=tiny_model(cache, seed=1))
    algo = {"opd_kl_coef": 0.5}
    trainer = backend(model_path, algo=algo, teacher=teacher)
    _, columns = trainer.prepare(BATCH, [plan(BATCH, ONE)])
    _, plain = backend(model_path).prepare(BATCH, [plan(BATCH, ONE)])
    student, opinion = logprobs(backend(model_path)), logprobs(backend(teacher.path))
    assert columns.advantages is not None and plain.advantages is not None
    torch.testing.assert_close(columns.advantages, plain.advantages - 0.5 * (student - opinion))
    count = BATCH.loss_mask.sum()
    assert train(trainer).metrics["rollout/teacher_kl"] == pytest.approx(float((student - opinion).sum()) / count)


@pytest.mark.slow
def test_distillation_alone_moves_the_policy_to_its_teacher(model_path: str, cache: Path) -> None:
    teacher = ModelSource(path=tiny_model(cache, seed=1))
    silent = replace(BATCH, rewards=np.zeros_like(BATCH.rewards))
    trainer = backend(model_path, algo={"opd_kl_coef": 1.0}, teacher=teacher, lr=3e-3)
    kept = backend(model_path, algo={"opd_kl_coef": 1.0}, teacher=ModelSource(path=model_path), lr=3e-3)
    opinion = logprobs(backend(teacher.path))
    gaps = []
    for _ in range(15):
        gaps.append(float((logprobs(trainer) - opinion).abs().sum()))
        train(trainer, silent)
    assert gaps[-1] < 0.5 * gaps[0]
    assert train(kept, silent).metrics["rollout/teacher_kl"] == 0.0, "its own teacher agrees"


def test_a_teacher_with_a_smaller_vocabulary_raises(model_path: str, cache: Path) -> None:
    trainer = backend(model_path)
    trainer.policy.model.config.vocab_size += 1

    made = spec(model_path, algo={"opd_kl_coef": 1.0}, teacher=ModelSource(path=model_path))

    with pytest.raises(ConfigError, match=r"model\.teacher_load must name a model with at least the \d+ tokens of"):
        FsdpTeacher.from_spec(made, mesh=make_data_mesh(torch.device("cpu")), policy=trainer.policy.model)


def test_earlier_versions_score_the_tokens_they_generated(model_path: str) -> None:
    trainer = backend(model_path, num_old_policies=2)
    scored = []
    for version in range(3):
        scored.append(logprobs(trainer, of_version(BATCH, version)))
        train(trainer, of_version(BATCH, version))
    mixed = logprobs(trainer, of_version(BATCH, 3, made_by={1: 2, 4: 1, 6: 2}))
    current = logprobs(trainer, of_version(BATCH, 3))
    # Samples 1, 4 and 6 are of earlier versions, whose logprobs are exact copies.
    for sample in range(8):
        rows = slice(int(BATCH.offsets[sample]), int(BATCH.offsets[sample + 1]))
        expected = {1: scored[2], 4: scored[1], 6: scored[2]}.get(sample, current)
        assert torch.equal(mixed[rows], expected[rows]), sample
    assert not torch.equal(scored[1], scored[2])


def test_scoring_with_earlier_versions_keeps_the_policy(model_path: str) -> None:
    trainer, plain = backend(model_path, num_old_policies=1), backend(model_path, reuse_logprobs=False)
    for version in range(2):
        stale = of_version(BATCH, version, made_by={0: version - 1} if version else {})
        logprobs(trainer, stale)
        a, b = train(trainer, of_version(BATCH, version)), train(plain, of_version(BATCH, version))
        assert a.steps == b.steps
    stale = of_version(BATCH, 2, made_by={5: 1})
    assert train(trainer, stale).metrics["logprob_diff/stale_mean"] != pytest.approx(
        train(plain, stale).metrics["logprob_diff/stale_mean"], rel=1e-4
    )


@pytest.mark.slow
def test_earlier_versions_survive_a_checkpoint(model_path: str, tmp_path: Path) -> None:
    first, second = backend(model_path, num_old_policies=2), backend(model_path, num_old_policies=2)
    for version in range(3):
        train(first, of_version(BATCH, version))
    first.save(tmp_path)
    second.load(tmp_path)
    stale = of_version(BATCH, 3, made_by={1: 1, 2: 2})
    assert torch.equal(logprobs(second, stale), logprobs(first, stale))
    assert train(second, stale).steps == train(first, stale).steps


def test_a_version_that_is_not_kept_logs_a_warning(model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = backend(model_path, num_old_policies=1)
    stale = logprobs(trainer, of_version(BATCH, 5, made_by={1: 3}))
    assert torch.equal(stale, logprobs(trainer, of_version(BATCH, 5)))
    assert "the weights of version 3 are not kept" in caplog.text
