"""The printed config is the one that runs."""

import json

import yaml
from omegaconf import OmegaConf

from rlscale.config import load_config, to_dict, to_yaml


def test_the_yaml_gives_the_same_config_back() -> None:
    config = load_config(["data.apply_chat_template_kwargs={a: 1}", "rollout.stop_token_ids=[1]", "run.name='1e-5'"])
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(config))) == to_dict(config)
    assert yaml.safe_load(to_yaml(config))["batch"] == to_dict(config)["batch"]


def test_values_are_plain() -> None:
    values = to_dict(load_config())
    assert json.loads(json.dumps(values)) == values
    assert values["algo"]["advantage_estimator"] == "grpo"


def test_one_group_can_be_written() -> None:
    text = "enabled: false\ndisable_kl_checker: false\nmetric_checker_key: null\nmetric_checker_threshold: null\n"
    assert to_yaml(load_config().ci) == text
