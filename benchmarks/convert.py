"""Speed of `rlscale-convert` in GB/s in both directions, compared with a copy of the same files.

Writes a random Qwen3 of about `--gigabytes` in bfloat16 once. Each round copies the folder, converts it to
Megatron-core's format and converts that back, with all files flushed to disk. Everything runs in this process, and
imports are not measured. The last folder must equal the first one, tensor by tensor. The report has medians. Writes
`results/convert.md` and `.json`.

    python benchmarks/convert.py [--gigabytes 1] [--rounds 3]
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine, sentence
from transformers import AutoModelForCausalLM, Qwen3Config

from rlscale.config import MegatronConfig
from rlscale.training.distributed import join_world
from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf, convert_to_megatron
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint

RESULTS = Path(__file__).parent / "results"
LAYER_BYTES = 2 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)  # of the layers below, in bfloat16


def write_model(folder: Path, gigabytes: float) -> None:
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / LAYER_BYTES)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def flush(folder: Path) -> None:
    """Flushes every file to disk, so that the measured time includes the write."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def copy_folder(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def convert_there(source: Path, target: Path) -> None:
    convert_to_megatron(str(source), target, sizes=MegatronConfig())


def convert_back(source: Path, target: Path) -> None:
    convert_to_hf(source, target, model=None, sizes=MegatronConfig(), dtype=torch.bfloat16)


def measure_seconds(action: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    started = time.perf_counter()
    action(source, target)
    flush(target)
    return time.perf_counter() - started


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"copy of the files": [], "to Megatron-core": [], "back to Hugging Face": []}
    source, there, back = folder / "source", folder / "there", folder / "back"
    for _ in range(rounds):
        for each in (there, back):
            shutil.rmtree(each, ignore_errors=True)
        found["copy of the files"].append(measure_seconds(copy_folder, source, folder / "copy"))
        shutil.rmtree(folder / "copy")
        found["to Megatron-core"].append(measure_seconds(convert_there, source, there))
        found["back to Hugging Face"].append(measure_seconds(convert_back, there, back))
    before, after = HfCheckpoint(str(source)), HfCheckpoint(str(back))
    assert before.files.keys() == after.files.keys()
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.files), "not the same bytes"
    return found


def report(found: dict[str, list[float]], num_bytes: int, load: float) -> str:
    rows = ["| action | s | GB/s |", "|---|---|---|"]
    for name, seconds in found.items():
        median = statistics.median(seconds)
        rows.append(f"| {name} | {median:.2f} | {num_bytes / 1e9 / median:.2f} |")
    about = (
        f"{sentence([load])} {num_bytes / 1e9:.2f} GB of bfloat16, one process, all files flushed to disk. Medians of "
        f"{len(found['copy of the files'])} interleaved rounds. The result is equal, tensor by tensor. Made by "
        "`python benchmarks/convert.py`."
    )
    return "\n".join(["# Conversion compared with a copy", "", about, "", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    join_world(0, 1, "127.0.0.1", 0, "gloo", 600.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "source", args.gigabytes)
        num_bytes = sum(file.stat().st_size for file in (folder / "source").glob("*.safetensors"))
        found = measure(folder, args.rounds)
    text = report(found, num_bytes, load)
    (RESULTS / "convert.md").write_text(text)
    content = {**machine(), "load": load, "bytes": num_bytes, "seconds": found}
    (RESULTS / "convert.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(text)
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed sometimes abort an interpreter that shuts down


if __name__ == "__main__":
    main()
