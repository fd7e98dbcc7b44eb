"""Config files that a command of verl names are read where they lie, and reported where they do not."""

import os
from pathlib import Path

import pytest

import rlscale
from rlscale.migration.findings import Kind
from rlscale.migration.migration_report import Migration
from tests.unit.migration.test_migrate import kinds, values

CONFIG = """\
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_megatron_trainer
  - _self_
data:
  train_batch_size: 128
  max_response_length: 2048
actor_rollout_ref:
  rollout:
    n: 16
    name: sglang
"""
COMMAND = "python3 -m verl.trainer.main_ppo {} data.train_batch_size=256 actor_rollout_ref.model.path=Qwen/Qwen3-8B\n"


def translate(folder: Path, flags: str) -> Migration:
    script = folder / "examples" / "run.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(COMMAND.format(flags))
    return rlscale.migrate(script)


@pytest.mark.parametrize(
    ("place", "flags"),
    [
        ("examples/mine.yaml", "--config-name mine"),
        ("examples/mine.yaml", "--config-name=mine.yaml"),
        ("examples/config/mine.yaml", "--config-path=config --config-name=mine"),
        # Paths of a checkout are given from its root, or by a variable with the folder it is started in.
        ("examples/agent/config/mine.yaml", "--config-path=examples/agent/config --config-name='mine'"),
        ("examples/agent/config/mine.yaml", '--config-path="$(pwd)/examples/agent/config" --config-name=mine'),
        ("conf/mine.yaml", "-cp ../conf -cn mine"),
    ],
)
def test_a_named_file_is_read(tmp_path: Path, place: str, flags: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(CONFIG)
    found = translate(tmp_path, flags)
    own = values(found)
    assert own["batch.n_samples_per_prompt"] == 16 and own["rollout.max_response_len"] == 2048
    assert own["batch.rollout_batch_size"] == 256, "an override comes after the file"
    assert own["train.backend"] == "megatron", "the file is based on verl's configuration for Megatron"
    (repeated,) = [finding for finding in found.places.values() if finding.kind is Kind.repeated]
    assert repeated.place(found.root) == f"{os.path.relpath(tmp_path / place, found.root)}:8"
    assert not kinds(found, Kind.lost) and not kinds(found, Kind.wrong)


def test_files_of_the_defaults_list_come_first(tmp_path: Path) -> None:
    (tmp_path / "examples" / "algo").mkdir(parents=True)
    folder = tmp_path / "examples"
    (folder / "base.yaml").write_text("data:\n  train_batch_size: 64\n  max_prompt_length: 100\n")
    (folder / "algo" / "rloo.yaml").write_text("algorithm:\n  adv_estimator: rloo\n")
    own_list = "defaults:\n  - base\n  - algo: rloo\n  - gone\n  - _self_\n"
    (folder / "mine.yaml").write_text(own_list + "data:\n  max_prompt_length: 200\n")
    found = translate(tmp_path, "--config-name mine")
    assert values(found)["rollout.max_prompt_len"] == 200
    assert "names the config gone, which does not exist here" in found.report()
    assert "mine.yaml:4" in found.report()


def test_a_file_that_is_not_there_is_reported_with_what_to_do(tmp_path: Path) -> None:
    found = translate(tmp_path, "--config-path=configs --config-name=mine")
    (lost,) = found.losses
    assert lost.subject == "--config-name mine"
    assert lost.text.startswith("mine is neither next to the script nor in its config path; copy it there, or ")
    assert lost.text.endswith("--cfg job --resolve")
    assert values(found)["train.backend"] == "fsdp"


def test_a_bare_command_line_reads_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    found = rlscale.migrate(["--config-name", "mine", "data.train_batch_size=256"])
    assert str(found.project) == "verl"
    assert values(found)["batch.n_samples_per_prompt"] == 16


@pytest.mark.parametrize("text", ["- a\n", "data: [\n"])
def test_a_named_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "mine.yaml").write_text(text)
    if text == "- a\n":
        assert kinds(translate(tmp_path, "--config-name mine"), Kind.lost) == {"--config-name"}
    else:
        with pytest.raises(rlscale.ConfigError, match=r"input must be valid YAML or JSON"):
            translate(tmp_path, "--config-name mine")


ROLES = """\
megatron:
  - name: default
    role: actor
    overrides:
      lr: 2e-6
      sequence_parallel: true
  - name: default
    role: critic
    overrides:
      lr: 1e-5
      load: /models/value
      lr_warmup_iters: 10
      num_nodes: 2
      tensor_model_parallel_size: 2
"""
SLIME = "python3 train.py --hf-checkpoint Qwen/Qwen3-8B --advantage-estimator ppo --lr 1e-6 {}\n"


def translate_slime(folder: Path, flags: str) -> Migration:
    (folder / "run.sh").write_text(SLIME.format(flags))
    return rlscale.migrate(folder / "run.sh")


def test_the_roles_of_slime_are_read(tmp_path: Path) -> None:
    (tmp_path / "roles.yaml").write_text(ROLES)
    found = translate_slime(tmp_path, "--megatron-config-path /root/roles.yaml")
    own = values(found)
    assert float(own["optim.lr"]) == 2e-6 and own["megatron.sequence_parallel"] is True
    assert (
        float(own["critic.lr"]) == 1e-5
        and own["critic.load"] == "/models/value"
        and own["critic.lr_warmup_iters"] == 10
    )
    assert [each.subject for each in found.losses] == ["critic.tensor_model_parallel_size 2"]
    assert "replaced by `--lr 2e-6`" in found.report()


@pytest.mark.parametrize("content", [None, "tensor_model_parallel_size: 2\n"])
def test_roles_that_are_not_there_are_reported(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "roles.yaml").write_text(content)
    (lost,) = translate_slime(tmp_path, "--megatron-config-path roles.yaml").losses
    expected = "roles.yaml with a list 'megatron' is not next to the script; copy it there, and migrate again"
    assert lost.text == expected


def test_a_layer_function_becomes_the_model_provider(tmp_path: Path) -> None:
    found = translate_slime(tmp_path, "--spec mine.layers my_spec")
    assert values(found)["model.custom_model_provider_path"] == "mine.layers:my_spec"
    (hook,) = [each for each in found.places.values() if each.kind is Kind.hook]
    assert hook.key == "model.custom_model_provider_path"
    for module in ("glm4", "gptoss", "qwen3_next", "qwen3_5"):
        own = translate_slime(tmp_path, f"--spec slime_plugins.models.{module} get_spec")
        assert "model.custom_model_provider_path" not in values(own)
        assert "the architecture is read from config.json" in own.report()


def test_layers_that_megatron_core_does_not_train_here_are_lost(tmp_path: Path) -> None:
    (lost,) = translate_slime(tmp_path, "--spec slime_plugins.models.glm5.glm5 get_spec").losses
    assert lost.text.startswith("Megatron-core does not train glm_moe_dsa here")
