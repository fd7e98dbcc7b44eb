"""Distillation of slime: a teacher in the trainer, or behind the URL that its reward function asks."""

import shlex
from pathlib import Path
from typing import Any

import pytest

import rlscale
from rlscale.migration.findings import Kind
from rlscale.migration.migration_report import Migration
from tests.unit.migration.test_migrate import kinds, values

MODULE = "slime.rollout.on_policy_distillation"
RUN = """\
--hf-checkpoint Qwen/Qwen3-4B --prompt-data p.jsonl --num-rollout 3 --rollout-batch-size 8 --rollout-temperature 1
--n-samples-per-prompt 1 --rollout-num-gpus 1""".replace("\n", " ")
REWARD = f"--custom-rm-path {MODULE}.reward_func"
FUNCTIONS = f"{REWARD} --custom-reward-post-process-path {MODULE}.post_process_rewards"
SERVER = "--rm-url http://10.0.0.1:13141/generate"
SERVED: dict[str, Any] = {
    "algo.opd_kl_coef": 1.0,
    "model.teacher_url": "http://10.0.0.1:13141",
    "reward.type": "zero",
}


def translate(line: str) -> Migration:
    return rlscale.migrate(shlex.split(f"{RUN} {line}"))


@pytest.mark.parametrize(
    "line",
    [
        f"--use-opd --opd-type sglang --opd-kl-coef 1.0 {FUNCTIONS} {SERVER}",
        f"--use-opd --opd-type sglang {FUNCTIONS} {SERVER}/ --rm-type math",
        f"--use-opd {FUNCTIONS.replace('.reward', ':reward')} {SERVER}",
        f"--advantage-estimator on_policy_distillation {SERVER} "
        + FUNCTIONS.replace(MODULE, "examples.on_policy_distillation.on_policy_distillation"),
    ],
)
def test_a_served_teacher(line: str) -> None:
    found = translate(line)
    own = values(found)
    assert {key: own.get(key) for key in SERVED} == SERVED
    assert found.is_complete, found.report()
    assert not {"reward.custom_path", "reward.post_process_path", "reward.url", "run.slime_modules"} & set(own)


def test_a_reward_that_has_a_task_too_is_kept() -> None:
    found = translate(f"--use-opd --opd-type sglang --custom-rm-path my.score {SERVER}")
    own = values(found)
    assert own["reward.custom_path"] == "my.score" and own["model.teacher_url"] == "http://10.0.0.1:13141"
    assert "--custom-rm-path" in kinds(found, Kind.hook) and "my.score" in kinds(found, Kind.changed)
    other = translate(f"--use-opd --opd-type sglang {REWARD} --custom-reward-post-process-path my.post {SERVER}")
    assert values(other)["reward.post_process_path"] == "my.post" and "my.post" in kinds(other, Kind.changed)


def test_a_teacher_of_the_trainer_has_no_server() -> None:
    found = translate("--use-opd --opd-type megatron --opd-teacher-load /teacher --rm-type math --label-key label")
    own = values(found)
    assert own["model.teacher_load"] == "/teacher" and own["reward.type"] == "math" and "model.teacher_url" not in own
    wrong = translate(f"--use-opd --opd-type sglang --opd-teacher-load /teacher {FUNCTIONS} {SERVER}")
    assert "--opd-teacher-load" in kinds(wrong, Kind.wrong) and "model.teacher_load" not in values(wrong)


def test_without_the_switch_the_arguments_have_no_effect() -> None:
    found = translate(f"--opd-type sglang --opd-kl-coef 0.5 --rm-type remote_rm {SERVER}")
    assert {"--opd-type", "--opd-kl-coef"} <= kinds(found, Kind.dropped)
    assert values(found)["reward.url"] == "http://10.0.0.1:13141/generate"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://${IP}:$PORT/generate", "http://${oc.env:IP}:1314"),
        ('"${TEACHER_URL:-http://h:1}/generate"', "${oc.env:TEACHER_URL,'http://h:1'}"),
        ("${TEACHER_URL:-http://h:1/generate}", "http://h:1"),
        ("$TEACHER_URL", "${oc.env:TEACHER_URL}"),
    ],
)
def test_variables_of_the_url_are_kept(given: str, url: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"PORT=1314\npython3 train.py {RUN} --use-opd --opd-type sglang {FUNCTIONS} --rm-url {given}\n",
        encoding="utf-8",
    )
    found = rlscale.migrate(script)
    assert values(found)["model.teacher_url"] == url, found.report()
