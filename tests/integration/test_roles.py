"""Complete runs with critic, reference and engines, on one shared GPU or on separate ones."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.conftest import Command
from tests.integration.test_faults import wait_until

PPO = (
    "algo=ppo",
    "critic.num_critic_only_steps=1",
    "algo.kl_coef=0.01",
    "algo.kl_loss_type=k2",
    "reward.type=random",  # an untrained model gets no other reward
    "optim.lr_warmup_iters=0",
    "cluster.colocate=true",
    "cluster.num_gpus_per_node=1",
    "cluster.actor_num_gpus_per_node=1",
    "rollout.deterministic=true",
    "checkpoint.save_interval=2",
    "ci.enabled=true",
    "eval.interval=3",
)


def check_batches(folder: Path, *, num_rollouts: int) -> None:
    """Each batch is complete, that of a rollout which trains the critic alone included."""
    assert sorted(path.name for path in folder.iterdir()) == [f"{i}.safetensors" for i in range(num_rollouts)]
    for file in folder.iterdir():
        batch = load_file(file)
        trained = batch["loss_mask"] > 0
        for name in ("advantages", "returns", "values", "old_logprobs", "ref_logprobs"):
            # The value head begins with zeros.
            is_zero = name == "values" and file.stem == "0"
            assert batch[name].shape == batch["tokens"].shape, f"{file.name}: {name}"
            assert batch[name][trained].any() != is_zero, f"{file.name}: {name}"
            assert not batch[name][~trained].any()
        np.testing.assert_array_equal(batch["trainer_logprobs"][trained], batch["old_logprobs"][trained])


@pytest.mark.nightly
def test_policy_critic_reference_and_engine_share_one_gpu(cache: Path, tmp_path: Path, shared_ray: str) -> None:
    shared = Command(folder=tmp_path, cache=cache, ray=shared_ray)
    done = shared.run(*PPO, 'debug.save_train_data="batches/{rollout_id}.safetensors"')
    assert done.code == 0, done.err
    check_batches(tmp_path / "batches", num_rollouts=3)
    steps = [record for record in shared.metrics() if "train/critic_loss" in record]
    assert len(steps) == 3 and "train/loss" not in steps[0] and "train/loss" in steps[2]
    # The engine released its memory during training and has the right weights afterwards (ci.enabled checks that).
    assert all(record["time/offload_s"] > 0 for record in steps)
    saved = shared.run_dir / "checkpoints" / "rollout_00000002"
    assert {path.name for path in saved.iterdir()} >= {"tensors", "critic"}

    (tmp_path / "separate").mkdir()
    separate = Command(folder=tmp_path / "separate", cache=cache, ray=shared_ray)
    stays = ("cluster.offload_train=false", "cluster.offload_rollout=false")
    from_checkpoint = (f"checkpoint.load={saved}", f"model.ref_load={shared.run_dir}", "model.ref_ckpt_step=2")
    done = separate.run(*PPO, *stays, *from_checkpoint, "eval.interval=null")
    assert done.code == 0, done.err
    (last,) = [record for record in separate.metrics() if "train/critic_loss" in record]
    # Policy and critic are the same; the reference is now the policy itself.
    assert last["rollout/kl"] == 0.0 < steps[2]["rollout/kl"]
    assert last["logprob_diff/mean"] < 1e-4
    assert json.loads((separate.run_dir / "finished.json").read_text())["num_rollouts"] == 3


@pytest.mark.nightly
def test_a_critic_on_a_separate_gpu_is_restarted_without_changing_results(cache: Path, tmp_path: Path) -> None:
    separate = (
        "data.num_rollout=16",
        "cluster.colocate=false",
        "cluster.num_gpus_per_node=8",
        "cluster.critic_num_nodes=1",
        "checkpoint.save_interval=3",
        "eval.interval=null",
    )
    exact = ("train/loss", "train/grad_norm", "train/critic_loss", "train/critic_grad_norm", "rollout/return")
    found = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        command = Command(folder=tmp_path / name, cache=cache)
        process = command.start(*PPO, *separate, "fault_tolerance.enabled=true")
        if name == "killed":
            path = command.run_dir / "metrics.jsonl"
            wait_until(lambda path=path: path.exists() and len(path.read_text().splitlines()) > 5, 120, "training")  # type: ignore[misc]
            (pid,) = (pid for pid, words in command.processes().items() if "CriticActor" in words)
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert ("critic rank 0" in out) == (name == "killed")
        assert (command.run_dir / "logs" / "critic_rank_0.log").exists()
        steps = [record for record in command.metrics() if "train/critic_loss" in record]
        found.append([{key: step.get(key) for key in exact} for step in steps])
    assert found[0] == found[1] and len(found[0]) == 16
    assert "train/loss" in exact and found[0][0]["train/loss"] is None and found[0][1]["train/loss"] is not None


DIES_ONCE = """
import os
import signal
from pathlib import Path


def die_once(rollout):
    if Path("second").exists() and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Path("second" if Path("first").exists() else "first").touch()
    return rollout.tokens, {}
"""


@pytest.mark.nightly
@pytest.mark.own_ray
def test_a_trainer_that_dies_while_engines_are_offloaded_is_restarted(command: Command) -> None:
    (command.folder / "deaths.py").write_text(DIES_ONCE)
    done = command.run(
        "train.rollout_data_postprocess_path=deaths:die_once",  # while it trains on the third rollout
        "cluster.colocate=true",
        "cluster.num_gpus_per_node=1",
        "cluster.actor_num_gpus_per_node=1",
        "data.num_rollout=5",
        "checkpoint.save_interval=2",
        "fault_tolerance.enabled=true",
        "reward.type=random",
        "ci.enabled=true",
        "eval.interval=5",
    )
    assert done.code == 0, done.err
    assert (command.folder / "died").exists() and "restarting the trainers from the last checkpoint" in done.out
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert [record["step"] for record in steps] == list(range(5))
    # The engine had no weights when the trainer died; afterwards it has the right ones.
    assert all(record["time/offload_s"] > 0 and record["logprob_diff/mean"] < 1e-4 for record in steps)
