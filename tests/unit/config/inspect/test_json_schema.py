"""JSON schemas of the YAML files; every file of `conf/` is validated."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf._utils import get_yaml_loader

from rlscale.config import load_config, to_yaml
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.inspect.json_schema import editor_settings, make_schemas, recorded_types
from rlscale.config.keys import keys

ROOT = Path(__file__).parents[4]
CONF = ROOT / "conf"
SCHEMAS = make_schemas(ConfigFolders.find(), recorded_types())


def validator(folder: str) -> Draft7Validator:
    name = f"{folder}.json" if f"{folder}.json" in SCHEMAS else "experiment.json"
    return Draft7Validator(SCHEMAS[name])


def schema_errors(folder: str, text: str) -> list[str]:
    found = validator(folder).iter_errors(yaml.load(text, Loader=get_yaml_loader()))
    return [".".join(map(str, error.absolute_path)) + ": " + error.message for error in found]


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_is_a_schema(name: str) -> None:
    Draft7Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_of_conf_is_valid(file: Path) -> None:
    folder = file.parent.name if file.parent != CONF else "experiment"
    assert schema_errors(folder, file.read_text(encoding="utf-8")) == []


def test_the_config_of_a_run_is_valid() -> None:
    assert schema_errors("experiment", to_yaml(load_config(["sglang.page_size=16"]))) == []


@pytest.mark.parametrize(
    ("folder", "text", "message"),
    [
        ("algo", "eps_clp: 0.1", "'eps_clp' was unexpected"),
        ("algo", "eps_clip: abc", "eps_clip"),
        ("algo", "eps_clip: 0", "eps_clip"),
        ("algo", "loss_type: policy", "loss_type"),
        ("algo", "mis: {levle: token}", "'levle' was unexpected"),
        ("experiment", "algo: {eps_clp: 0.1}", "'eps_clp' was unexpected"),
        ("experiment", "algoo: {}", "'algoo' was unexpected"),
        ("experiment", "sglang: {page_size: x}", "sglang.page_size"),
        ("experiment", "sglang: {pagesize: 1}", "'pagesize' was unexpected"),
        ("experiment", "defaults: [{override /algo: gsp}]", "defaults.0"),
        ("experiment", "eval: {prompt_data: a.jsonl}", "eval.prompt_data"),
    ],
)
def test_an_error_is_marked(folder: str, text: str, message: str) -> None:
    found = schema_errors(folder, text)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("algo", "eps_clip: ${optim.lr}"),
        ("algo", "eps_clip_high: null"),
        ("experiment", "custom: {anything: [1, a]}"),
        ("experiment", "hydra: {sweeper: {params: {optim.lr: 'interval(1e-5,1e-3)'}}}"),
        ("experiment", "defaults: [quickstart, {override /algo: gspo}, {override hydra/sweeper: optuna}, _self_]"),
        ("experiment", "megatron: {tensor_model_parallel_size: 2}"),
    ],
)
def test_valid_text_is_not_marked(folder: str, text: str) -> None:
    assert schema_errors(folder, text) == []


def test_every_key_is_described() -> None:
    whole: Any = SCHEMAS["experiment.json"]
    for path, key in keys().items():
        node = whole
        for name in path.split("."):
            node = node["properties"][name]
        assert node["description"].startswith(key.description), path
        assert key.required or node["default"] == json.loads(json.dumps(key.default, default=str))


def test_the_settings_of_the_editor_name_files_that_exist() -> None:
    committed = (ROOT / ".vscode" / "settings.json").read_text(encoding="utf-8")
    assert committed == editor_settings(ConfigFolders.find(), "docs/reference/schema", "conf")
    for schema, files in json.loads(committed)["yaml.schemas"].items():
        assert (ROOT / schema).is_file()
        for pattern in [files] if isinstance(files, str) else files:
            assert list(ROOT.glob(pattern)), pattern
