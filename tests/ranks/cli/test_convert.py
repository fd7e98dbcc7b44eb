"""The command `rlscale-convert`: the tests that start processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlscale.engines.ports import free_port
from tests.ranks.cli.convert_ranks import ALONE, CASES, same_bytes
from tests.ranks.training.megatron_families import write_families
from tests.unit.training.rollouts import tiny_model

ROOT = Path(__file__).parents[3]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "rlscale.cli.convert", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.nightly
def test_there_and_back_again(tmp_path: Path) -> None:
    source = Path(tiny_model(tmp_path / "models", tied=False))
    there, back = tmp_path / "there", tmp_path / "back"
    assert run(str(source), str(there)).returncode == 0
    done = run(str(there), str(back))
    assert done.returncode == 0 and f"{back}: 25 tensors" in done.stderr
    before, after = (load_file(each / "model.safetensors") for each in (source, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (source / "tokenizer.json").read_bytes() == (back / "tokenizer.json").read_bytes()


TRAINER = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from rlscale.config import ComputeDtype, MegatronConfig
from rlscale.training.distributed import join_world
from rlscale.training.megatron.backend import MegatronBackend
from tests.ranks.training.megatron_ranks import BATCHES, megatron_spec, train

model, folder = sys.argv[1], Path(sys.argv[2])
join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
backend = MegatronBackend(megatron_spec(model, MegatronConfig(), dtype=ComputeDtype.bfloat16), rank=0, world_size=1)
train(backend, BATCHES[0], 1)
(folder / "saved").mkdir()
backend.save(folder / "saved")
save_file({name: weight.clone() for name, weight in backend.weights()}, folder / "weights.safetensors")
"""


@pytest.mark.nightly
def test_out_of_a_trainers_checkpoint(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "models")
    command = [sys.executable, "-W", "ignore", "-c", TRAINER, model, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)
    saved, back = str(tmp_path / "saved"), tmp_path / "back"
    unnamed = run(saved, str(back))
    assert unnamed.returncode == 2 and "must contain hf/config.json, got no such file; name the model" in unnamed.stderr
    assert run(saved, str(back), "--model", model).returncode == 0
    found, expected = load_file(back / "model.safetensors"), load_file(tmp_path / "weights.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_a_model_that_megatron_core_lacks_is_reported(tmp_path: Path) -> None:
    source = Path(tiny_model(tmp_path / "models"))
    about = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**about, "hidden_act": "gelu"}))
    done = run(str(source), str(tmp_path / "there"))
    assert done.returncode == 2
    assert "must have hidden_act=silu in its config.json with Megatron-core, got gelu" in done.stderr


@pytest.fixture(
    scope="module",
    params=["one process, bfloat16", pytest.param("two processes, float32", marks=pytest.mark.nightly)],
)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Whether each family came back by each way, with the same sizes on no two ways between two processes."""
    models, folder = tmp_path_factory.mktemp("families"), tmp_path_factory.mktemp("converted")
    is_alone = "one" in request.param
    write_families(models, dtype=torch.bfloat16 if is_alone else torch.float32)
    ports = [ALONE] if is_alone else [str(free_port("127.0.0.1")) for _ in range(2 * len(CASES))]
    program = [sys.executable, "-W", "ignore", "-m", "tests.ranks.cli.convert_ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*program, str(rank), str(models), str(folder), *ports], cwd=ROOT, env=environment)
        for rank in range(1 if is_alone else 2)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * len(ranks), "a rank has message why"
    reports = [json.loads((folder / f"report_{rank}.json").read_text()) for rank in range(len(ranks))]
    return {name: all(report[name] for report in reports) for name in reports[0]}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "family"), CASES)
def test_every_family_is_restored_byte_by_byte(converted: dict[str, bool], mode: str, family: str) -> None:
    assert converted[f"{mode} {family}"]


@pytest.mark.nightly
def test_torchrun_starts_as_many_processes_as_it_takes(tmp_path: Path) -> None:
    source = Path(tiny_model(tmp_path / "models"))
    there, back = tmp_path / "there", tmp_path / "back"
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launch, f"--master-port={free_port('127.0.0.1')}", "-m", "rlscale.cli.convert"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(source), str(there), "--tensor-parallel", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert run(str(there), str(back)).returncode == 0
    assert same_bytes(source, back)
