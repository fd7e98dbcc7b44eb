"""Complete runs of the command: their output files, and equal losses for every number of ranks and placement."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import REWARDED, SMALL, Command


def steps_of(command: Command) -> torch.Tensor:
    """Loss and gradient norm of every step."""
    steps = [[m["train/loss"], m["train/grad_norm"]] for m in command.metrics() if "train/loss" in m]
    assert min(norm for _, norm in steps) > 0
    return torch.tensor(steps, dtype=torch.float64)


def test_a_run_leaves_config_metrics_checkpoint_and_export(plain: Command) -> None:
    metrics = plain.metrics()
    assert [m["step"] for m in metrics if "train/loss" in m] == [0, 1, 2]
    assert all(m["logprob_diff/mean"] < 1e-4 for m in metrics if "train/loss" in m)
    assert {m["weights/version"] for m in metrics if "train/loss" in m} == {1, 2, 3}
    run = plain.run_dir
    assert "rollout_batch_size: 4" in (run / "config.yaml").read_text()
    [launch] = json.loads((run / "provenance.json").read_text())
    assert "data.num_rollout=3" in launch["overrides"]
    assert json.loads((run / "finished.json").read_text())["num_rollouts"] == 3
    assert list((run / "checkpoints").iterdir())
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert model.config.num_hidden_layers == 2
    assert str(run) in (plain.folder / "out.txt").read_text()
    assert plain.left_over() == {}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "placement",
    [
        ("cluster.actor_num_gpus_per_node=2", "cluster.rollout_num_gpus=1"),
        ("cluster.actor_num_gpus_per_node=2", "cluster.rollout_num_gpus=2", "cluster.colocate=true"),
    ],
    ids=["two ranks and a separate engine", "two ranks and two engines colocated"],
)
def test_ranks_and_placement_do_not_change_the_losses(
    command: Command, plain: Command, placement: tuple[str, ...]
) -> None:
    done = command.run(*placement, REWARDED)
    assert done.code == 0, done.err
    torch.testing.assert_close(steps_of(command), steps_of(plain), atol=1e-5, rtol=0)


@pytest.mark.nightly
def test_a_mixture_of_experts_trains_on_two_ranks(command: Command, tmp_path: Path) -> None:
    experts = ("model=tiny_qwen3_moe", "model.num_experts=4", "model.moe_intermediate_size=16", REWARDED)
    done = command.run(*experts, "cluster.actor_num_gpus_per_node=2")
    assert done.code == 0, done.err
    assert (
        "model.intermediate_size is ignored: model.build=tiny_qwen3_moe does not have this architecture key"
        in done.out + done.err
    )
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert {m["weights/version"] for m in steps} == {1, 2, 3}
    # The engine multiplies in another order, and a token with two equal router scores may go to the other expert.
    assert all(m["logprob_diff/mean"] < 1e-4 for m in steps)
    alone = Command(folder=tmp_path / "alone", cache=command.cache, ray=command.ray)
    alone.folder.mkdir()
    assert alone.run(*experts).code == 0
    torch.testing.assert_close(steps_of(command), steps_of(alone), atol=1e-4, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["algo.use_routing_replay", "algo.use_rollout_routing_replay"])
def test_experts_are_replayed_in_several_steps_of_rollouts_ahead(command: Command, key: str) -> None:
    experts = ("model=tiny_qwen3_moe", "model.num_experts=4", "model.moe_intermediate_size=16", REWARDED)
    ahead = ("rollout.max_staleness=1", "batch.num_steps_per_rollout=2", "optim.lr=1e-2")
    done = command.run(*experts, *ahead, f"{key}=true")
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert all(m["train/routes/replayed"] == 1 for m in steps)
    assert max(m["train/routes/differing"] for m in steps) > 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_mixture_of_experts_learns(command: Command) -> None:
    ends = ("checkpoint.save_interval=null", "eval.stop_reward=0.75")
    done = command.run("model=tiny_qwen3_moe", *ends, small=False, timeout_s=850)
    assert done.code == 0, done.err
    held_out = [m["eval/reward_mean"] for m in command.metrics() if "eval/reward_mean" in m]
    assert held_out[0] < 0.4 < 0.75 <= held_out[-1]


@pytest.mark.nightly
def test_a_sweep_over_weight_channels_runs_job_after_job_and_changes_no_loss(command: Command, plain: Command) -> None:
    done = command.run("-m", "train.weight_channel=shared_memory,delta", REWARDED, "run.dir=null")
    assert done.code == 0, done.err
    assert "shared_memory" in done.out and "delta" in done.out
    runs = [path.parent for path in command.folder.glob("runs/*/metrics.jsonl")]
    assert len(runs) == 2
    for run in runs:
        assert torch.equal(steps_of(replace(command, folder=run.parent, name=run.name)), steps_of(plain))
    (delta,) = command.folder.glob("runs/*/weights/delta_00000003.rlsd")
    assert (delta.parent / "base_00000000").is_dir()
    assert command.left_over() == {}


@pytest.mark.nightly
def test_weights_are_synced_every_n_rollouts_and_at_the_end(command: Command) -> None:
    rare = ("train.update_weights_interval=2", "rollout.max_staleness=1", "eval.prompt_data=null", "eval.interval=null")
    done = command.run(*rare)
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert ["time/sync_s" in m for m in steps] == [False, True, True]
    assert max(m["staleness/max"] for m in steps) <= 1


@pytest.mark.nightly
def test_sft_without_evaluation_starts_no_engine(command: Command) -> None:
    done = command.run("algo=sft", "eval.prompt_data=null", "eval.interval=null", "batch.n_samples_per_prompt=1")
    assert done.code == 0, done.err
    assert not list((command.run_dir / "logs").glob("engine*"))
    assert all("train/loss" in m for m in command.metrics())


@pytest.mark.nightly
def test_bf16_reference_kl_and_entropy_run(command: Command) -> None:
    done = command.run(
        "train.dtype=bfloat16",
        "algo.use_kl_loss=true",
        "algo.kl_loss_coef=0.01",
        "algo.kl_loss_type=low_var_kl",
        "algo.entropy_coef=0.001",
        "data.num_rollout=2",
    )
    assert done.code == 0, done.err
    last = [m for m in command.metrics() if "train/kl_loss" in m][-1]
    assert last["train/kl_loss"] >= 0
    assert last["train/entropy"] > 0
    assert last["logprob_diff/mean"] < 0.05


def test_a_finished_run_is_not_overwritten(command: Command, plain: Command) -> None:
    shutil.copytree(plain.folder, command.folder, dirs_exist_ok=True)
    first = (command.run_dir / "metrics.jsonl").read_bytes()
    again = command.run()
    assert again.code == 0, again.err
    assert (command.run_dir / "metrics.jsonl").read_bytes() == first
    assert (command.folder / "run-2" / "finished.json").exists()
    assert "run-2" in again.out


def test_the_library_gives_the_results_of_the_command(cache: Path, tmp_path: Path, plain: Command) -> None:
    import rlscale

    here = Command(folder=tmp_path, cache=cache)
    channel = ("train.weight_channel=disk", f"train.weight_folder={tmp_path / 'weights'}")
    places = (f"run.dir={here.run_dir}", f"model.cache_dir={cache}")
    result = rlscale.Trainer(rlscale.load_config(["+experiment=quickstart", *SMALL, REWARDED, *channel, *places])).run()
    assert result.num_rollouts == 3
    assert result.metrics_file == here.run_dir / "metrics.jsonl"
    assert torch.equal(steps_of(here), steps_of(plain)), "the weight channel must not change the losses"
    assert (tmp_path / "weights" / "v00000003").is_dir()
