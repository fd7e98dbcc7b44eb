"""Every sample of a rollout as a file: `debug.save_rollout_data`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlscale.errors import DataError
from rlscale.types import Group, WeightVersion


class RolloutDump:
    """Writes one JSONL file per rollout, a line per sample; a rollout that is repeated after a resume replaces its own.

    Args:
        template: path with `{rollout_id}` in it.
    """

    def __init__(self, template: str) -> None:
        self._template = template

    def write(self, rollout_id: int, groups: Sequence[Group], *, version: WeightVersion) -> None:
        """The samples as they were trained on by weights of `version`. The file is there whole or not at all."""
        path = Path(self._template.replace("{rollout_id}", str(rollout_id)))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in _records(rollout_id, groups, version))
        temporary.replace(path)


def read_dump(path: Path) -> list[dict[str, Any]]:
    """The samples of one rollout. Raises DataError naming the row that cannot be read."""
    records = []
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(dict(json.loads(line)))
        except (json.JSONDecodeError, TypeError, ValueError) as error:
            raise DataError(f"{path}, row {row} must be a JSON object, got {line[:80]!r}; dump it again") from error
    return records


def _records(rollout_id: int, groups: Sequence[Group], version: WeightVersion) -> Iterator[dict[str, Any]]:
    for group in groups:
        for sample in group.samples:
            yield {
                "rollout_id": rollout_id,
                "version": version,
                "group_index": group.index,
                "sample_index": sample.index,
                "prompt_index": sample.prompt.index,
                "prompt": sample.prompt.text,
                "response": sample.response,
                "label": sample.prompt.label,
                "reward": sample.reward,
                "status": sample.status.value,
                "seed": sample.seed,
                "tokens": sample.tokens,
                "loss_mask": sample.loss_mask,
                "rollout_logprobs": sample.rollout_logprobs,
                "weight_versions": sample.weight_versions,
                "metadata": sample.metadata,
            }
