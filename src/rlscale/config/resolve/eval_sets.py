"""The data sets of an evaluation and their settings: from `eval.prompt_data`, or from the file `eval.config`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from rlscale.config.groups.data import DataConfig
from rlscale.config.groups.eval import EvalConfig
from rlscale.config.groups.reward import RewardConfig
from rlscale.config.resolve.eval_file import OF_GROUP, EvalFileSet, read_eval_file


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetConfig:
    """One data set: the group `eval` with the values of this set, and what the file alone can set."""

    name: str
    path: str
    eval: EvalConfig
    own: EvalFileSet

    def data(self, config: DataConfig) -> DataConfig:
        """The group `data` for the file of this set."""
        own = self.own
        given = {
            "tool_key": self.eval.tool_key,
            "metadata_key": own.metadata_key,
            "apply_chat_template": own.apply_chat_template,
            "apply_chat_template_kwargs": own.apply_chat_template_kwargs,
        }
        kept = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _OTHER_FILES}
        kept |= {name: value for name, value in given.items() if value is not None}
        kept["input_key"] = self.eval.input_key or config.input_key
        kept["label_key"] = self.eval.label_key or config.label_key
        return DataConfig(**kept, prompt_data=self.path)

    def reward(self, config: RewardConfig) -> RewardConfig | None:
        """The group `reward` for this set; None: the reward of the run scores it.

        A built-in reward of the run also computes those that rows name, so that it can stand for `rm_type`.
        """
        own, key = self.own, self.eval.reward_key
        if own.custom_rm_path is None and own.rm_type is None:
            return None
        if own.custom_rm_path is None and _serves_rows(config) and key == config.key:
            return None
        return replace(
            config,
            type=own.rm_type,
            custom_path=own.custom_rm_path,
            functions={},
            weights={},
            key=key,
            group=False,
        )


_OTHER_FILES = ("prompt_data", "prompt_files", "prompt_weights")
"""Keys of the group `data` that name files or belong to them: a set has one file."""


def _serves_rows(config: RewardConfig) -> bool:
    """Whether the reward of the run follows `rm_type` in the metadata of a row."""
    return config.type is not None and config.custom_path is None and not config.functions and not config.weights


def eval_sets(config: EvalConfig) -> list[EvalSetConfig]:
    """The data sets of an evaluation; a single path in `eval.prompt_data` is named `eval`. Empty without any.

    Raises:
        ConfigError: the file of `eval.config` cannot be used; lists all its problems.
    """
    if config.config is not None:
        return [_of_file(config, each) for each in read_eval_file(config.config)]
    given = config.prompt_data or []
    # Names and paths alternate.
    pairs = [("eval", given[0])] if len(given) == 1 else zip(given[::2], given[1::2], strict=True)
    return [
        EvalSetConfig(name=name, path=path, eval=config, own=EvalFileSet(name=name, path=path)) for name, path in pairs
    ]


def _of_file(config: EvalConfig, own: EvalFileSet) -> EvalSetConfig:
    given = {name: value for name in OF_GROUP if (value := getattr(own, name)) is not None}
    return EvalSetConfig(name=own.name, path=own.path, eval=replace(config, **given), own=own)
