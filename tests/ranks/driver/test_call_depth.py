"""Depth of the call stack from the command to the training loop."""

import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import rlscale
from rlscale.cli.train import main
from rlscale.cluster.ray_session import Bundles
from rlscale.driver import run, trainer
from rlscale.errors import WorkerError
from tests.integration.conftest import SMALL

MAX_FRAMES = 8
SOURCE = str(Path(rlscale.__file__).parent)


class StackRecorder:
    """Trainers that record the call stack of the first training step, and fail."""

    names = ("actor rank 0",)
    named_actors: tuple[Any, ...] = ()
    frames: tuple[tuple[str, str], ...] = ()

    def __init__(self, *args: Any) -> None: ...

    async def setup(self) -> None: ...

    async def train(self, *args: Any) -> NoReturn:
        stack = [frame for frame in traceback.extract_stack() if frame.filename.startswith(SOURCE)]
        StackRecorder.frames = tuple(
            (Path(frame.filename).relative_to(SOURCE).as_posix(), frame.name) for frame in stack
        )
        raise WorkerError("actor rank 0", "the stack is recorded")

    def kill(self) -> None: ...


def test_few_frames_lead_from_the_command_to_the_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ray is replaced; everything else is real.
    monkeypatch.setattr(trainer, "ray_session", lambda *_, **options: nullcontext(SimpleNamespace(wait=lambda: None)))
    monkeypatch.setattr(run, "placement_group_for", lambda _, layout: nullcontext(Bundles(None, "CPU", layout)))
    monkeypatch.setattr(run, "RayTrainers", StackRecorder)
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path / "cache"))
    without_engines = ("algo=sft", "batch.n_samples_per_prompt=1", "eval.prompt_data=null", "eval.interval=null")
    overrides = ("+experiment=quickstart", *SMALL, *without_engines, f"run.dir={tmp_path / 'run'}")
    monkeypatch.setattr(sys, "argv", ["rlscale-train", *overrides])
    with pytest.raises(SystemExit):
        main()
    assert "the stack is recorded" in capsys.readouterr().err
    frames = StackRecorder.frames
    first, last = frames.index(("cli/train.py", "main")), frames.index(("control/loop.py", "run"))
    assert last - first + 1 <= MAX_FRAMES, frames[first : last + 1]
    files = [file for file, _ in frames[first : last + 1]]
    assert all(file not in files[i + 2 :] for i, file in enumerate(files)), "a call returns to an earlier file"
