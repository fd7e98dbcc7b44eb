"""Files that stand in for those of a run: tokenizer and weights of the tiny model, and missing data sets."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.config import RunConfig, prompt_paths
from rlscale.config.resolve.eval_sets import eval_sets
from rlscale.config.rules import learns_conversations, uses_engines
from rlscale.data.data_paths import is_missing, resolve_data_path, row_slice
from rlscale.images import IMAGE_MARK, to_data_url
from rlscale.rehearsal.tiny_family import INITIALIZER_RANGE

NUM_ROWS = 64
MAX_ROWS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """Data files of the rehearsal: those of the run, or generated ones in place of missing ones."""

    train: tuple[str, ...]
    evaluation: tuple[str, ...]  # name, path, name, path
    generated: dict[str, str] = field(default_factory=dict)  # missing path -> file


def stand_in_data(config: RunConfig, folder: Path) -> DataFiles:
    """Generates every data set that is missing, in the format and with the fields that the config reads."""
    generated: dict[str, str] = {}
    data, evaluation = config.data, config.eval

    images_key = (data.multimodal_keys or {}).get("image")

    def existing(path: str, *, name: str, fields: tuple[str, str | None], conversation: bool) -> str:
        if not is_missing(path):
            return path
        file = resolve_data_path(path)
        stand_in = folder / f"{name}{'.jsonl' if file.suffix == '.gz' else file.suffix}"
        rows = row_slice(path)
        # The rows that a slice selects exist, too.
        number = min(MAX_ROWS, max(NUM_ROWS, *(abs(bound or 0) + NUM_ROWS for bound in (rows.start, rows.stop))))
        row_keys = RowKeys(input=fields[0], label=fields[1], images=images_key)
        write_rows(stand_in, row_keys, number=number, conversation=conversation)
        text = str(stand_in) + path[len(path.split("@[")[0]) :]
        generated[path] = text
        return text

    keys = (data.input_key, data.label_key)
    talks = learns_conversations(config)
    train = tuple(
        existing(path, name=f"train{number or ''}", fields=keys, conversation=talks)
        for number, path in enumerate(prompt_paths(data) if data.rollout_global_dataset else ())
    )
    sets: list[str] = []
    if evaluation.interval is not None and uses_engines(config):
        for each in eval_sets(evaluation):
            keys = (each.eval.input_key or data.input_key, each.eval.label_key or data.label_key)
            sets += [each.name, existing(each.path, name=f"eval_{each.name}", fields=keys, conversation=False)]
    return DataFiles(train=train, evaluation=tuple(sets), generated=generated)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """Fields of a row."""

    input: str
    label: str | None = None
    images: str | None = None  # None: text only


def write_rows(file: Path, keys: RowKeys, *, number: int, conversation: bool) -> None:
    """Writes sums as prompts with their results as labels, to a `.jsonl` or `.parquet` file.

    A file with another ending gets JSON lines: reading it fails as it would with the real file.
    """
    rows: list[dict[str, Any]] = []
    for i in range(number):
        mark = "" if keys.images is None else IMAGE_MARK
        question, answer = f"{mark}What is {i} + {i + 1}?", str(2 * i + 1)
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        row: dict[str, Any] = _nest(keys.input, chat if conversation else question)
        row |= {} if keys.label is None else _nest(keys.label, answer)
        rows.append(row if keys.images is None else row | _nest(keys.images, [to_data_url(_draw(i))]))
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        # Imported here: an optional package, which JSON lines do not need.
        from pyarrow import Table, parquet  # type: ignore[import-untyped]

        parquet.write_table(Table.from_pylist(rows), str(file))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _draw(number: int) -> bytes:
    """A picture that depends on the number, as PNG."""
    # Imported here: an extra, which only models with images need.
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (number * 37 % 256, number * 11 % 256, 128)).save(buffer, "PNG")
    return buffer.getvalue()


def _nest(key: str, value: Any) -> dict[str, Any]:
    """An object with a value under `outer.inner`."""
    outer, _, inner = key.partition(".")
    return {outer: _nest(inner, value) if inner else value}


def write_model(folder: Path, config_json: Mapping[str, Any], *, seed: int) -> None:
    """Writes a model with random weights and the byte tokenizer in Hugging Face format."""
    # Imported here: torch and transformers take seconds, and the checks of a rehearsal come before them.
    from rlscale.models.byte_tokenizer import byte_tokenizer
    from rlscale.models.random_weights import save_random_model

    has_images = find_family(config_json["model_type"]).vision is not None
    tokenizer = byte_tokenizer(int(config_json["max_position_embeddings"]), has_images=has_images)
    folder.mkdir(parents=True, exist_ok=True)
    save_random_model(folder, config_json, tokenizer, seed=seed)
    if number := int(config_json.get("num_nextn_predict_layers") or 0):
        _add_mtp_layers(folder, config_json, number=number, seed=seed)


def _add_mtp_layers(folder: Path, config_json: Mapping[str, Any], *, number: int, seed: int) -> None:
    """Adds layers for multi-token prediction to the weights, which transformers does not know.

    Each has the decoder layer of the last one, a random projection, and norms of ones.
    """
    # Imported here: as above.
    import torch
    from safetensors.torch import load_file, save_file

    mtp, file = find_family(config_json["model_type"]).mtp, folder / "model.safetensors"
    assert mtp is not None, "only families with such layers have a number of them"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    num_layers, width = int(config_json["num_hidden_layers"]), int(config_json["hidden_size"])
    last = f"model.layers.{num_layers - 1}."
    for k in range(number):
        prefix = mtp.hf_layer.format(i=num_layers + k, k=k)
        layer = {f"{prefix}.{name.removeprefix(last)}": tensor for name, tensor in tensors.items() if last in name}
        for weight in mtp.own:
            is_matrix = weight.megatron.startswith("eh_proj")
            projection = torch.randn(width, 2 * width, generator=generator) * INITIALIZER_RANGE
            layer[f"{prefix}.{weight.hf[0]}"] = projection if is_matrix else torch.ones(width)
        layer |= {f"{prefix}.{copy}": tensors[name] for name, copy in mtp.copies.items() if name in tensors}
        # safetensors refuses tensors that share memory.
        tensors |= {name: tensor.clone() for name, tensor in layer.items()}
    save_file(tensors, file, metadata={"format": "pt"})
