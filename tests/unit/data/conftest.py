"""A small tokenizer with a chat template, and prompt files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlscale.models.char_tokenizer import character_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer(512)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (objects, or lines as they are) to a file and returns its path."""

    def write(*rows: dict[str, Any] | str, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return str(path)

    return write
