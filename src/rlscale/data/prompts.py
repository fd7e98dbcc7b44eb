"""Prompts from files, served in a reproducible order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, RolloutConfig, prompt_paths, prompts_name
from rlscale.data.dropped_rows import DroppedRows, no_usable_rows
from rlscale.data.length_filter import Limit, prompt_limit
from rlscale.data.prompt_order import PlainOrder, WeightedOrder
from rlscale.data.prompt_reader import DroppedRow, PromptReader, ReadingLimits, SftTarget, sft_answers
from rlscale.data.row_table import RowTable
from rlscale.data.row_values import data_fields
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.models.image_processor import load_image_processor
from rlscale.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["FilePromptSource", "SftTarget", "load_prompts", "make_reader", "prompt_limit", "sft_answers"]

CHECKED_ROWS, CHECKED_BYTES = 50_000, 1 << 25
"""Files up to this size are read and checked as a whole at the start."""

FIRST_ROWS = 256
"""Rows at the start of each larger file that are checked before the run."""

CHUNK_ROWS = 1024
MAX_REMEMBERED = 100_000
"""Dropped rows of large files that later epochs do not read again: some 50 MB of memory."""


def load_prompts(
    config: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None = None,
    sft_target: SftTarget | None = None,
) -> list[Prompt]:
    """Loads all prompts of the files of `config` that are not too long, in the order of the files.

    See `prompt_limit`. In supervised training there is no response: the limit is that of the model and of
    `rollout.max_context_len` for the prompt with its answers. Logs a warning with the number and rows of the dropped
    prompts.

    Args:
        config: the files and their fields.
        rollout: lengths.
        tokenizer: of the model.
        positions: maximum sequence length of the model; None: unlimited.
        sft_target: target of supervised training; None: engines generate the responses.

    Raises:
        DataError: a row is invalid (the message names it), or no prompt is left.
    """
    table = RowTable(prompt_paths(config), columns=data_fields(config))
    reader = make_reader(config, rollout, tokenizer, positions=positions, sft_target=sft_target)
    return list(_read_all(table, reader, DroppedRows(prompts_name(config))).values())


class FilePromptSource:
    """Serves the prompts of files, epoch after epoch.

    Small files are read at the start, which reports every row that cannot be used. Of larger ones (`CHECKED_ROWS`,
    `CHECKED_BYTES`) the first rows are checked, and the others are read when they are drawn; one that cannot be used
    then is dropped, counted and replaced by the next one.

    Invariant: every epoch contains each row exactly once; with `rollout.shuffle` its order depends on `rollout.seed`
    and the number of the epoch alone. With `data.prompt_weights` this holds for each file.

    Example:
        source = FilePromptSource(config.data, config.rollout, tokenizer)
        source.take(16)
        state = source.state_dict()  # {"epoch": 0, "position": 16, "num_prompts": 9744}
    """

    def __init__(
        self,
        config: DataConfig,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        positions: int | None = None,
        sft_target: SftTarget | None = None,
    ) -> None:
        self._name = prompts_name(config)
        self._table = RowTable(prompt_paths(config), columns=data_fields(config))
        self._reader = make_reader(config, rollout, tokenizer, positions=positions, sft_target=sft_target)
        self._dropped = DroppedRows(self._name)
        self._is_read = len(self._table) <= CHECKED_ROWS and self._table.num_bytes <= CHECKED_BYTES
        if self._is_read:
            self._known = _read_all(self._table, self._reader, self._dropped)
        else:
            self._known = _read_first(self._table, self._reader)
        self._unusable: dict[int, DroppedRow] = {}  # of large files: rows that need not be read again
        self._order = self._make_order(config.prompt_weights, seed=rollout.seed, shuffle=rollout.shuffle)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts in the order of the files: all of small files, else the first ones of each path."""
        return list(self._known.values())

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Number of rows that were dropped so far, by reason."""
        return self._dropped.counts

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts; continues with the next epoch at the end of one.

        Raises:
            DataError: a row cannot be used and `data.on_bad_row` is `error`, or no row of an epoch can be used.
        """
        prompts: list[Prompt] = []
        failed: list[DroppedRow] = []  # since the last prompt
        while len(prompts) < num_prompts:
            rows = self._order.take(num_prompts - len(prompts))
            found = self._read(rows)
            dropped = [each for each in found if isinstance(each, DroppedRow)]
            prompts += [each for each in found if isinstance(each, Prompt)]
            failed = [*failed, *dropped] if len(dropped) == len(found) else []
            self._order.give_up([each.number for each in dropped])
            new = {each.number: each for each in dropped if each.number not in self._unusable}
            self._dropped.when_drawn(list(new.values()))
            if len(self._unusable) < MAX_REMEMBERED:
                self._unusable |= new
            if len(failed) >= len(self):
                raise no_usable_rows(self._name, failed)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as JSON values."""
        return self._order.state_dict() | {"num_prompts": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`.

        Raises:
            ConfigError: the number of prompts or files differs, so the position would refer to other prompts.
        """
        num_files, own_files = (len(each.get("files", ())) for each in (state, self._order.state_dict()))
        if state["num_prompts"] == len(self) and num_files == own_files:
            self._order.load_state_dict(state)
            return
        if num_files != own_files:
            rule, value = f"have the {num_files} weights of the resumed run", f"{own_files} weights"
            fix = "resume with the same data.prompt_files and data.prompt_weights"
            raise ConfigError([Problem(path="data.prompt_weights", rule=rule, value=value, fix=fix)])
        rule = f"have the {state['num_prompts']} prompts of the resumed run"
        fix = "resume with the same file, slice and rollout.max_prompt_len"
        raise ConfigError([Problem(path="data.prompt_data", rule=rule, value=f"{len(self)} prompts", fix=fix)])

    def _read(self, rows: Sequence[int]) -> list[Prompt | DroppedRow]:
        if self._is_read:
            return [self._known[row] for row in rows]
        # A small file of several may come more than once in one call.
        unread = list(dict.fromkeys(row for row in rows if row not in self._unusable))
        found = dict(zip(unread, self._reader.read(unread, self._table.row), strict=True))
        return [self._unusable[row] if row in self._unusable else found[row] for row in rows]

    def _make_order(self, weights: Sequence[float] | None, *, seed: int, shuffle: bool) -> PlainOrder | WeightedOrder:
        if weights is None:
            rows: Sequence[int] = list(self._known) if self._is_read else range(len(self._table))
            return PlainOrder(rows, seed=seed, shuffle=shuffle)
        parts: list[Sequence[int]] = [range(part.start, part.stop) for part in self._table.parts]
        if self._is_read:
            parts = [[row for row in part if row in self._known] for part in parts]
        for part, entry in zip(parts, self._table.parts, strict=True):
            if not part:
                raise DataError(f"{entry.path} must have at least one usable prompt, got none; all rows were dropped")
        return WeightedOrder(parts, weights, seed=seed, shuffle=shuffle)


