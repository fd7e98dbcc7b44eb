"""The tokenizer of a teacher that the trainer loads, compared with the policy's."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.driver.preflight.teacher_tokenizer import check_loaded_teacher
from tests.unit.config.rules.valid_config import config_with

WORDS = {"a": 0, "b": 1, "c": 2}


def write(folder: Path, vocab: Any, **added: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tokens = [{"id": number, "content": token} for token, number in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))
    return str(folder)


def problems(policy: str, teacher: str, *, coef: float = 1.0) -> list[str]:
    config = config_with(
        {
            "model.build": None,
            "model.hf_checkpoint": policy,
            "model.teacher_load": teacher,
            "algo.opd_kl_coef": coef,
        }
    )
    return [str(each) for each in check_loaded_teacher(config)]


def test_another_token_is_named(tmp_path: Path) -> None:
    policy = write(tmp_path / "policy", WORDS, think=3)
    teacher = write(tmp_path / "teacher", {"a": 0, "c": 1, "b": 2})
    assert problems(policy, teacher) == [
        f"model.teacher_load must name a teacher with the tokenizer of the policy, got {teacher} (its token 1 is 'c', "
        "of the policy 'b'); use a teacher of the same model family"
    ]
    assert problems(policy, teacher, coef=0.0) == []


UNIGRAM = [["a", 0], ["b", -1], ["c", -2]]


@pytest.mark.parametrize(("vocab", "added"), [(WORDS, {}), (WORDS, {"more": 7}), (UNIGRAM, {})])
def test_the_same_tokens_and_further_ones_are_accepted(tmp_path: Path, vocab: Any, added: dict[str, int]) -> None:
    policy = write(tmp_path / "policy", WORDS, think=3)
    assert problems(policy, write(tmp_path / "teacher", vocab, **added)) == []


def test_a_folder_without_such_a_file_is_not_compared(tmp_path: Path) -> None:
    policy, teacher = write(tmp_path / "policy", WORDS), write(tmp_path / "teacher", "other form")
    assert problems(policy, teacher) == []
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    assert problems(policy, teacher) == []
