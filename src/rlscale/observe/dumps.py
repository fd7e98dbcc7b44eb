"""Dumps of a rollout: its samples (`debug.save_rollout_data`) and its batch (`debug.save_train_data`)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rlscale.errors import DataError
from rlscale.observe.dump_parts import write_images, write_routes
from rlscale.types import Float32, Group, TrainBatch, WeightVersion


class RolloutDump:
    """Writes one JSONL file per rollout, one line per sample, failed ones included.

    A rollout repeated after a resume overwrites its file.

    Expert routes and images are in files next to it, see `dump_parts`.

    Args:
        template: path with `{rollout_id}` in it.
    """

    def __init__(self, template: str) -> None:
        self._template = template

    def write(self, rollout_id: int, groups: Sequence[Group], *, version: WeightVersion) -> None:
        """Writes the samples that weights of `version` trained on. The file is complete or absent."""
        path = Path(self._template.replace("{rollout_id}", str(rollout_id)))
        path.parent.mkdir(parents=True, exist_ok=True)
        # First: a reader that finds the samples also finds the rest of them.
        samples = [sample for group in groups for sample in (*group.samples, *group.failed)]
        write_routes(path, samples)
        write_images(path, samples)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_line(record) for record in _records(rollout_id, groups, version))
        temporary.replace(path)

    def write_evaluation(self, version: WeightVersion, sets: Mapping[str, Sequence[Group]]) -> None:
        """Writes the samples of an evaluation; the number of the rollout in the path is `eval_<version>`.

        Each line has the name of its evaluation set in `eval_set`.
        """
        path = Path(self._template.replace("{rollout_id}", f"eval_{version}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            for name, groups in sets.items():
                for record in _records(None, groups, version):
                    file.write(_line({"eval_set": name, **record}))
        temporary.replace(path)


class BatchDump:
    """Writes one safetensors file per rollout: the columns of the `TrainBatch`, and those that the trainer computed.

    `trainer_logprobs` has the length of `tokens`, with NaN at prompt tokens and where the trainer computed no value.
    `advantages`, and as far as the run computes them `returns`, `values`, `old_logprobs`, `ref_logprobs` and
    `teacher_logprobs`, have the same length, with 0 where a token is not trainable.
    The metadata of the file has the rollout id and the weight version.

    Args:
        template: path with `{rollout_id}` in it.
    """

    def __init__(self, template: str) -> None:
        self._template = template

    def write(
        self,
        rollout_id: int,
        batch: TrainBatch,
        *,
        logprobs: Mapping[int, Float32],
        columns: Mapping[str, Float32] | None = None,
    ) -> None:
        """Writes the batch as trained. The file is complete or absent.

        Args:
            logprobs: by sample, under the weights before the rollout's first update, as in `TrainResult`.
            columns: of the trainer, as in `TrainResult`.
        """
        tensors = {name: getattr(batch, name) for name in _COLUMNS} | dict(columns or {})
        for name in ("routes", "named_rewards"):
            if getattr(batch, name) is not None:
                tensors[name] = getattr(batch, name)
        trainer = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        # The response is the end of a sample's tokens, so its logprobs end where the sample ends.
        for sample, values in logprobs.items():
            stop = int(batch.offsets[sample + 1])
            trainer[stop - len(values) : stop] = values
        path = Path(self._template.replace("{rollout_id}", str(rollout_id)))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        metadata = {"rollout_id": str(rollout_id), "version": str(batch.version)}
        save_file({**tensors, "trainer_logprobs": trainer}, temporary, metadata=metadata)
        temporary.replace(path)


_COLUMNS = (
    "tokens",
    "loss_mask",
    "rollout_logprobs",
    "weight_versions",
    "offsets",
    "prompt_lens",
    "rewards",
    "group_ids",
    "trajectory_ids",
)


def read_dump(path: Path) -> list[dict[str, Any]]:
    """Samples of one rollout. Raises DataError that names the row that cannot be read."""
    records = []
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(dict(json.loads(line)))
        except (json.JSONDecodeError, TypeError, ValueError) as error:
            raise DataError(f"{path}, row {row} must be a JSON object, got {line[:80]!r}; dump it again") from error
    return records


def _line(record: Mapping[str, Any]) -> str:
    # User code may put any object into the metadata of a sample.
    return json.dumps(record, default=str) + "\n"


def _records(rollout_id: int | None, groups: Sequence[Group], version: WeightVersion) -> Iterator[dict[str, Any]]:
    for group in groups:
        for sample in (*group.samples, *group.failed):
            yield {
                "rollout_id": rollout_id,
                "version": version,
                "group_index": group.index,
                "sample_index": sample.index,
                "path": sample.path,
                "prompt_index": sample.prompt.index,
                "prompt": sample.prompt.text,
                "response": sample.response,
                "label": sample.prompt.label,
                "reward": sample.reward,
                "status": sample.status.value,
                "failure": None if sample.failure is None else asdict(sample.failure),
                "seed": sample.seed,
                "tokens": sample.tokens.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "rollout_logprobs": sample.rollout_logprobs.tolist(),
                "weight_versions": sample.weight_versions.tolist(),
                "metadata": sample.metadata,
            }