def make_reader(
    config: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None,
    sft_target: SftTarget | None,
) -> PromptReader:
    """The reader with the limits of the run; arguments as of `load_prompts`."""
    limits = ReadingLimits(
        prompt=prompt_limit(rollout, None if sft_target else positions),
        whole=_sample_limit(rollout, positions, sft_target),
    )
    # The tokenizer knows the folder of the model, which has the image processor too.
    processor = None if config.multimodal_keys is None else load_image_processor(tokenizer.name_or_path)
    return PromptReader(config, tokenizer, limits=limits, sft_target=sft_target, processor=processor)


def _read_all(table: RowTable, reader: PromptReader, log: DroppedRows) -> dict[int, Prompt]:
    """The prompts of all rows that can be used, by their number. Warns of the others."""
    prompts: dict[int, Prompt] = {}
    dropped: list[DroppedRow] = []
    for start in range(0, len(table), CHUNK_ROWS):
        numbers = range(start, min(len(table), start + CHUNK_ROWS))
        for number, each in zip(numbers, reader.read(numbers, table.row), strict=True):
            if isinstance(each, DroppedRow):
                dropped.append(each)
            else:
                prompts[number] = each
    log.at_start(dropped, len(table))
    return prompts


def _read_first(table: RowTable, reader: PromptReader) -> dict[int, Prompt]:
    """The prompts of the first rows of each path."""
    numbers = [i for part in table.parts for i in range(part.start, min(part.stop, part.start + FIRST_ROWS))]
    found = zip(numbers, reader.read(numbers, table.row), strict=True)
    return {number: each for number, each in found if isinstance(each, Prompt)}


def _sample_limit(rollout: RolloutConfig, positions: int | None, sft_target: SftTarget | None) -> Limit | None:
    """The longest prompt with its learned answers, in supervised training; None: no limit."""
    if sft_target is None:
        return None
    what = "prompts with their labels" if sft_target == SftTarget.labels else "conversations"
    context = rollout.max_context_len
    if context is not None and (positions is None or context < positions):
        return Limit(tokens=context, name="rollout.max_context_len", what=what)
    return None if positions is None else Limit(tokens=positions, name="the model's positions", what=what)
