"""Memory of the plan compared with torch's profiler, for some cases of the benchmark."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.training.distributed import join_world, leave_world

NAMES = ("dense, bfloat16, several micro-batches", "experts, bfloat16, recomputed", "short samples, bfloat16")


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    yield
    leave_world()


@pytest.mark.usefixtures("world")
@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_a_step_is_predicted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import memory_model
    import memory_probe

    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path))
    (case,) = (case for case in memory_model.CASES if case.name == name)
    predicted, measured = memory_model.predict(case), memory_probe.measure(case)
    assert predicted.weights == measured.weights
    assert predicted.optimizer == pytest.approx(
        measured.optimizer, rel=0.001
    )  # the optimizer also stores its step counts
    assert predicted.step == pytest.approx(measured.step, rel=memory_model.LIMIT)


def test_the_peak_is_the_maximum_of_allocated_memory() -> None:
    import memory_probe
    import torch

    def run() -> None:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(2000, dtype=torch.uint8)
        del first, second
        torch.empty(2500, dtype=torch.uint8)

    assert 3000 <= memory_probe.peak_bytes(run) < 3300
