"""Every YAML file loads; overrides win over experiments and overlays."""

import csv
import json
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import yaml

from rlscale.config import load_config, load_config_with_notes
from rlscale.config.hydra.compose import compose
from rlscale.config.hydra.config_folders import packaged_folder
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.keys import keys
from rlscale.config.passthrough import is_passthrough
from rlscale.config.rules.algo import ONE_STEP
from rlscale.plan import find_hardware, make_plan
from tests.recipes import AGENT_EXAMPLES
from tests.unit.config.config_errors import config_errors
from tests.unit.config.options import (
    EXPERIMENTS,
    FOLDERS,
    GROUPS,
    OPTIONS,
    assert_wins,
    body,
    composed,
    leaves,
    selections,
)

TABLE = Path(__file__).parents[2] / "data" / "arguments.csv"

LENGTHS = {"algo.overlong_buffer_len"}  # keys of an algorithm that depend on the length of responses
SUPPORTED = {"quickstart", "quickstart_warmup", "qwen3_4b_grpo", "qwen3_30b_a3b_gspo", "sft"}
PRESET_ROWS = [row for row in csv.DictReader(TABLE.open(encoding="utf-8")) if row["experiment"]]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_valid(experiment: str) -> None:
    message = config_errors(f"experiment={experiment}")
    assert message == []
    loaded = load_config_with_notes([f"experiment={experiment}"])
    # Two of slime's published recipes set a clip range and take one step.
    assert [line for line in loaded.warnings if not line.endswith(ONE_STEP)] == []
    assert loaded.config.run.name is not None and loaded.config.run.name.startswith(f"{experiment}-")


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(selections())))
def test_every_option_wins_over_some_experiment_and_overlay(index: int) -> None:
    experiment, overlay = EXPERIMENTS[index % len(EXPERIMENTS)], GROUPS["on"][index % len(GROUPS["on"])]
    assert_wins(selections()[index], f"experiment={experiment}", f"on={overlay}")


IN_CI = set(zip(EXPERIMENTS, cycle(GROUPS["on"]), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "overlay"),
    # In CI every experiment with one overlay.
    [
        pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.nightly)
        for pair in product(EXPERIMENTS, GROUPS["on"])
    ],
)
def test_a_typed_value_wins_over_experiment_and_overlay(experiment: str, overlay: str) -> None:
    typed = sorted({*body("experiment", experiment), *body("on", overlay)})
    line = parse_command_line([f"experiment={experiment}", f"on={overlay}"], GROUPS)
    overrides = [*line.overrides, *(f"++{path}=typed" for path in typed)]
    values = dict(leaves(compose(overrides, command_line_keys=set(typed), folders=FOLDERS).values))
    assert {path: values[path] for path in typed} == dict.fromkeys(typed, "typed")


@pytest.mark.parametrize("row", PRESET_ROWS, ids=lambda row: f"{row['experiment']}:{row['key']}")
def test_a_preset_has_the_values_of_the_table(row: dict[str, str]) -> None:
    values = dict(leaves(composed(f"experiment={row['experiment']}")))
    assert values.get(row["key"], keys()[row["key"]].default) == json.loads(row["default"])


def test_options_set_keys_of_their_own_group_only() -> None:
    for group, name in OPTIONS:
        assert all(path.startswith(f"{group}.") for path in body(group, name)), (group, name)


@pytest.mark.parametrize(
    "option", [("experiment", name) for name in EXPERIMENTS] + [("on", name) for name in GROUPS["on"]]
)
def test_bodies_set_no_key_that_an_option_sets(option: tuple[str, str]) -> None:
    by_options = {path for group, name in OPTIONS for path in body(group, name)}
    assert not set(body(*option)) & by_options


