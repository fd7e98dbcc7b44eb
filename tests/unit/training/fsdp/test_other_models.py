"""Reference, teacher and critic of another kind than the policy: one reads images, the other one text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.config import ModelBuild, ModelConfig
from rlscale.models.resolve_model import resolve_model
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.rollout_state import TrainColumns
from rlscale.training.spec import CriticSpec, ModelSource
from tests.tiny_vision import VISION_BUILDS, write_tiny_vision
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
TWO = [[[0, 5, 6, 1], [2, 3, 4, 7]]]


@pytest.fixture(scope="module")
def text_model(cache: Path) -> str:
    """A Qwen3 with the vocabulary of the models with images."""
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    config = ModelConfig(build=ModelBuild.tiny_qwen3, vocab_size=109, cache_dir=str(cache), **sizes)
    return resolve_model(config)


def backend(path: str, algo: dict[str, Any], **changes: Any) -> FsdpBackend:
    return FsdpBackend(spec(path, algo=algo, **changes), rank=0, world_size=1)


def columns(trainer: FsdpBackend) -> TrainColumns:
    return trainer.prepare(BATCH, [plan(BATCH, TWO)])[1]


def other_models(path: str) -> dict[str, Any]:
    source = ModelSource(path=path)
    return {"ref_path": path, "teacher": source, "critic": CriticSpec(source=source, lr=1e-2)}


ALGO = {"opd_kl_coef": 0.5, "use_kl_loss": True, "kl_loss_type": "k2", "advantage_estimator": "ppo"}
STEPS = [plan(BATCH, TWO)]


@pytest.mark.parametrize(("build", "kind"), [*zip(VISION_BUILDS, ("top_k", "full"), strict=True)])
@pytest.mark.slow
def test_models_without_images_score_the_text_of_a_policy_with_images(
    build: ModelBuild, kind: str, text_model: str, tmp_path: Path
) -> None:
    others, algo = other_models(text_model), {**ALGO, "opd_kl": kind, "opd_top_k": 3}
    trainer, alone = backend(write_tiny_vision(build, tmp_path), algo, **others), backend(text_model, algo, **others)
    for each in (trainer, alone):
        each.train(BATCH, STEPS)  # the first values of a critic are 0
    found, expected = columns(trainer), columns(alone)
    for name in ("ref_logprobs", "teacher_logprobs", "values"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), msg=lambda text, n=name: f"{n} {text}"
        )
    assert found.teacher is not None and expected.teacher is not None
    for name, column in expected.teacher.columns.items():
        torch.testing.assert_close(found.teacher.columns[name], column, msg=lambda text, n=name: f"{n} {text}")


@pytest.mark.slow
def test_models_with_images_score_the_text_of_a_policy_without(text_model: str, tmp_path: Path) -> None:
    path = write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path)
    others = other_models(path)
    trainer, alone = backend(text_model, ALGO, **others), backend(path, ALGO, **others)
    for each in (trainer, alone):
        each.train(BATCH, STEPS)
    found, expected = columns(trainer), columns(alone)
    for name in ("ref_logprobs", "teacher_logprobs", "values"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), msg=lambda text, n=name: f"{n} {text}"
        )
