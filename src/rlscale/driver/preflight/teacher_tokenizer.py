"""Check that a teacher of the trainer has the token ids of the policy: with others its logprobs mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

from rlscale.architectures.hf_config import local_model_folder
from rlscale.checkpoint.weight_folders import is_checkpoint
from rlscale.config import RunConfig, uses_teacher
from rlscale.driver.preflight.model_sources import starting_folder
from rlscale.errors import Problem

FILE = "tokenizer.json"


def check_loaded_teacher(config: RunConfig) -> list[Problem]:
    """Problem of `model.teacher_load` with another tokenizer, where the files of both are on this machine."""
    load = config.model.teacher_load
    if load is None or not uses_teacher(config.algo) or is_checkpoint(load):  # checkpoints have the policy's tokens
        return []
    policy, teacher = starting_folder(config), local_model_folder(load)
    if policy is None or teacher is None or not all((each / FILE).is_file() for each in (policy, teacher)):
        return []
    own, other = (_read_tokens(each / FILE) for each in (policy, teacher))
    different = next((number for number in sorted(own.keys() & other.keys()) if own[number] != other[number]), None)
    if different is None:
        return []
    difference = f"its token {different} is {other[different]!r}, of the policy {own[different]!r}"
    rule, fix = "name a teacher with the tokenizer of the policy", "use a teacher of the same model family"
    return [Problem(path="model.teacher_load", rule=rule, value=f"{load} ({difference})", fix=fix)]


def _read_tokens(file: Path) -> dict[int, str]:
    """Tokens by id; empty for a file of another form."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        added = {each["id"]: each["content"] for each in content.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError):
        return {}
    if isinstance(vocab, dict):
        return {number: token for token, number in vocab.items()} | added
    # Unigram: a list of tokens and scores.
    return dict(enumerate(entry[0] for entry in vocab)) | added if isinstance(vocab, list) else {}
