"""Checkpoints of a run: complete or absent, the newest ones kept, and found by path."""

import json
import os
from pathlib import Path

import pytest

from rlscale.checkpoint.store import CheckpointStore
from rlscale.errors import ConfigError, DataError
from tests.weight_files import write_no_weights


def save(store: CheckpointStore, rollout_id: int, text: str = "weights") -> Path:
    folder = store.begin(rollout_id)
    (folder / "tensors").mkdir()
    (folder / "tensors" / "model.bin").write_text(text)
    return store.commit(rollout_id, {"position": rollout_id * 10}).folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_committed_checkpoint_is_the_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "checkpoints", keep_last=2)
    assert store.latest() is None
    save(store, 3)
    latest = CheckpointStore(tmp_path / "new" / "checkpoints", keep_last=2).latest()
    assert latest is not None
    assert (latest.rollout_id, latest.state) == (3, {"position": 30})
    assert (latest.folder / "tensors" / "model.bin").read_text() == "weights"


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    # 10 is newer than 9, though it was saved before.
    for rollout_id in (1, 2, 10, 9):
        save(store, rollout_id)
    assert names(tmp_path) == ["rollout_00000009", "rollout_00000010"]
    latest = store.latest()
    assert latest is not None
    assert latest.rollout_id == 10


def test_all_files_are_flushed_before_a_checkpoint_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, absent = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    metrics.write_text("{}\n")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, flush_with=[metrics, absent])
    flushed: dict[str, bool] = {}  # file -> whether there was a checkpoint at its flush

    def record(descriptor: int) -> None:
        flushed[Path(f"/proc/self/fd/{descriptor}").readlink().name] = store.latest() is not None

    monkeypatch.setattr(os, "fsync", record)
    save(store, 1)
    before = [name for name, was_complete in flushed.items() if not was_complete]
    # Only the parent folder is flushed after the rename.
    assert sorted(before) == ["checkpoint.json", "metrics.jsonl", "model.bin", "rollout_00000001.saving", "tensors"]
    assert flushed["checkpoints"]


def test_older_checkpoints_are_kept_until_the_newer_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    store.begin(2)
    latest = store.latest()
    assert latest is not None
    assert latest.rollout_id == 1


def test_a_repeated_begin_returns_an_empty_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    (store.begin(1) / "half").write_text("")
    assert names(store.begin(1)) == []


def test_a_checkpoint_of_the_same_rollout_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5, "old")
    folder = save(store, 5, "new")
    assert (folder / "tensors" / "model.bin").read_text() == "new"
    assert names(tmp_path) == ["rollout_00000005"]


def test_an_interrupted_replacement_restores_the_old_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5, "old").rename(tmp_path / "rollout_00000005.replaced")
    store.begin(5)
    latest = CheckpointStore(tmp_path, keep_last=1).latest()
    assert latest is not None
    assert (latest.folder / "tensors" / "model.bin").read_text() == "old"
    assert names(tmp_path) == ["rollout_00000005"]


def test_only_unfinished_saves_are_deleted(tmp_path: Path) -> None:
    for name in ("rollout_00000007.saving", "rollout_00000001.deleting", "rollout_00000002.replaced.deleting", "mine"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("")
    CheckpointStore(tmp_path, keep_last=1)
    assert names(tmp_path) == ["mine", "notes.txt"]


def test_resolve_accepts_a_checkpoint_a_folder_of_them_or_a_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    older, newer = save(store, 1), save(store, 2)
    assert CheckpointStore.resolve(str(older)).rollout_id == 1
    assert CheckpointStore.resolve(tmp_path / "checkpoints").folder == newer
    assert CheckpointStore.resolve(tmp_path).folder == newer


def test_a_missing_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.load must name a complete checkpoint, got '.*nowhere'"):
        CheckpointStore.resolve(tmp_path / "nowhere")
    half = CheckpointStore(tmp_path, keep_last=1).begin(3)
    with pytest.raises(ConfigError, match="that save was never completed"):
        CheckpointStore.resolve(half)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "rollout_id": "x", "state": {}}'])
def test_the_error_for_a_broken_checkpoint_names_its_file(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    (save(store, 1) / "checkpoint.json").write_text(content)
    with pytest.raises(DataError, match=r"rollout_00000001/checkpoint\.json must be the state of a checkpoint"):
        store.latest()


@pytest.mark.parametrize("folder", ["", "critic/tensors"])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, folder: str) -> None:
    checkpoint = save(CheckpointStore(tmp_path, keep_last=1), 1)
    (checkpoint / folder).mkdir(parents=True, exist_ok=True)
    write_no_weights(file := checkpoint / folder / "shard.safetensors")
    assert CheckpointStore.resolve(tmp_path).rollout_id == 1
    file.write_bytes(file.read_bytes()[:-1])
    message = rf"shard\.safetensors is cut off, .*; delete {checkpoint} to resume from the previous checkpoint$"
    with pytest.raises(DataError, match=message):
        CheckpointStore.resolve(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    file = save(CheckpointStore(tmp_path, keep_last=1), 1) / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(DataError, match="must be of format 1, got 99"):
        CheckpointStore.resolve(tmp_path)
