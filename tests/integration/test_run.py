"""Whole runs through the command: what they leave behind, and that the number of ranks does not matter."""

import json
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import SMALL, Command


def test_a_run_leaves_config_metrics_checkpoint_and_export(command: Command) -> None:
    done = command.run()
    assert done.code == 0, done.err
    metrics = command.metrics()
    assert [m["step"] for m in metrics if "train/loss" in m] == [0, 1, 2]
    assert all(m["logprob_diff/mean"] < 1e-4 for m in metrics if "train/loss" in m)
    assert {m["weights/version"] for m in metrics if "train/loss" in m} == {1, 2, 3}
    run = command.run_dir
    assert "rollout_batch_size: 4" in (run / "config.yaml").read_text()
    [launch] = json.loads((run / "provenance.json").read_text())
    assert "data.num_rollout=3" in launch["overrides"]
    assert json.loads((run / "finished.json").read_text())["num_rollouts"] == 3
    assert list((run / "checkpoints").iterdir())
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert model.config.num_hidden_layers == 2
    assert str(run) in done.out
    assert command.processes() == {}


@pytest.mark.parametrize(
    "placement",
    [
        ("cluster.actor_num_gpus_per_node=2", "cluster.rollout_num_gpus=1"),
        ("cluster.actor_num_gpus_per_node=2", "cluster.rollout_num_gpus=2", "cluster.colocate=true"),
    ],
    ids=["two ranks and an engine apart", "two ranks and two engines colocated"],
)
def test_ranks_and_placement_do_not_change_the_losses(
    command: Command, tmp_path: Path, single: list[dict[str, float]], placement: tuple[str, ...]
) -> None:
    done = command.run(*placement)
    assert done.code == 0, done.err
    losses = [m["train/loss"] for m in command.metrics() if "train/loss" in m]
    expected = [m["train/loss"] for m in single if "train/loss" in m]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def single(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics of the same run on one rank and one engine."""
    command = Command(folder=tmp_path_factory.mktemp("single"), cache=cache)
    done = command.run()
    assert done.code == 0, done.err
    return command.metrics()


def test_a_mixture_of_experts_trains_on_two_ranks(command: Command, tmp_path: Path) -> None:
    experts = ("model=tiny_qwen3_moe", "model.num_experts=4", "model.moe_intermediate_size=16")
    done = command.run(*experts, "cluster.actor_num_gpus_per_node=2")
    assert done.code == 0, done.err
    assert "model.intermediate_size is ignored: model.build=tiny_qwen3_moe has no such figure" in done.out + done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert {m["weights/version"] for m in steps} == {1, 2, 3}
    # The engine multiplies in another order, and a token that two experts suit equally well may go to the other one.
    assert all(m["logprob_diff/mean"] < 1e-4 for m in steps)
    alone = Command(folder=tmp_path / "alone", cache=command.cache)
    alone.folder.mkdir()
    assert alone.run(*experts).code == 0
    losses = [[m["train/loss"] for m in each.metrics() if "train/loss" in m] for each in (command, alone)]
    torch.testing.assert_close(*map(torch.tensor, losses), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mixture_of_experts_learns(command: Command) -> None:
    done = command.run("model=tiny_qwen3_moe", "checkpoint.save_interval=null", small=False, timeout_s=850)
    assert done.code == 0, done.err
    held_out = [m["eval/reward_mean"] for m in command.metrics() if "eval/reward_mean" in m]
    assert held_out[0] < 0.5 < 0.9 < held_out[-1]


@pytest.mark.parametrize("channel", ["shared_memory", "disk", "delta"])
def test_the_weight_channel_does_not_change_the_losses(
    command: Command, single: list[dict[str, float]], channel: str
) -> None:
    done = command.run(f"train.weight_channel={channel}", f"train.weight_folder={command.folder / 'way'}")
    assert done.code == 0, done.err
    losses = [m["train/loss"] for m in command.metrics() if "train/loss" in m]
    assert losses == [m["train/loss"] for m in single if "train/loss" in m]
    expected = {"shared_memory": [], "disk": ["v00000003"], "delta": ["base_00000000", "delta_00000003.rlsd"]}[channel]
    assert all((command.folder / "way" / name).exists() for name in expected)


def test_weights_are_brought_every_n_rollouts_and_at_the_end(command: Command) -> None:
    rare = ("train.update_weights_interval=2", "rollout.max_staleness=1", "eval.prompt_data=null", "eval.interval=null")
    done = command.run(*rare)
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert ["time/sync_s" in m for m in steps] == [False, True, True]
    assert max(m["staleness/max"] for m in steps) <= 1


def test_sft_without_evaluation_starts_no_engine(command: Command) -> None:
    done = command.run("algo=sft", "eval.prompt_data=null", "eval.interval=null", "batch.n_samples_per_prompt=1")
    assert done.code == 0, done.err
    assert not list((command.run_dir / "logs").glob("engine*"))
    assert all("train/loss" in m for m in command.metrics())


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


def test_a_sweep_runs_job_after_job_and_ends_in_a_table(command: Command) -> None:
    done = command.run("-m", "algo.eps_clip=0.1,0.2", "data.num_rollout=1", "eval.interval=null", "run.dir=null")
    assert done.code == 0, done.err
    assert "0.1" in done.out and "0.2" in done.out
    assert command.processes() == {}


def test_a_finished_run_is_not_overwritten(command: Command) -> None:
    overrides = ("data.num_rollout=1", "eval.prompt_data=null", "eval.interval=null")
    assert command.run(*overrides).code == 0
    first = (command.run_dir / "metrics.jsonl").read_bytes()
    again = command.run(*overrides)
    assert again.code == 0, again.err
    assert (command.run_dir / "metrics.jsonl").read_bytes() == first
    assert (command.folder / "run-2" / "finished.json").exists()
    assert "run-2" in again.out


def test_the_library_does_what_the_command_does(cache: Path, tmp_path: Path, single: list[dict[str, float]]) -> None:
    import rlscale

    config = rlscale.load_config(
        ["+experiment=quickstart", *SMALL, f"run.dir={tmp_path / 'run'}", f"model.cache_dir={cache}"]
    )
    result = rlscale.Trainer(config).run()
    assert result.num_rollouts == 3
    lines = [json.loads(line) for line in result.metrics_file.read_text().splitlines()]
    losses = [m["train/loss"] for m in lines if "train/loss" in m]
    assert losses == [m["train/loss"] for m in single if "train/loss" in m]
