"""Config of the warm-up of a run."""

import os
from pathlib import Path

import pytest

from rlscale.config import load_config, load_config_with_notes, to_yaml
from rlscale.driver import warmup as warmup_module
from rlscale.driver.warmup import warmup_config, warmup_is_used
from rlscale.errors import ConfigError


def test_model_and_seed_are_those_of_the_run() -> None:
    config = load_config(["+experiment=quickstart", "model.init_seed=7", "train.seed=3"])
    warmup = warmup_config(config)
    assert warmup is not None
    assert (warmup.model.init_seed, warmup.train.seed) == (7, 3)
    assert warmup.algo.loss_type == "sft_loss"
    other = warmup_config(load_config(["+experiment=quickstart", "model.init_seed=8", "train.seed=3"]))
    assert other is not None and other.run.dir != warmup.run.dir


@pytest.mark.parametrize("hashed_bytes", [warmup_module.HASHED_BYTES, 0])
@pytest.mark.slow
def test_changed_demonstrations_are_another_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed_bytes: int
) -> None:
    monkeypatch.setattr(warmup_module, "HASHED_BYTES", hashed_bytes)
    demos = tmp_path / "demos.jsonl"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - quickstart_warmup\n\ndata:\n  prompt_data: {demos}\n"
    )
    config = load_config(["+experiment=quickstart", "model.warmup_experiment=mine"], config_dir=tmp_path)

    def folder(text: str | None) -> str:
        warmup_module._load.cache_clear()  # as in another process
        if text is not None:
            demos.write_text(text)
            os.utime(demos, (len(text), len(text)))
        warmup = warmup_config(config)
        assert warmup is not None
        return warmup.run.dir

    first = folder('{"prompt": "1+1=", "label": "2"}\n')
    assert folder(None) == first
    assert folder('{"prompt": "1+1=", "label": "11"}\n') != first
    assert folder('{"prompt": "1+1=", "label": "2"}\n') == first
    demos.unlink()  # reported when the rows are read
    assert folder(None) not in (first, None)


def test_the_experiment_may_be_in_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - quickstart_warmup\n\noptim:\n  lr: 0.125\n"
    )
    config = load_config(["+experiment=quickstart", "model.warmup_experiment=mine"], config_dir=tmp_path)
    warmup = warmup_config(config)
    assert warmup is not None
    assert warmup.optim.lr == 0.125


def test_null_means_no_warm_up() -> None:
    assert warmup_config(load_config(["+experiment=quickstart", "model.warmup_experiment=null"])) is None


def test_a_script_needs_no_weights() -> None:
    scripted = ["rollout=scripted", "rollout.script_path=json:dumps", "debug.rollout_only=true"]
    loaded = load_config_with_notes(["+experiment=quickstart", *scripted])
    assert warmup_is_used(load_config(["+experiment=quickstart"])) and not warmup_is_used(loaded.config)
    assert "model.warmup_experiment is ignored: a script answers without weights" in "\n".join(loaded.warnings)


def test_an_error_of_the_warm_up_names_it() -> None:
    config = load_config(["+experiment=quickstart", "cluster.actor_num_gpus_per_node=3", "cluster.num_gpus_per_node=8"])
    with pytest.raises(ConfigError) as caught:
        warmup_config(config)
    (problem,) = caught.value.problems
    assert problem.path == "batch.global_batch_size"
    assert problem.origin == "in the warm-up, model.warmup_experiment=quickstart_warmup"


def test_the_folder_is_the_only_difference_to_the_config_of_the_overrides() -> None:
    warmup = warmup_config(load_config(["+experiment=quickstart"]))
    assert warmup is not None
    loaded = load_config(warmup.run.overrides)
    assert to_yaml(loaded) == to_yaml(warmup)


@pytest.mark.parametrize(
    "overrides",
    [
        ('debug.load_rollout_data="details/{rollout_id}.jsonl"', "data.num_rollout=2"),
        ("algo=sft", "batch.n_samples_per_prompt=1", "eval.interval=null", "eval.stop_reward=null"),
    ],
)
def test_a_run_without_engines_starts_from_the_weights_of_one_with_engines(overrides: tuple[str, ...]) -> None:
    config = load_config(["+experiment=quickstart", *overrides])
    with_engines, warmup = warmup_config(load_config(["+experiment=quickstart"])), warmup_config(config)
    assert config.cluster.rollout_num_gpus == 0 and warmup is not None and with_engines is not None
    assert warmup.run.dir == with_engines.run.dir
