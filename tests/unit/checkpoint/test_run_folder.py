"""A run folder is new, goes on, or makes way; a changed config is named."""

from pathlib import Path

import pytest

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.config import load_config, to_yaml
from rlscale.errors import ConfigError


def config(*overrides: str) -> str:
    return to_yaml(load_config(["+experiment=quickstart", *overrides]))


def test_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
        assert not folder.resumed
    with RunFolder.open(tmp_path / "run", config_yaml=config("logging.interval=3", "run.name=other")) as folder:
        assert folder.resumed
        assert folder.changed == ()
        assert folder.skipped is None


def test_a_finished_run_makes_the_next_one_take_a_number(tmp_path: Path) -> None:
    for number in ("run", "run-2", "run-3"):
        with RunFolder.open(tmp_path / "run", config_yaml=config()) as folder:
            assert folder.path.name == number
            assert folder.skipped == (None if number == "run" else tmp_path / "run")
            folder.finish({"final": 1.0})


def test_a_changed_config_is_named_and_resumed_only_when_told(tmp_path: Path) -> None:
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


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path / "run", config_yaml=config()),
        pytest.raises(ConfigError, match="in use by process"),
    ):
        RunFolder.open(tmp_path / "run", config_yaml=config())
