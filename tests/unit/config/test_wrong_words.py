"""Words of other projects: the advice names the right key, and is accepted when it is typed."""

import csv
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rlscale.cli.arguments import parse_arguments
from rlscale.config.check_fields import check_fields
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.keys import keys
from rlscale.config.passthrough import is_passthrough, megatron_args, sglang_args

DATA = Path(__file__).parents[2] / "data"
GROUPS = ConfigFolders.find().groups()
RIGHT_SHARE = 0.95


def words() -> list[dict[str, str]]:
    with (DATA / "wrong_words.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def advice(*typed: str) -> str:
    """The advice for a command line with one mistake."""
    arguments = parse_arguments(typed)
    line = parse_command_line(arguments.overrides, GROUPS)
    (problem,) = [*arguments.problems, *line.problems]
    return problem.fix


def suggested(fix: str) -> str:
    """The override or key that an advice suggests; empty without one."""
    found = re.search(r"did you mean ('[^']*'|[^?]*)\?", fix)
    return shlex.split(found[1])[0] if found else ""


def typed(word: str) -> tuple[str, ...]:
    """The command line with a word: a flag with its value, or an override."""
    return (word, "1") if word.startswith("--") else (f"{word}=1",)


@pytest.mark.slow
def test_words_of_other_projects_are_answered_with_the_right_key() -> None:
    rows = words()
    assert len(rows) >= 300 and len({row["word"] for row in rows}) == len(rows)
    assert {row["source"] for row in rows} == {"verl", "TRL", "HF", "slime"}
    unknown = {row["key"] for row in rows if row["key"] not in keys() and not is_passthrough(row["key"])}
    assert unknown == set()
    given = {row["word"]: suggested(advice(*typed(row["word"]))).partition("=")[0] for row in rows}
    wrong = [
        f"{row['word']}: {given[row['word']]}, not {row['key']}" for row in rows if given[row["word"]] != row["key"]
    ]
    assert len(wrong) <= (1 - RIGHT_SHARE) * len(rows), wrong


@pytest.mark.slow
def test_the_suggested_override_is_accepted() -> None:
    refused: dict[str, list[str]] = {}
    for row in words():
        override = suggested(advice(*typed(row["word"])))
        if "=" in override and "<value>" not in override:
            refused[row["word"]] = list(map(str, parse_command_line([override], GROUPS).problems))
    assert refused and not any(refused.values()), refused


def flags() -> list[tuple[str, str, bool]]:
    """Each flag of slime, its key, and whether it sets the key to false."""
    with (DATA / "arguments.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["argument"] and not row["experiment"]]
    found = {("--" + row["argument"].lstrip("-").replace("_", "-"), row["key"]): row["type"] for row in rows}
    return [(flag, key, "store_false" in kind) for (flag, key), kind in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "key", "inverse"), flags())
def test_every_flag_of_slime_is_answered_with_its_key(flag: str, key: str, inverse: bool) -> None:
    found = suggested(advice(flag))
    # Two groups have the flag --context-parallel-size.
    assert found.partition("=")[0] in {other for each, other, _ in flags() if each == flag}
    assert not inverse or found == f"{key}=false"


@pytest.mark.slow
def test_every_argument_that_migrates_to_a_key_is_answered_with_it() -> None:
    """The table of `rlscale-migrate` also has the arguments of older versions of slime."""
    text = (resources.files("rlscale.migration") / "tables" / "slime.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["key"] and row["argument"].startswith("--")]
    given = {row["argument"]: suggested(advice(row["argument"])).partition("=")[0] for row in rows}
    wrong = {row["argument"]: given[row["argument"]] for row in rows if given[row["argument"]] != row["key"]}
    assert len(rows) > 250
    # Two groups have this flag, and the experiment decides which of them has an effect.
    assert wrong == {"--context-parallel-size": "fsdp.context_parallel_size"}


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("--rollout-batch-size 32", "batch.rollout_batch_size=32"),
        ("--n-samples-per-prompt 8", "batch.n_samples_per_prompt=8"),
        ("--load /checkpoints/a", "checkpoint.load=/checkpoints/a"),
        ("--save /checkpoints/a", "checkpoint.save=/checkpoints/a"),
        ("--use-kl-loss", "algo.use_kl_loss=true"),
        ("--disable-grpo-std-normalization", "algo.grpo_std_normalization=false"),
        ("--eval-prompt-data aime /data/aime.jsonl", "eval.prompt_data=[aime,/data/aime.jsonl]"),
        ("--rollout-stop </s>", 'rollout.stop=["</s>"]'),
        ("--rollout-stop-token-ids 1 2", "rollout.stop_token_ids=[1,2]"),
        (
            "--apply-chat-template-kwargs '{\"enable_thinking\": false}'",
            "data.apply_chat_template_kwargs={enable_thinking: false}",
        ),
        ("--sglang-cuda-graph-max-bs 64", "sglang.cuda_graph_max_bs_decode=64"),
        ("--moe-token-dispatcher-type alltoall", "megatron.moe_token_dispatcher_type=alltoall"),
        ("--optimizer adamw", "optim.name=adam"),
        ("--dtype bf16", "train.dtype=bfloat16"),
        ("--lr 10**-4", "optim.lr=0.0001"),
        ("--prompt-data x.jsonl@[0:100]", 'data.prompt_data="x.jsonl@[0:100]"'),
    ],
)
def test_a_flag_with_its_values_becomes_an_override(command: str, override: str) -> None:
    assert suggested(advice(*shlex.split(command))) == override
    assert parse_command_line([override], GROUPS).problems == []


