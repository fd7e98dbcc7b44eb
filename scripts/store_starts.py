"""Stores the weights of the agent examples' warm-ups in bfloat16, from which the tests of CI start.

Each warm-up is a minute or two of supervised training, and nightly tests run it. Run this after a change of a warm-up
experiment, of its demonstrations or of the tiny model:

    rlscale-train +experiment=calculator          # makes its warm-up in the cache; so do the other examples
    python -m scripts.store_starts ~/.cache/rlscale
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlscale.config import load_config
from rlscale.data.data_paths import resolve_data_path

ROOT = Path(__file__).parents[1]
START_FOLDER = ROOT / "tests" / "data" / "starts"
DIGESTS = START_FOLDER / "digests.json"
"""Digests of what the stored weights were made of, by warm-up; a test compares them."""

WEIGHTS = "model.safetensors"
EXAMPLES = ("calculator", "search", "guess", "two_agents")  # framework_agent starts as calculator does


def warmup_of(example: str) -> str:
    """The experiment that makes the first weights of an example."""
    name = load_config([f"+experiment={example}"]).model.warmup_experiment
    assert name is not None, f"{example} must have a warm-up"
    return name


def digest(warmup: str) -> str:
    """Digest of the experiment of a warm-up, its model and its demonstrations."""
    data = load_config([f"+experiment={warmup}"]).data.prompt_data
    assert data is not None, f"{warmup} must have demonstrations"
    options = (f"conf/experiment/{warmup}.yaml", "conf/model/tiny_qwen3_agent.yaml")
    files = (*(ROOT / option for option in options), resolve_data_path(data))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def store(cache: Path, warmup: str) -> Path:
    """Copies the newest finished run of a warm-up. Returns its folder here, with all files of the model.

    Raises:
        FileNotFoundError: the cache has no such run.
    """
    runs = sorted(cache.glob(f"warmups/{warmup}-*/finished.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise FileNotFoundError(f"{cache}/warmups must have a finished run of {warmup}; run the example once")
    model, folder = runs[-1].parent / "hf", START_FOLDER / warmup
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != WEIGHTS:
            shutil.copy(file, folder)
    weights = load_file(model / WEIGHTS)
    save_file(
        {name: each.bfloat16() for name, each in weights.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    DIGESTS.write_text(json.dumps({**digests, warmup: digest(warmup)}, indent=1, sort_keys=True) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="cache of the runs, e.g. ~/.cache/rlscale")
    parser.add_argument("--examples", nargs="+", default=EXAMPLES, choices=EXAMPLES)
    arguments = parser.parse_args()
    for example in arguments.examples:
        print(store(arguments.cache.expanduser(), warmup_of(example)))


if __name__ == "__main__":
    main()
