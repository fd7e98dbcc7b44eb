"""Wheel: it contains config and data, and works without a checkout."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.checkout import clean_environment, copy_checkout

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a source distribution, which checks that this is complete too."""
    checkout = copy_checkout(tmp_path_factory.mktemp("checkout"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new environment with the wheel and the dependencies of the current environment."""
    folder = tmp_path_factory.mktemp("elsewhere") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    install = ["-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, env=clean_environment())
    # Python does not read .pth files of folders that a .pth file adds, so an editable rlscale here is not visible.
    (site_packages,) = folder.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return interpreter


def test_the_wheel_contains_config_and_data(wheel: Path) -> None:
    names, checkout = set(zipfile.ZipFile(wheel).namelist()), wheel.parents[1]
    for source, packaged in (("conf", "rlscale/_conf"), ("data", "rlscale/_data"), ("src/rlscale", "rlscale")):
        files = [file for file in (checkout / source).rglob("*") if file.is_file()]
        expected = {f"{packaged}/{file.relative_to(checkout / source)}" for file in files}
        assert expected
        assert expected <= names


def test_the_command_composes_outside_of_the_checkout(python: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [python, "-c", "import rlscale; print(rlscale.__file__)"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(where.strip()).is_relative_to(python.parents[1])
    done = subprocess.run(
        [python.parent / "rlscale-train", "--cfg", "job"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "builtin:arithmetic/train.jsonl" in done.stdout


def test_the_command_trains_outside_of_the_checkout(python: Path, tmp_path: Path) -> None:
    command = [
        str(python.parent / "rlscale-train"),
        "+experiment=quickstart_warmup",
        "data.num_rollout=2",
        "run.dir=out",
    ]
    environment = clean_environment(RLSCALE_CACHE=str(tmp_path / "cache"))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") >= 2