@pytest.mark.parametrize(
    ("section", "path", "key"),
    [
        ({"trainer": {"total_epochs": 3}}, "trainer.total_epochs", "data.num_epoch"),
        ({"actor_rollout_ref": {"rollout": {"n": 5}}}, "actor_rollout_ref.rollout.n", "batch.n_samples_per_prompt"),
        ({"data": {"val_files": "a.parquet"}}, "data.val_files", "eval.prompt_data"),
        ({"critic": {"learning_rate": 1e-6}}, "critic.learning_rate", "critic.lr"),
        ({"optimizer": {"lr": 1e-6}}, "optimizer.lr", "optim.lr"),
        ({"optim": {"optim": {"lr": 1e-6}}}, "optim.optim.lr", "optim.lr"),
        ({"optm": {"lr": 1e-6}}, "optm", "optim"),
    ],
)
def test_a_key_in_a_section_of_another_project_is_found(section: dict[str, Any], path: str, key: str) -> None:
    (problem,) = [each for each in check_fields(section, lambda _: "").problems if each.path == path]
    assert suggested(problem.fix) == key


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("trainer.val_before_train=false", "did you mean eval.skip_eval_before_train? It has the opposite value"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=256", "did you mean batch.global_batch_size? It counts samples"),
        ("max_steps=100", "did you mean data.num_rollout? It counts rollouts"),
    ],
)
def test_another_meaning_is_said(word: str, meaning: str) -> None:
    assert advice(word).startswith(meaning)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (("--config", "x.yaml"), "write --config-dir <folder> and experiment=<name>"),
        (("config=x.yaml",), "write --config-dir <folder> and experiment=<name>"),
        (("--config-name", "mine"), "write experiment=<name>"),
        (("ray_kwargs.ray_init.num_cpus=8",), "start Ray yourself"),
        (("eval.num_generations=8",), "did you mean eval.n_samples_per_prompt?"),
        (("eval.max_new_tokens=8",), "did you mean eval.max_response_len?"),
        (("critic.learning_rate=1",), "did you mean critic.lr?"),
        (("use_peft=true",), "did you mean train.lora.rank? It is a number; 0 is off"),
        (("sync_ref_model=true",), "did you mean algo.ref_update_interval? It counts rollouts; null is off"),
    ],
)
def test_a_word_is_answered_with_what_to_do(line: tuple[str, ...], fix: str) -> None:
    assert advice(*line).startswith(fix)


@pytest.mark.parametrize("name", [*sglang_args.RESERVED, *megatron_args.RESERVED])
def test_a_flag_that_rlscale_sets_is_answered_with_its_key_or_reason(name: str) -> None:
    prefix = "--sglang-" if name in sglang_args.RESERVED else "--"
    fix = advice(prefix + name.replace("_", "-"), "1")
    key = suggested(fix).partition("=")[0]
    assert key not in (f"sglang.{name}", f"megatron.{name}"), "this is refused"
    assert key in keys() or fix.startswith(("remove it", "set ", "write <group>")), fix


@pytest.mark.parametrize("line", [("--megatron-config-path", "roles.yaml"), ("megatron_config_path=roles.yaml",)])
def test_a_file_of_slime_is_answered_with_the_command_that_translates_it(line: tuple[str, ...]) -> None:
    assert "`rlscale-migrate <script>`" in advice(*line) and not suggested(advice(*line))
