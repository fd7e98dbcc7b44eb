"""The doctor on a CPU: every check that exists there is fine, and the report is complete."""

import json
from pathlib import Path

import pytest

from rlscale.cli.doctor import main
from rlscale.doctor.catalog import CHECKS
from rlscale.doctor.check_device import LIBRARIES, MAX_IMPORT_S

WITH_RAY = ("ray", "quickstart")
LIKE_OTHERS = (
    *("collectives", "fsdp", "attention", "lora", "process_group"),
    *("shared_memory", "disk", "delta", "megatron", "mfu_small"),
)
"""Checks that take 10 to 20 seconds each next to other tests, and whose code the others share."""
NEEDS_CUDA = {check.name for check in CHECKS if check.needs_cuda}


@pytest.mark.slow
@pytest.mark.parametrize(
    "skipped", [(*WITH_RAY, *LIKE_OTHERS), pytest.param(WITH_RAY, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_every_check_without_ray_is_fine_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skipped: tuple[str, ...]
) -> None:
    code = main(["--device", "cpu", "--deadline-scale", "4", "--out", str(tmp_path), "--skip", *skipped])
    content = json.loads((tmp_path / "doctor_cpu.json").read_text())
    verdicts = {check["name"]: check["verdict"] for check in content["checks"]}
    text = json.dumps([check for check in content["checks"] if check["verdict"] not in ("ok", "skipped")], indent=1)
    assert code == 0, text
    assert list(verdicts) == [check.name for check in CHECKS if check.name not in skipped]
    # A machine with little shared memory or disk gets a warning; so do first imports, which compile the libraries.
    warned = {check["name"] for check in content["checks"] if check["verdict"] == "warning"}
    assert {name for name, verdict in verdicts.items() if verdict not in ("ok", "skipped")} <= warned, text
    assert warned <= {"machine", "imports"}, text
    (imported,) = (check for check in content["checks"] if check["name"] == "imports")
    assert [figure["name"] for figure in imported["figures"]] == list(LIBRARIES)
    # The warning is that of the figures, and of nothing else.
    total = sum(figure["value"] for figure in imported["figures"])
    assert ("imports" in warned) == (total > MAX_IMPORT_S), text
    assert {name for name, verdict in verdicts.items() if verdict == "skipped"} == NEEDS_CUDA
    for check in content["checks"]:
        assert check["summary"]
        assert bool(check["figures"]) == (check["name"] not in NEEDS_CUDA), check["name"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0] in verdicts] == list(verdicts)
    assert lines[-1].endswith(f"report: {tmp_path / 'doctor_cpu.md'}")
