"""On-policy distillation: a student learns from a teacher behind a URL, or in the trainer."""

from pathlib import Path

import pytest
import torch

from rlscale.config import load_config
from rlscale.models.hf_models import load_causal_lm, load_tokenizer
from rlscale.models.resolve_model import resolve_model
from tests.integration.conftest import SMALL, Command
from tests.integration.test_external import serve

DISTILLED = ("algo.opd_kl_coef=1.0", "optim.lr=0.02", "data.num_rollout=30", "eval.interval=null")


def write_teacher(student: str, folder: Path) -> Path:
    """The student with sharper distributions: a larger scale of the last norm multiplies its logits by 4."""
    model = load_causal_lm(student, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight *= 4
    model.save_pretrained(folder)
    load_tokenizer(student).save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_a_student_learns_from_a_served_teacher(command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSCALE_CACHE", str(cache))
    student = resolve_model(load_config(list(SMALL)).model)
    teacher = write_teacher(student, command.folder / "teacher")
    with serve(str(teacher), command.folder / "server.log") as address:
        done = command.run(*DISTILLED, f"model.teacher_url=http://{address}", "algo.opd_kl=full")
    assert done.code == 0, done.err
    records = command.metrics()
    gaps = [record["train/teacher_kl"] for record in records]
    assert len(gaps) == 30 and sum(gaps[-4:]) < 0.5 * sum(gaps[:4]), gaps
    # Rewards are 0 for a random model, so the gradient is that of the teacher alone.
    assert all(record["reward/mean"] == 0 for record in records)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["top_k", "full"])
def test_a_student_learns_from_a_loaded_teacher(
    command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("RLSCALE_CACHE", str(cache))
    student = resolve_model(load_config(list(SMALL)).model)
    teacher = write_teacher(student, command.folder / "teacher")
    done = command.run(*DISTILLED, f"model.teacher_load={teacher}", f"algo.opd_kl={kind}", "algo.opd_top_k=4")
    assert done.code == 0, done.err
    gaps = [record["train/teacher_kl"] for record in command.metrics()]
    assert len(gaps) == 30 and sum(gaps[-4:]) < 0.5 * sum(gaps[:4]), gaps
