"""Launch scripts of other projects that the tests translate."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "data" / "third_party"

INPUTS = sorted(
    path
    for path in FOLDER.glob("*/*/**/*")
    if path.suffix in (".sh", ".py", ".yaml", ".json") and "models" not in path.parts and path.name != "mis.yaml"
)
"""Files that start a run; model files and files that they name are not among them."""


def find(name: str) -> Path:
    """The input of a name, e.g. `slime/v0.2.2/scripts/run-qwen3-4B-fsdp.sh`."""
    path = FOLDER / name
    assert path in INPUTS, f"{name} must be an input"
    return path
