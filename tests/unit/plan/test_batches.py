import pytest

from rlscale.config import BatchConfig, RunConfig, load_config
from rlscale.plan.batches import Lengths, assume_lengths, count_batches

SAMPLES = Lengths(prompt=100, response=300)


def batch(**changes: object) -> BatchConfig:
    given = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "global_batch_size": 16, "num_steps_per_rollout": 2}
    return BatchConfig(**{**given, **changes})  # type: ignore[arg-type]


def test_a_rollout_is_counted() -> None:
    found = count_batches(batch(micro_batch_size=2), SAMPLES, ranks=2)
    assert (found.prompts, found.samples, found.steps, found.samples_per_step) == (8, 32, 2, 16)
    assert (found.tokens, found.trainable_tokens) == (32 * 400, 32 * 300)
    assert (found.microbatches_per_rank, found.samples_per_microbatch, found.microbatch_tokens) == (4, 2, 800)


@pytest.mark.parametrize(
    ("tokens", "ranks", "samples", "number"), [(1200, 2, 3, 3), (399, 2, 1, 8), (100_000, 2, 8, 1), (1200, 16, 1, 1)]
)
def test_packed_micro_batches_are_filled_to_the_limit(tokens: int, ranks: int, samples: int, number: int) -> None:
    config = batch(use_dynamic_batch_size=True, max_tokens_per_gpu=tokens)
    found = count_batches(config, SAMPLES, ranks=ranks)
    assert (found.samples_per_microbatch, found.microbatches_per_rank) == (samples, number)


@pytest.mark.parametrize("balance", [False, True])
def test_micro_batches_match_the_schedule(balance: bool) -> None:
    import numpy as np

    from rlscale.architectures.architecture import ForwardCost
    from rlscale.data.microbatch_plan import plan_steps
    from rlscale.types import TrainBatch

    lengths, cost = np.full(32, 400), ForwardCost(per_token=24, per_pair=2, per_logit_row=4)
    total = int(lengths.sum())
    rollout = TrainBatch(
        tokens=np.zeros(total, np.int32),
        loss_mask=np.ones(total, np.uint8),
        rollout_logprobs=np.zeros(total, np.float32),
        weight_versions=np.zeros(total, np.int32),
        offsets=np.arange(33) * 400,
        prompt_lens=np.full(32, 100, np.int32),
        rewards=np.zeros(32, np.float32),
        group_ids=np.arange(32) // 4,
        trajectory_ids=np.arange(32),
        version=0,
    )
    by_tokens = [
        batch(use_dynamic_batch_size=True, max_tokens_per_gpu=tokens, balance_data=balance)
        for tokens in (400, 800, 1600, 5000, 9000)
    ]
    by_samples = [batch(micro_batch_size=number, balance_data=balance) for number in (1, 3, 5, 10, 16)]
    for config in (*by_tokens, *by_samples):
        for ranks in (1, 2, 4):
            steps = plan_steps(rollout, config, num_ranks=ranks, cost=cost)
            found = count_batches(config, SAMPLES, ranks=ranks)
            assert [len(steps), len(steps[0].microbatches[0])] == [found.steps, found.microbatches_per_rank]
            largest = max(len(micro) for rank in steps[0].microbatches for micro in rank)
            assert (found.samples_per_microbatch, found.microbatch_tokens) == (largest, 400 * largest)


def test_lengths_are_the_limits_unless_given() -> None:
    config = load_config(["experiment=quickstart", "rollout.max_prompt_len=9", "rollout.max_response_len=7"])
    found = assume_lengths(config)
    assert (found.prompt, found.response, found.sample) == (9, 7, 16)
    assert found.prompt_from.startswith("rollout.max_prompt_len")
    given = assume_lengths(config, prompt=3, response=2)
    assert (given.prompt, given.response, given.prompt_from) == (3, 2, "given")


def test_an_unlimited_prompt_length_is_assumed_and_marked() -> None:
    config: RunConfig = load_config(["experiment=quickstart", "rollout.max_response_len=300"])
    assert config.rollout.max_prompt_len is None
    found = assume_lengths(config, positions=500)
    assert found.prompt == 200  # what the model has room for
    assert "assumed" in found.prompt_from


def test_lengths_together_are_at_most_the_context() -> None:
    config = load_config(["experiment=quickstart", "rollout.max_context_len=100", "rollout.max_response_len=70"])
    assert config.rollout.max_prompt_len == 99
    found = assume_lengths(config)
    assert (found.prompt, found.response, found.prompt_from) == (30, 70, "rollout.max_context_len minus the response")
    long = assume_lengths(config, prompt=60)
    assert (long.prompt, long.response, long.response_from) == (60, 40, "rollout.max_context_len minus the prompt")
    assert assume_lengths(config, prompt=20).response == 70
