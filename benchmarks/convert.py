"""Speed of `rlscale-convert` in GB/s, both ways, beside copying the same files.

A random Qwen3 of about `--gigabytes` in bfloat16 is written once. Then in each round, in turn: the folder is copied and
flushed to disk, converted to Megatron-core's format, and converted back, each in this process without the time of its
imports. The last folder is compared with the first one, tensor by tensor. Reported are medians. Writes
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
    """Brings every file to the disk, so that no way is faster by leaving that for later."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def to_core(source: Path, target: Path) -> None:
    convert_to_megatron(str(source), target, sizes=MegatronConfig())


def from_core(source: Path, target: Path) -> None:
    convert_to_hf(source, target, model=None, sizes=MegatronConfig(), dtype=torch.bfloat16)


def seconds_of(way: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    started = time.perf_counter()
    way(source, target)
    flush(target)
    return time.perf_counter() - started


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"copy of the files": [], "to Megatron-core": [], "back to Hugging Face": []}
    source, there, back = folder / "source", folder / "there", folder / "back"
    for _ in range(rounds):
        for each in (there, back):
            shutil.rmtree(each, ignore_errors=True)
        found["copy of the files"].append(seconds_of(copied, source, folder / "copy"))
        shutil.rmtree(folder / "copy")
        found["to Megatron-core"].append(seconds_of(to_core, source, there))
        found["back to Hugging Face"].append(seconds_of(from_core, there, back))
    before, after = HfCheckpoint(str(source)), HfCheckpoint(str(back))
    assert before.files.keys() == after.files.keys()
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.files), "not the same bytes"
    return found


def report(found: dict[str, list[float]], num_bytes: int, load: float) -> str:
    rows = ["| way | s | GB/s |", "|---|---|---|"]
    for name, seconds in found.items():
        median = statistics.median(seconds)
        rows.append(f"| {name} | {median:.2f} | {num_bytes / 1e9 / median:.2f} |")
    about = (
        f"{sentence([load])} {num_bytes / 1e9:.2f} GB of bfloat16, one process, everything flushed to disk. Medians of "
        f"{len(found['copy of the files'])} rounds in turn. What comes back is equal, tensor by tensor. Made by "
        "`python benchmarks/convert.py`."
    )
    return "\n".join(["# Conversion beside a copy", "", about, "", *rows, ""])


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
    os._exit(0)  # threads of torch.distributed now and then abort an interpreter that winds down


if __name__ == "__main__":
    main()
