"""Stores the weights of warm-ups in bfloat16, from which runs of CI start that learn.

Each warm-up is a minute or two of supervised training; nightly tests run it, and `bin/quickstart` runs its own. Run
this after a change of a warm-up experiment, of its demonstrations or of the tiny model:

    rlscale-train +experiment=calculator          # makes its warm-up in the cache; so do the others of STARTS
    python -m scripts.store_starts ~/.cache/rlscale
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml
from safetensors.torch import load_file, save_file

from rlscale.config import load_config
from rlscale.data.data_paths import resolve_data_path

ROOT = Path(__file__).parents[1]
START_FOLDER = ROOT / "tests" / "data" / "starts"
DIGESTS = START_FOLDER / "digests.json"
"""Digests of what the stored weights were made of, by warm-up; a test compares them."""

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run that begins with a warm-up."""

    experiment: str
    model: str = "tiny_qwen3_agent"
    sizes: tuple[str, ...] = ()
    """Overrides of the model."""

    @property
    def overrides(self) -> list[str]:
        """Of the command line, but for the experiment."""
        return [f"model={self.model}", *self.sizes]

    @property
    def warmup(self) -> str:
        """The experiment that makes the first weights."""
        name = load_config([f"+experiment={self.experiment}"]).model.warmup_experiment
        assert name is not None, f"{self.experiment} must have a warm-up"
        return name

    @property
    def digest(self) -> str:
        """Digest of the experiment of the warm-up, its model and its demonstrations."""
        data = load_config([f"+experiment={self.warmup}"]).data.prompt_data
        assert data is not None, f"{self.warmup} must have demonstrations"
        options = (f"conf/experiment/{self.warmup}.yaml", f"conf/model/{self.model}.yaml")
        files = (*(ROOT / option for option in options), resolve_data_path(data))
        content = b"".join(file.read_bytes() for file in files) + "".join(self.sizes).encode()
        return hashlib.sha256(content).hexdigest()


NARROW = ("model.num_layers=3", "model.hidden_size=96", "model.intermediate_size=256", "model.head_dim=24")
"""The sizes of tiny_qwen2_5_vl, for the tower and deepstack of tiny_qwen3_vl: half the time of the whole model."""

STARTS = {
    "calculator_warmup": Start(experiment="calculator"),  # framework_agent starts from it, too
    "code_warmup": Start(experiment="code"),
    "guess_warmup": Start(experiment="guess"),
    "quickstart_warmup": Start(experiment="quickstart", model="tiny_qwen3"),
    "search_warmup": Start(experiment="search"),
    "two_agents_warmup": Start(experiment="two_agents"),
    "tiny_qwen2_5_vl": Start(experiment="quickstart_vision", model="tiny_qwen2_5_vl"),
    "narrow_qwen3_vl": Start(experiment="quickstart_vision", model="tiny_qwen3_vl", sizes=NARROW),
}
"""What is stored, by folder."""


def store(cache: Path, name: str) -> Path:
    """Copies the newest finished run of a warm-up with the model. Returns its folder here, with all files of the model.

    Raises:
        FileNotFoundError: the cache has no such run.
    """
    start = STARTS[name]
    runs = [file.parent for file in cache.glob(f"warmups/{start.warmup}-*/finished.json") if _is_of(file.parent, start)]
    if not runs:
        command = " ".join(["rlscale-train", f"+experiment={start.experiment}", *start.overrides])
        raise FileNotFoundError(f"{cache}/warmups must have the warm-up of {name}; run this once: {command}")
    model, folder = max(runs, key=lambda run: (run / "finished.json").stat().st_mtime) / "hf", START_FOLDER / name
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
    DIGESTS.write_text(json.dumps({**digests, name: start.digest}, indent=1, sort_keys=True) + "\n")
    return folder


def _is_of(run: Path, start: Start) -> bool:
    """Whether a run has the model of a start."""
    wanted = load_config([f"+experiment={start.warmup}", *start.overrides]).model
    found = yaml.safe_load((run / "config.yaml").read_text())["model"]
    return all(found[key] == getattr(wanted, key) for key in ("build", "num_layers", "hidden_size"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="cache of the runs, e.g. ~/.cache/rlscale")
    parser.add_argument("--names", nargs="+", default=list(STARTS), choices=STARTS)
    arguments = parser.parse_args()
    for name in arguments.names:
        print(store(arguments.cache.expanduser(), name))


if __name__ == "__main__":
    main()
