import json
from pathlib import Path

import pytest

from rlscale.data.data_paths import resolve_data_path, row_slice


@pytest.mark.parametrize(
    ("path", "file", "rows"),
    [
        ("a/b.jsonl", "a/b.jsonl", slice(None)),
        ("b.jsonl@[2:5]", "b.jsonl", slice(2, 5)),
        ("b.jsonl@[:5]", "b.jsonl", slice(None, 5)),
        ("b.jsonl@[2:]", "b.jsonl", slice(2, None)),
        ("b@[1:2].jsonl", "b@[1:2].jsonl", slice(None)),
    ],
)
def test_the_slice_is_at_the_end_of_the_path(path: str, file: str, rows: slice) -> None:
    assert resolve_data_path(path) == Path(file)
    assert row_slice(path) == rows


def test_the_home_folder_is_expanded() -> None:
    assert resolve_data_path("~/x.jsonl") == Path.home() / "x.jsonl"


def test_builtin_files_are_there_and_disjoint() -> None:
    prompts = {}
    for name in ("train", "heldout"):
        file = resolve_data_path(f"builtin:arithmetic/{name}.jsonl@[0:5]")
        prompts[name] = {json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()}
    assert len(prompts["train"]) == 10000 and len(prompts["heldout"]) == 256
    mirrored = {f"{p[3:5]}+{p[0:2]}=" for p in prompts["heldout"]}
    assert not prompts["train"] & (prompts["heldout"] | mirrored)
