"""The Dockerfile agrees with the project: constraints, extras and versions. The images are not built here."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_install_of_rlscale_uses_the_constraints() -> None:
    lines = [line for line in TEXT.replace("\\\n", " ").splitlines() if '".[' in line]
    assert len(lines) == 2
    assert all("--constraint constraints.txt" in line for line in lines)


def test_its_extras_exist() -> None:
    extras = {name for found in re.findall(r'"\.\[([a-z,]+)\]"', TEXT) for name in found.split(",")}
    assert {"megatron", "parquet", "lora", "math"} <= extras <= set(PROJECT["optional-dependencies"])


def test_pinned_packages_are_in_the_constraints() -> None:
    named = re.findall(r"grep -E '\^([a-z-]+)==' (\S+?)[\"')]", TEXT)
    assert {name for name, _ in named} == {"torch", "sglang", "sglang-router"}
    for name, file in named:
        constraints = (ROOT / Path(file).name).read_text()
        assert re.search(rf"^{name}==", constraints, re.MULTILINE), (name, file)


def test_the_images_have_a_supported_python() -> None:
    versions = set(re.findall(r"python(?:=)?(3\.\d+)", TEXT.lower()))
    assert versions == {"3.12"}
    assert "Programming Language :: Python :: 3.12" in PROJECT["classifiers"]


def test_the_page_names_every_target() -> None:
    page = (ROOT / "docs" / "how-to" / "images.md").read_text()
    targets = re.findall(r"^FROM \S+ AS (\S+)$", TEXT, re.MULTILINE)
    assert targets == ["cpu", "cuda", "cuda-sglang"]
    assert all(f"--target {target}" in page and f"| `{target}` |" in page for target in targets)
