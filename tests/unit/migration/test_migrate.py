"""Translations of whole inputs: every argument has one place, and the experiment says what the input says."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlscale
from rlscale.config.serialize import flatten
from rlscale.errors import ConfigError
from rlscale.migration.findings import IN_EXPERIMENT, Kind
from rlscale.migration.migration_report import Migration
from rlscale.migration.model_option import option_values
from tests.unit.migration.scripts import FOLDER, INPUTS, find


def translate(name: str, **given: str) -> Migration:
    return rlscale.migrate(find(name), set=given)


def values(found: Migration) -> dict[str, Any]:
    """The values that the experiment sets, those of its options included, by path."""
    nested = yaml.safe_load(found.yaml)
    options = {
        group.removeprefix("override /"): name for each in nested.pop("defaults", []) for group, name in each.items()
    }
    own = {path: value for group, name in options.items() for path, value in option_values(group, name).items()}
    return own | dict(flatten(nested))


def kinds(found: Migration, kind: Kind) -> set[str]:
    """The names of the arguments and variables of a kind of finding."""
    return {finding.subject.split()[0].partition("=")[0] for finding in found.findings() if finding.kind is kind}


@pytest.mark.slow
@pytest.mark.parametrize("path", INPUTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_argument_has_one_place(path: Path) -> None:
    found = rlscale.migrate(path)
    set_by_yaml = values(found)
    lines = Counter(found.report().splitlines())
    place_lines = Counter(f"  {place.line(found.root)}" for place in found.places.values())
    assert len(found.places) == len(found.arguments) > 0
    for argument in found.arguments:
        place = found.places[argument.index]
        if place.kind in IN_EXPERIMENT:
            is_set = any(path == place.key or path.startswith(f"{place.key}.") for path in set_by_yaml)
            assert is_set, f"{argument.text} must be in the experiment"
        if place.kind is not Kind.renamed:
            # An argument that is given twice in the same way on one line has two equal lines.
            line = f"  {place.line(found.root)}"
            assert lines[line] == place_lines[line], f"{argument.text} must have a line in the report"
        else:
            assert f"  {place.line(found.root)}" not in lines


@pytest.mark.slow
def test_a_script_of_slime() -> None:
    found = translate("slime/624b824/scripts/run-qwen3-4B.sh")
    assert (
        values(found).items()
        >= {
            "model.hf_checkpoint": "/root/Qwen3-4B",
            "model.num_layers": 36,
            "data.prompt_data": "/root/dapo-math-17k/dapo-math-17k.jsonl",
            "data.num_rollout": 3000,
            "batch.rollout_batch_size": 32,
            "batch.global_batch_size": 256,
            "algo.use_kl_loss": True,
            "algo.advantage_estimator": "grpo",
            "reward.type": "deepscaler",
            "cluster.actor_num_gpus_per_node": 8,
            "cluster.colocate": True,
            "eval.prompt_data": ["aime", "/root/aime-2024/aime-2024.jsonl"],
            "checkpoint.save": "/root/Qwen3-4B_slime/",
        }.items()
    )
    assert "override /model: qwen3_4b" in found.yaml and "override /reward: deepscaler" in found.yaml
    # The folder of --save is resumed from, and the reference is a conversion of the checkpoint.
    assert {"--load", "--ref-load", "--hidden-dropout"} <= kinds(found, Kind.dropped)
    assert {"--swiglu", "--num-layers"} <= kinds(found, Kind.architecture)
    assert not found.losses
    assert kinds(found, Kind.variable) >= {"NUM_GPUS", "MASTER_ADDR"}


@pytest.mark.slow
def test_async_launchers_have_a_staleness() -> None:
    found = translate("slime/624b824/examples/fully_async/run-qwen2.5-0.5B-fully_async.sh")
    assert values(found).items() >= {"rollout.max_staleness": 1, "rollout.update_mode": "in_flight"}.items()
    assert values(found)["algo.decoupled_loss"] is False


@pytest.mark.slow
def test_supervised_training() -> None:
    found = translate("slime/624b824/scripts/run-qwen3-4B-base-sft.sh")
    assert values(found)["algo.loss_type"] == "sft_loss"
    assert {"--rollout-function-path", "--debug-train-only"} <= kinds(found, Kind.dropped)
    assert values(found)["data.apply_chat_template"] is True


def test_distillation_from_a_teacher() -> None:
    found = translate("slime/624b824/examples/on_policy_distillation/run-qwen3-8B-opd-megatron.sh")
    assert values(found)["algo.opd_kl_coef"] == 1.0
    assert values(found)["model.teacher_load"]
    other = translate("slime/624b824/examples/on_policy_distillation/run-qwen3-8B-opd.sh")
    assert other.is_complete and "override /reward: zero" in other.yaml


def test_arguments_given_twice() -> None:
    found = translate("slime/624b824/scripts/run-deepseek-r1.sh")
    assert "--moe-token-dispatcher-type" in kinds(found, Kind.repeated)
    assert values(found)["megatron.moe_token_dispatcher_type"] == "flex"
    assert values(found)["megatron.num_layers_in_last_pipeline_stage"] == 13


def test_mistakes_of_a_script_are_reported_with_their_line() -> None:
    found = translate("slime/624b824/scripts/run-qwen2.5-0.5B-reproducibility.sh")
    wrong = [finding for finding in found.findings() if finding.kind is Kind.wrong]
    assert any("does not exist here" in finding.subject for finding in wrong)
    assert all(finding.source is not None and finding.source.line > 1 for finding in wrong)


def test_versions_of_slime_are_recognised() -> None:
    lines = {
        name: next(finding.text for finding in translate(name).notes if finding.subject == "slime")
        for name in ("slime/v0.2.2/scripts/run-qwen3-4B-fsdp.sh", "slime/624b824/scripts/run-glm5.2-744B-A40B.sh")
    }
    assert "v0.2.2" in lines["slime/v0.2.2/scripts/run-qwen3-4B-fsdp.sh"]
    assert "HEAD" in lines["slime/624b824/scripts/run-glm5.2-744B-A40B.sh"]


def test_given_variables_are_written() -> None:
    found = translate("slime/624b824/scripts/run-qwen3-4B.sh", NUM_GPUS="4")
    assert values(found)["cluster.actor_num_gpus_per_node"] == 4


def test_a_bare_command_line() -> None:
    words = [
        "--hf-checkpoint",
        "Qwen/Qwen3-4B",
        "--lr=1e-6",
        "--disable-rewards-normalization",
        "--n-samples-per-prompt",
        "8",
    ]
    found = rlscale.migrate(words)
    assert (
        values(found).items()
        >= {
            "optim.lr": 1e-6 if not isinstance(values(found)["optim.lr"], str) else "1e-6",
            "algo.rewards_normalization": False,
            "batch.n_samples_per_prompt": 8,
        }.items()
    )
    assert "override /model: qwen3_4b" in found.yaml


VERL = [
    "python3",
    "-m",
    "verl.trainer.main_ppo",
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B",
    "data.train_files=a.parquet",
]
SLIME = ["--hf-checkpoint", "Qwen/Qwen3-4B", "--n-samples-per-prompt", "8"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"algo.advantage_estimator": "ppo"}),
        (["algorithm.adv_estimator=grpo"], {"algo.rewards_normalization": False}),
        (
            ["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"],
            {"algo.advantage_estimator": "grpo", "algo.rewards_normalization": False},
        ),
    ],
)
@pytest.mark.slow
def test_groups_of_one_sample_of_verl(words: list[str], expected: dict[str, Any]) -> None:
    found = rlscale.migrate([*VERL, *words])
    assert values(found).items() >= expected.items()
    assert found.problems == ()
    more = rlscale.migrate([*VERL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"])
    assert "algo.rewards_normalization" not in values(more)


@pytest.mark.parametrize(
    ("words", "dropped", "expected"),
    [
        (
            ["--lr-warmup-iters", "10", "--lr-warmup-fraction", "0.1"],
            "--lr-warmup-iters",
            {"optim.warmup_ratio": 0.1},
        ),
        (["--save-debug-rollout-data", "/a/b.pt"], None, {"debug.save_rollout_data": "/a/b_{rollout_id}.pt"}),
        (
            [
                "--rollout-function-path",
                "slime_plugins.rollout_buffer.x.generate",
                "--rollout-buffer-url",
                "http://a:1",
            ],
            "--rollout-function-path",
            {"buffer.url": "http://a:1"},
        ),
    ],
)
def test_arguments_of_slime_that_another_one_replaces(
    words: list[str], dropped: str | None, expected: dict[str, Any]
) -> None:
    found = rlscale.migrate([*SLIME, *words])
    assert values(found).items() >= expected.items()
    assert dropped is None or dropped in kinds(found, Kind.dropped)
    assert not [
        problem for problem in found.problems if problem.path.startswith(("debug", "optim", "rollout.function"))
    ]


def test_the_weight_that_verl_only_reports_is_not_used() -> None:
    name = "algorithm.rollout_correction"
    words = [*VERL, "algorithm.adv_estimator=grpo", f"{name}.bypass_mode=True", f"{name}.rollout_is=token"]
    found = rlscale.migrate([*words, f"{name}.rollout_is_threshold=2.0", f"{name}.rollout_is_batch_normalize=false"])
    assert "algo.use_tis" not in values(found) and f"{name}.rollout_is" in kinds(found, Kind.dropped)
    assert found.problems == ()


def test_secrets_are_not_written() -> None:
    found = rlscale.migrate(["--hf-checkpoint", "Qwen/Qwen3-4B", "--use-wandb", "--wandb-key", "abc123secret"])
    assert "abc123secret" not in found.yaml
    assert "abc123secret" not in found.report() and "abc123secret" not in json.dumps(found.to_dict())


@pytest.mark.parametrize("given", ["none.sh", str(FOLDER), ["hello"], "a b c"])
def test_an_input_that_cannot_be_read_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="input must"):
        rlscale.migrate(given)


def test_the_result_is_written(tmp_path: Path) -> None:
    found = rlscale.migrate(["--hf-checkpoint", "Qwen/Qwen3-4B", "--rollout-batch-size", "8"], name="mine")
    file = found.write(tmp_path)
    assert file == tmp_path / "experiment" / "mine.yaml" and file.read_text() == found.yaml
    assert (tmp_path / "mine.report.txt").read_text() == found.report()


def test_low_precision_of_slime_is_translated_or_refused_by_name() -> None:
    found = translate("slime/624b824/scripts/run-glm5.2-744B-A40B.sh", BASE_DIR="/root")
    assert values(found)["rollout.weight_precision"] == "fp8"
    found = translate("slime/624b824/scripts/low_precision/run-qwen3-30B-A3B-int4.sh")
    assert {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "Qwen3-30B-A3B-INT4"} <= kinds(found, Kind.lost)
    assert "rollout.weight_precision" not in values(found)


LAUNCH = "train.py --hf-checkpoint Qwen/Qwen3-4B --rollout-batch-size 8"


@pytest.mark.parametrize(
    ("line", "unresolved"),
    [
        (f"python3 {LAUNCH} $ARGS", 1),
        (f"python3 {LAUNCH.replace('py', 'py $ARGS $ARGS', 1)} --lr 1e-6 $ARGS --bf16", 3),
    ],
)
def test_arguments_that_a_program_prints_are_reported(line: str, unresolved: int, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"ARGS=$(cat args.txt)\n{line}\n", encoding="utf-8")
    found = rlscale.migrate(script)
    lost = [place for place in found.places.values() if place.kind is Kind.unresolved]
    assert len(lost) == unresolved and all(place.subject == "<cat args.txt>" for place in lost)
    assert values(found)["batch.rollout_batch_size"] == 8
    assert values(rlscale.migrate(script, set={"ARGS": "--num-rollout 7"}))["data.num_rollout"] == 7


def test_a_command_in_quotes_keeps_its_variables(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"srun bash -c \"python3 {LAUNCH} --num-rollout ${{N:-3}} --save '/a b/$X'\"\n", encoding="utf-8")
    own = values(rlscale.migrate(script))
    assert own["data.num_rollout"] == "${oc.env:N,3}" and own["checkpoint.save"] == "/a b/${oc.env:X}"


@pytest.mark.parametrize(
    "lines",
    [
        'if [ "$MODE" = fast ]; then LR=1; fi',
        "[[ $MODE == fast ]] && LR=1",
        'test "$MODE" = fast && LR=1',
        "case $MODE in fast) LR=1 ;; esac",
        "LR=${MODE^^}",
    ],
)
def test_a_variable_that_decides_is_no_idle_one(lines: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{lines}\npython train.py --hf-checkpoint x --wandb-group ${{OTHER:+$IDLE}}\n: $IDLE\n")
    found = {each.subject: each.text for each in rlscale.migrate(script).findings() if each.kind is Kind.variable}
    assert "the script decides or computes by it" in found["MODE"]
    assert "no argument depends on it" in found["IDLE"]


def test_unknown_arguments_of_a_python_call_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text("from trl import GRPOConfig\nargs = GRPOConfig(beta=0.1, **read_more())\n")
    assert "**read_more()" in kinds(rlscale.migrate(script), Kind.lost)
