"""Data sources in slime's form: a class, created with `args`, with `get_samples`, `save` and `load`."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, RunConfig
from rlscale.errors import DataError
from rlscale.plugins.args_view import Args
from rlscale.plugins.user_hook import shown
from rlscale.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METHODS = ("get_samples", "save", "load")
MAX_STATE_BYTES = 2**24
"""Limit of the files that `save` writes: a checkpoint contains them."""


class DocumentDataSourceClass:
    """A class in slime's form with the arguments of rlscale's form: makes `PromptSource` objects."""

    def __init__(self, make: Callable[[Args], Any], args: Args) -> None:
        self._make, self._args = make, args

    def __call__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DocumentPromptSource:
        return DocumentPromptSource(self._make, self._args, data=config.data, tokenizer=tokenizer)


class DocumentPromptSource:
    """A data source in slime's form as a `PromptSource`.

    Its groups are prompts: the first sample of each counts, and the run makes the samples of a group. The source never
    gets groups back by `add_samples`: those that a rollout leaves are in the buffer of the run and in its checkpoints.
    `args.save` and `args.load` name a temporary folder. What `save` writes there becomes part of a checkpoint, and is
    there again when `load` is called: a position belongs to its checkpoint, wherever that is copied.

    Args:
        make: the class, or a function that returns its instance.
        args: passed to it.
        data, tokenizer: render and tokenise prompts.

    Raises:
        TypeError: the source lacks a method.

    Example:
        source = DocumentPromptSource(MySource, Args(config), data=config.data, tokenizer=tokenizer)
        source.take(16)
    """

    def __init__(
        self, make: Callable[[Args], Any], args: Args, *, data: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        # It is removed with this object.
        self._folder = TemporaryDirectory(prefix="rlscale-data-source-")
        self._source = make(args.with_runtime({"save": self._folder.name, "load": self._folder.name}))
        self._data, self._tokenizer = data, tokenizer
        self._num_taken = 0
        self._rollout_size: int = args.rollout_batch_size
        # Checked here rather than at the first use: a run would only fail at its first checkpoint.
        missing = [name for name in METHODS if not callable(getattr(self._source, name, None))]
        if missing:
            raise TypeError(
                f"a data source of slime's form must have {', '.join(METHODS)}; it lacks {', '.join(missing)}"
            )

    def __len__(self) -> int:
        return len(self._source)

    def take(self, num_prompts: int) -> list[Prompt]:
        """See PromptSource.

        Raises:
            DataError: a group has no sample, or one that is no prompt.
        """
        groups = list(self._source.get_samples(num_prompts))
        prompts = [self._to_prompt(group, self._num_taken + number) for number, group in enumerate(groups)]
        self._num_taken += len(prompts)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """The files that `save` wrote, and the number of prompts so far.

        Raises:
            DataError: the files are too large for a checkpoint.
        """
        folder = Path(self._folder.name)
        self._source.save(self._rollout)
        files = {str(file.relative_to(folder)): file.read_bytes() for file in _files(folder)}
        if sum(map(len, files.values())) > MAX_STATE_BYTES:
            found = f"{sum(map(len, files.values()))} in {', '.join(sorted(files)[:5])}"
            raise DataError(
                f"save() of a data source must write at most {MAX_STATE_BYTES} bytes, got {found}; save the position, "
                "not the prompts"
            )
        for file in _files(folder):
            file.unlink()
        encoded = {name: b64encode(content).decode("ascii") for name, content in sorted(files.items())}
        return {"num_taken": self._num_taken, "files": encoded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        folder = Path(self._folder.name).resolve()
        for name, content in state["files"].items():
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):  # a checkpoint of somebody else
                raise DataError(f"files of a data source must be in the folder of the data source, got {name!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b64decode(content))
        self._num_taken = state["num_taken"]
        self._source.load(self._rollout)

    @property
    def _rollout(self) -> int:
        """The last rollout whose prompts were drawn, by their number; -1 before the first one."""
        return -(-self._num_taken // self._rollout_size) - 1

    def _to_prompt(self, group: Any, index: int) -> Prompt:
        sample = group[0] if isinstance(group, Sequence) and group else None
        value = getattr(sample, "prompt", None)
        tokens = tuple(getattr(sample, "tokens", None) or ())
        if not (isinstance(value, str | list) and value) and not tokens:
            found = f"{shown(group)} at index {index}"
            raise DataError(f"get_samples() must return groups of samples with a prompt, got {found}")
        if getattr(sample, "multimodal_inputs", None):
            raise DataError(f"a sample of get_samples() must have no multimodal_inputs, got some at index {index}")
        text = self._render(value)
        # A chat template already contains the special tokens, also if the source applied it.
        is_plain = isinstance(value, str) and not self._data.apply_chat_template
        ids = tokens or self._tokenizer(text, add_special_tokens=is_plain)["input_ids"]
        label = getattr(sample, "label", None)
        return Prompt(
            index=index,
            text=text,
            token_ids=tuple(int(token) for token in ids),
            label=label,
            metadata=dict(getattr(sample, "metadata", None) or {}),
        )

    def _render(self, value: Any) -> str:
        """Text of a prompt; messages pass the chat template. Empty where a sample has tokens only."""
        if isinstance(value, str) or not value:
            return value or ""
        arguments = {"add_generation_prompt": True} | self._data.apply_chat_template_kwargs
        return str(self._tokenizer.apply_chat_template(value, tokenize=False, **arguments))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
