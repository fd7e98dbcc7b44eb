"""Architecture fields of the options of conf/model."""

from functools import cache
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import CONFIG_NAMES, architecture_fields
from rlscale.config import ModelConfig
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.yaml_files import read_yaml_files

FOLDERS = ConfigFolders.find()
OPTIONS = [option for option in FOLDERS.groups()["model"] if option != "hf"]


@cache
def model_fields(option: str) -> dict[str, Any]:
    """Fields of an option by key of the group `model`. Reads its file only: the tests of every option call this."""
    model = ModelConfig(**read_yaml_files([("model", option)], FOLDERS).values()["model"])
    own = {name: getattr(model, name) for name in CONFIG_NAMES}
    return architecture_fields(own, build=model.build, hf_checkpoint=None)


MEGATRON_OPTIONS = [option for option in OPTIONS if find_family(model_fields(option)["model_type"]).megatron]
"""Options of families that Megatron-core trains."""