@pytest.mark.parametrize(
    "path", sorted(packaged_folder().rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_files_set_known_keys_only_and_have_a_comment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    if path.parent.name in GROUPS:
        assert all(key in keys() or is_passthrough(key) for key in body(path.parent.name, path.stem))
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_on_cpu_makes_any_experiment_small(experiment: str) -> None:
    overrides = [f"experiment={experiment}", "on=cpu"]
    values, before = dict(leaves(composed(*overrides))), dict(leaves(composed(overrides[0])))
    for group in ("algo", "optim", "critic"):
        kept = {path: before[path] for path in before if path.startswith(f"{group}.") and path not in LENGTHS}
        assert {path: values[path] for path in kept} == kept
    config = load_config(overrides)
    assert config.cluster.device == "cpu" and config.model.build == "tiny_qwen3" and config.model.hf_checkpoint is None
    assert config.data.num_rollout is not None and config.data.num_rollout <= 50
    assert config.rollout.max_response_len == config.eval.max_response_len == 8


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_on_one_node_fits_one_node(experiment: str) -> None:
    # SGLang does not read the patches of the tiny Qwen2.5-VL; the error names the other model.
    other = ["model=tiny_qwen3_vl"] if experiment.startswith("quickstart_vision") else []
    config = load_config([f"experiment={experiment}", "on=one_node", *other])
    assert (config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node) == (1, 8)
    assert config.cluster.num_gpus_per_node == 8 and config.cluster.device == "cuda"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", AGENT_EXAMPLES)
def test_an_example_of_an_agent_becomes_a_recipe_for_qwen3_4b(experiment: str) -> None:
    small = load_config([f"experiment={experiment}"])
    loaded = load_config_with_notes([f"experiment={experiment}", "on=qwen3_4b"])
    assert loaded.warnings == ()
    config, other = loaded.config, load_config(["experiment=qwen3_4b_grpo"])
    assert (config.agent, config.reward, config.sandbox) == (small.agent, small.reward, small.sandbox)
    assert config.data.prompt_data == small.data.prompt_data and config.eval.prompt_data == small.eval.prompt_data
    # Without a KL term there is no reference.
    assert config.model == replace(other.model, ref_load=None) and config.cluster == other.cluster
    assert not make_plan(config, find_hardware("h100")).over_budget


def test_on_a_ray_cluster() -> None:
    before = load_config(["experiment=qwen3_4b_grpo"]).cluster
    cluster = load_config(["experiment=qwen3_4b_grpo", "on=ray_cluster"]).cluster
    assert (cluster.ray_address, before.ray_address) == ("auto", None)
    assert replace(cluster, ray_address=None) == before
    typed = load_config(["experiment=qwen3_4b_grpo", "on=ray_cluster", "cluster.ray_address=10.0.0.1:6379"])
    assert typed.cluster.ray_address == "10.0.0.1:6379"


def test_an_overlay_may_precede_the_experiment() -> None:
    overrides = ["on=cpu", "experiment=qwen3_4b_grpo"]
    assert load_config(overrides).run.name == load_config(overrides[::-1]).run.name


BASES = ("experiment=quickstart", "experiment=qwen3_4b_grpo", "experiment=sft", "experiment=qwen3_4b_ppo")
URL = "sandbox.url=http://127.0.0.1:8080"
FURTHER = {
    "data=shapes": ["model=tiny_qwen3_vl"],
    "data=geometry3k": ["model=tiny_qwen3_vl"],
    "model=hf": ["model.hf_checkpoint=/m"],
    "model=tiny_deepseek_v3": ["rollout=sglang"],
    "sandbox=fusion": [URL],
}


@pytest.mark.slow
@pytest.mark.parametrize("option", [f"{group}={name}" for group, names in GROUPS.items() for name in names])
def test_an_option_can_be_used(option: str) -> None:
    bases = [[option]] if option.startswith("experiment=") else [[base, option] for base in BASES]
    assert any(config_errors(*base, *FURTHER.get(option, ())) == [] for base in bases)


def test_options_that_need_more_keys_name_them() -> None:
    assert config_errors("algo=sft") == [
        "batch.n_samples_per_prompt must be 1 with algo.loss_type=sft_loss, got 8; set "
        "batch.n_samples_per_prompt=1; a prompt has one label "
        f"({origin('experiment/quickstart.yaml', 'n_samples_per_prompt')}; "
        f"algo.loss_type: {origin('algo/sft.yaml', 'loss_type')})"
    ]
    assert config_errors("algo=sft", "batch.n_samples_per_prompt=1") == []
    assert "choose model=hf" in config_errors("model.hf_checkpoint=/m")[0]
    assert config_errors("model=hf", "model.hf_checkpoint=/m") == []


def origin(file: str, name: str) -> str:
    path = packaged_folder() / file
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(f"{name}:"))
    try:
        return f"{path.relative_to(Path.cwd())}:{number}"
    except ValueError:
        return f"{path}:{number}"
