"""Complete runs on images: both families train, sync and generate; the quickstart learns."""

import pytest

from scripts.store_starts import START_FOLDER, STARTS
from tests.integration.conftest import Command

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
)
SHORT = (
    "+experiment=quickstart_vision",
    "model.warmup_experiment=null",
    "reward.type=random",
    "cluster.actor_num_gpus_per_node=2",
    "data.num_rollout=3",
    "batch.rollout_batch_size=4",
    "eval.interval=null",
    "eval.stop_reward=null",
    "optim.lr=1e-2",
)

MEGATRON = (
    "train=megatron",
    "train.dtype=float32",
    "megatron.tensor_model_parallel_size=2",
    "megatron.sequence_parallel=true",
    "model.num_key_value_heads=2",
)

SENT_ALONE = ("train.lora.rank=4", "train.lora.sync=adapter", "train.lora.target_modules=[q_proj,v_proj]")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model",
    [
        ("model=tiny_qwen3_vl", "model.head_dim=16"),
        ("model=tiny_qwen2_5_vl",),
        ("model=tiny_qwen3_vl", "model.head_dim=16", "train.lora.rank=4"),
        ("model=tiny_qwen2_5_vl", *SENT_ALONE),
        ("model=tiny_qwen3_vl", "model.head_dim=16", *MEGATRON),
        ("model=tiny_qwen3_vl", "model.head_dim=16", *MEGATRON, "algo=ppo", "train.lora.rank=4"),
    ],
)
def test_engine_and_two_trainer_ranks_agree_while_all_weights_change(command: Command, model: tuple[str, ...]) -> None:
    done = command.run(*SHORT, *TINY, *model, small=False)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    # The engine computes with the weights of every sync, those of the tower too.
    assert len(trained) == 3 and all(m["logprob_diff/max"] < 1e-4 for m in trained)
    assert all(m["train/grad_norm"] > 0 for m in trained)
    assert command.left_over() == {}


@pytest.mark.nightly
def test_a_replay_trains_on_the_same_images_without_engines(command: Command) -> None:
    template, model = command.folder / "{rollout_id}.jsonl", ("model=tiny_qwen3_vl", "model.head_dim=16", *TINY)
    losses, replays = [], f'debug.load_rollout_data="{template}"'
    for command.name, words in {"saved": replays.replace("load", "save"), "replayed": replays}.items():
        done = command.run(*SHORT, *model, words, small=False)
        assert done.code == 0, done.err
        losses.append([m["train/loss"] for m in command.metrics() if "train/loss" in m])
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    (command.folder / "0.jsonl.images.json").unlink()
    command.name = "without images"
    done = command.run(*SHORT, *model, replays, small=False)
    assert done.code == 1 and "placeholder tokens, and no image" in done.err


@pytest.mark.nightly
def test_sglang_reads_the_images_with_the_weights_of_each_sync(command: Command) -> None:
    model = ("model=tiny_qwen3_vl", "model.head_dim=16", *TINY)
    done = command.run(*SHORT, *model, "rollout=sglang", "cluster.actor_num_gpus_per_node=1", small=False)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    # Features of an earlier version of the tower would differ by far more.
    assert len(trained) == 3 and all(m["logprob_diff/max"] < 1e-5 for m in trained)
    assert command.left_over() == {}


LATER = """
from rlscale.agents import StepResult

class Later:
    # Asks for a word, then shows the row with its picture; the second answer is graded.
    def reset(self, task):
        self._task, self._is_shown = task, False
        return "look"

    def step(self, action):
        if not self._is_shown:
            self._is_shown = True
            return StepResult(messages=list(self._task.messages))
        return StepResult(reward=float(action.text == str(self._task.label)), done=True)
"""
IN_TURNS = ("agent.environment_path=later_picture:Later", "agent.max_turns=2", "rollout.max_response_len=6")


@pytest.mark.nightly
def test_engine_and_two_trainer_ranks_agree_on_the_images_of_later_turns(command: Command) -> None:
    (command.folder / "later_picture.py").write_text(LATER)
    # Random answers of one token, so that most trajectories have their second turn.
    model = ("model=tiny_qwen3_vl", "model.head_dim=16", *TINY)
    done = command.run(*SHORT, *model, *IN_TURNS, "rollout.max_response_len=64", small=False)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["logprob_diff/max"] < 1e-4 for m in trained)
    assert max(m["agent/turns_mean"] for m in trained) > 1
    assert list((command.run_dir / "images").iterdir())
    assert command.left_over() == {}


@pytest.mark.nightly
def test_a_picture_of_an_environment_is_learned_from(command: Command) -> None:
    (command.folder / "later_picture.py").write_text(LATER)
    done = command.run("+experiment=quickstart_vision", *IN_TURNS, small=False, timeout_s=1500)
    assert done.code == 0, done.err
    rewards = [m["eval/reward_mean"] for m in command.metrics() if "eval/reward_mean" in m]
    assert rewards and rewards[0] <= 0.4 and max(rewards) > 0.9


BY_URL = """
from openai import AsyncOpenAI

async def agent(task, session):
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = list(task.messages)
        for _ in range(2):
            answer = await client.chat.completions.create(model=session.model, messages=messages, max_tokens=4)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), task.messages[-1]]
"""


@pytest.mark.nightly
def test_engine_and_two_trainer_ranks_agree_on_the_images_of_agents_by_url(command: Command) -> None:
    (command.folder / "looks_twice.py").write_text(BY_URL)
    model = ("model=tiny_qwen3_vl", "model.head_dim=16", *TINY)
    own = ("agent.function_path=looks_twice:agent", "rollout.max_response_len=64")
    done = command.run(*SHORT, *model, *own, small=False)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["logprob_diff/max"] < 1e-4 for m in trained)
    assert all(m["train/grad_norm"] > 0 for m in trained)
    # Images are in logs by their hash, and once as files.
    assert list((command.run_dir / "images").iterdir())
    assert command.left_over() == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_qwen2_5_vl", "narrow_qwen3_vl"])
def test_counting_squares_is_learned_from_the_stored_weights_of_a_warm_up(command: Command, name: str) -> None:
    loads = f"checkpoint.load={START_FOLDER / name}"
    done = command.run("+experiment=quickstart_vision", *STARTS[name].overrides, loads, "eval.interval=10", small=False)
    assert done.code == 0, done.err
    assert_learned(command)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiny_qwen2_5_vl", "narrow_qwen3_vl", "tiny_qwen3_vl"])
def test_the_quickstart_learns_to_count_squares(command: Command, name: str) -> None:
    model = STARTS[name].overrides if name in STARTS else [f"model={name}"]
    done = command.run("+experiment=quickstart_vision", *model, "eval.interval=10", small=False, timeout_s=1500)
    assert done.code == 0, done.err
    assert_learned(command)


def assert_learned(command: Command) -> None:
    """Asserts that the held-out reward rose from at most 0.4 to the stop reward."""
    rewards = [m["eval/reward_mean"] for m in command.metrics() if "eval/reward_mean" in m]
    assert rewards and rewards[0] <= 0.4 and max(rewards) >= 0.93
