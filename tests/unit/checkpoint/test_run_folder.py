"""A run folder is new, resumed or replaced by a numbered one; the error for a changed config names its keys."""

from pathlib import Path
from typing import IO

import pytest

from rlscale.checkpoint import run_folder
from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import CheckpointConfig, load_config, to_yaml
from rlscale.errors import ConfigError


def config(*overrides: str) -> str:
    return to_yaml(load_config(["+experiment=quickstart", *overrides]))


def test_an_unfinished_run_is_resumed(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        assert not folder.resumed
    with RunFolder.open(tmp_path / "run", config_yaml=config("logging.interval=3", "run.name=other")) as folder:
        assert folder.resumed
        assert folder.changed == ()
        assert folder.skipped is None


def test_after_a_finished_run_the_next_folder_gets_a_number(tmp_path: Path) -> None:
    for number in ("run", "run-2", "run-3"):
        with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
            assert folder.path.name == number
            assert folder.skipped == (None if number == "run" else tmp_path / "run")
            folder.finish({"final": 1.0})


def test_a_run_that_ends_while_its_folder_is_opened_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver may write `finished.json` and release its lock between the check and the lock of this one."""
    acquire_lock = run_folder._acquire_lock

    def acquire_lock_late(path: Path) -> IO[str]:
        if path.name == "run":
            (path / "finished.json").write_text("{}")
        return acquire_lock(path)

    RunFolder.open(tmp_path / "run", config_yaml=config()).close()
    monkeypatch.setattr(run_folder, "_acquire_lock", acquire_lock_late)
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        assert folder.path.name == "run-2" and not folder.resumed


@pytest.mark.slow
def test_a_changed_config_is_an_error_unless_resume_changed(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run", config_yaml=config()).close()
    changed = config("optim.lr=1e-5", "batch.rollout_batch_size=24")
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(tmp_path / "run", config_yaml=changed)
    text = str(caught.value)
    assert "optim.lr: 0.0005 -> 1e-05" in text
    assert "batch.rollout_batch_size: 48 -> 24" in text
    assert "run.resume_changed=true" in text
    with RunFolder.open(tmp_path / "run", config_yaml=changed, resume_changed=True) as folder:
        assert folder.resumed
        assert any(line.startswith("optim.lr:") for line in folder.changed)
    with RunFolder.open(tmp_path / "run", config_yaml=changed) as folder:
        assert folder.changed == ()


@pytest.mark.parametrize("content", ["", "[]", '{"config": 3}', '{"con'])
def test_a_damaged_record_is_an_error_with_the_way_out(content: str, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", config_yaml=config()):
        pass
    (tmp_path / "run" / "identity.json").write_text(content)
    rule = "run.dir must be new or hold a run whose identity.json can be read"
    with pytest.raises(ConfigError, match=rf"^{rule}, got {tmp_path}/run; choose another folder$"):
        RunFolder.open(tmp_path / "run", config_yaml=config())
    (checkpoint := tmp_path / "run" / "checkpoints" / "rollout_00000001").mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    (problem,) = RunFolder.check_config(tmp_path / "run", config)
    assert problem.fix.endswith(f"start from its checkpoints with checkpoint.load={tmp_path}/run/checkpoints")


def test_checkpoints_are_in_the_run_folder_or_in_checkpoint_save(tmp_path: Path) -> None:
    elsewhere = tmp_path / "saved/here"
    inside, outside = CheckpointConfig(save=str(tmp_path / "run/checkpoints")), CheckpointConfig(save=str(elsewhere))
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        assert folder.checkpoint_folder(inside) == tmp_path / "run/checkpoints"
        assert folder.checkpoint_folder(outside) == elsewhere
        # A finished run keeps its checkpoints; the next one appends its number.
        folder.finish({})
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        assert folder.checkpoint_folder(inside) == tmp_path / "run-2/checkpoints"
        assert folder.checkpoint_folder(outside) == tmp_path / "saved/here-2"


def test_checkpoints_are_saved_where_checkpoint_load_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    # The resolve step expands `~` of a given checkpoint.save.
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        saved = folder.checkpoint_folder(CheckpointConfig(save=str(tmp_path / "saved")))
    store = CheckpointStore(saved, keep_last=1)
    store.begin(3)
    store.commit(3, {})
    assert CheckpointStore.resolve("~/saved").rollout_id == 3


@pytest.mark.slow
def test_a_new_run_does_not_use_the_checkpoints_of_another_one(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    store = CheckpointStore(saved, keep_last=2)
    store.begin(7)
    newest = store.commit(7, {}).folder
    for _ in range(2):  # the second start raises the same error
        with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder, pytest.raises(ConfigError) as caught:
            folder.checkpoint_folder(CheckpointConfig(save=str(saved)))
        assert "checkpoint.save must be a folder without checkpoints of another run, got" in str(caught.value)
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        for load in (saved, newest):
            assert folder.checkpoint_folder(CheckpointConfig(save=str(saved), load=str(load))) == saved
    # By now they are its own checkpoints.
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        assert folder.checkpoint_folder(CheckpointConfig(save=str(saved))) == saved


def test_a_new_run_does_not_save_next_to_newer_checkpoints(tmp_path: Path) -> None:
    """A later start would resume from the newest one, which is of another run."""
    text = config()
    store = CheckpointStore(saved := tmp_path / "saved", keep_last=2)
    older, newest = (store.begin(number) and store.commit(number, {}).folder for number in (3, 7))
    given = CheckpointConfig(save=str(saved), load=str(older))
    with RunFolder.open(tmp_path / "run", config_yaml=text) as folder, pytest.raises(ConfigError) as caught:
        folder.checkpoint_folder(given)
    advice = f"choose another folder, or start from its checkpoints with checkpoint.load={saved}"
    assert str(caught.value).endswith(f"without checkpoints of another run, got {saved}; {advice}")
    given = CheckpointConfig(save=str(saved), load=str(newest))
    with RunFolder.open(tmp_path / "run", config_yaml=text) as folder, pytest.raises(ConfigError) as caught:
        folder.checkpoint_folder(given, is_renumbered=True)
    assert str(caught.value).endswith(f"{advice} data.start_rollout_id=null")
    with RunFolder.open(tmp_path / "run", config_yaml=text) as folder:
        assert folder.checkpoint_folder(given) == saved


@pytest.mark.slow
def test_two_runs_at_a_time_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    """Jobs of a sweep with one checkpoint.save: each would delete what the other one is saving."""
    text = config()
    shared = CheckpointConfig(save=str(tmp_path / "saved"))
    with RunFolder.open(tmp_path / "a", config_yaml=text) as first:
        assert first.checkpoint_folder(shared) == tmp_path / "saved"
        for _ in range(2):  # the second start is not taken for a resumed run
            with RunFolder.open(tmp_path / "b", config_yaml=text) as second, pytest.raises(ConfigError) as caught:
                second.checkpoint_folder(shared)
            advice = "wait for that run, or choose another checkpoint.save"
            assert str(caught.value).startswith("checkpoint.save must be a folder that no other run is using, got")
            assert str(caught.value).endswith(advice)
    with RunFolder.open(tmp_path / "b", config_yaml=text) as second:
        assert second.checkpoint_folder(shared) == tmp_path / "saved"
    with RunFolder.open(tmp_path / "c", config_yaml=text) as third:  # its own folder is locked already
        assert third.checkpoint_folder(CheckpointConfig(save=str(tmp_path / "c"))) == tmp_path / "c"


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path / "run", config_yaml=config()),
        pytest.raises(ConfigError, match="in use by process"),
    ):
        RunFolder.open(tmp_path / "run", config_yaml=config())


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir must name a folder that can be written, got .*choose another run"):
        RunFolder.open(tmp_path / "file" / "run", config_yaml=config())
