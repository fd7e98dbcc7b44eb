"""The memory of a Megatron-core trainer in a plan; benchmarks/megatron_memory.py compares it with measurements."""

from dataclasses import replace

import pytest

from rlscale.architectures.architecture import Architecture
from rlscale.config import MegatronConfig, TrainConfig
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.plan.activations import MicrobatchSpec
from rlscale.plan.adapter_sizes import AdapterSpec
from rlscale.plan.frozen_parameters import find_frozen
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.megatron_memory import BUCKET_BYTES, MegatronWork, megatron_memory
from rlscale.plan.megatron_parameters import rank_parameters, trained_parameters
from rlscale.plan.mtp_layers import NO_MTP

DENSE = Architecture(
    num_layers=8,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_000,
    qk_norm=True,
)
EXPERTS = replace(DENSE, num_experts=16, experts_per_token=2, expert_size=1024)
MICRO = MicrobatchSpec(tokens=4096, logit_rows=2048, sample_len=512, dtype_bytes=2)


def memory(
    a: Architecture = DENSE, *, micro: MicrobatchSpec = MICRO, work: MegatronWork | None = None, **config: object
) -> TrainerMemory:
    sizes = MegatronConfig(**config)  # type: ignore[arg-type]
    return megatron_memory(a, sizes, micro, work=work or MegatronWork(num_ranks=8, num_microbatches=4))


def activations(found: TrainerMemory, phase: str = "backward pass") -> float:
    return found.phases[phase]["activations"]


def test_sequence_parallelism_shards_activations_between_matrices() -> None:
    sizes = {"tensor_model_parallel_size": 4}
    whole, cut = memory(), memory(**sizes)
    spread = memory(**sizes, core_args={"sequence_parallel": True})
    assert activations(whole) / 4 < activations(spread) < activations(cut) < activations(whole)
    norms = DENSE.num_layers * MICRO.tokens * 2 * (10 * DENSE.hidden_size + 4)
    backward = MICRO.tokens * 2 * 2 * DENSE.hidden_size
    assert activations(cut) - activations(spread) == pytest.approx(norms * 3 / 4, rel=0.05, abs=backward)


def test_micro_batches_whose_activations_are_kept_have_those_without_recomputation() -> None:
    sizes = {"pipeline_model_parallel_size": 4, "recompute_granularity": RecomputeGranularity.full}
    none, two, all_, more = (
        memory(**sizes, core_args={"num_microbatches_with_partial_activation_checkpoints": number})
        for number in (0, 2, 4, 9)
    )
    assert activations(none) == activations(memory(**sizes))
    assert activations(two) - activations(none) == pytest.approx((activations(all_) - activations(none)) / 2)
    plain = memory(pipeline_model_parallel_size=4)
    # The layer whose backward pass runs is recomputed, or not.
    assert activations(all_) == activations(more) == pytest.approx(activations(plain), rel=0.15)
    assert activations(all_, "logits") == activations(plain, "logits")


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    one = memory(pipeline_model_parallel_size=4, work=MegatronWork(num_ranks=8, num_microbatches=1))
    two = memory(pipeline_model_parallel_size=4, work=MegatronWork(num_ranks=8, num_microbatches=2))
    many = memory(pipeline_model_parallel_size=4, work=MegatronWork(num_ranks=8, num_microbatches=9))
    of_one = activations(two) - activations(one)
    assert activations(many) == pytest.approx(activations(one) + 3 * of_one)


def test_recomputed_layers_save_their_input() -> None:
    found = memory(recompute_granularity=RecomputeGranularity.full)
    inputs = DENSE.num_layers * MICRO.tokens * 2 * DENSE.hidden_size
    one_layer = (activations(memory()) - activations(found) + inputs) / (DENSE.num_layers - 1)
    assert inputs < activations(found) < inputs + 1.5 * one_layer


def test_context_parallel_ranks_have_a_share_of_the_tokens_and_all_keys() -> None:
    whole, cut = memory(), memory(context_parallel_size=4)
    assert activations(whole) / 4 < activations(cut) < activations(whole) / 3


def test_a_checkpoint_gathers_the_states_of_all_data_parallel_ranks() -> None:
    two = memory(work=MegatronWork(num_ranks=2, num_microbatches=4))
    eight = memory()
    parameters = two.weights / 2
    for found, number in ((two, 2), (eight, 8)):
        assert found.phases["checkpoint"]["gathered states"] == pytest.approx(4 * parameters * (6.5 + 3 / number))
    assert "checkpoint" not in memory(use_distributed_optimizer=False).phases
    on_gpu = memory(micro=replace(MICRO, device="cuda"))
    assert on_gpu.phases["checkpoint"]["gathered states"] == 4 * parameters  # the rest is on the host


def test_stages_that_send_their_weights_themselves_receive_nothing() -> None:
    sizes = {"pipeline_model_parallel_size": 2}
    by_one = memory(**sizes).phases["weight sync"]["messages"]
    own = memory(**sizes, work=MegatronWork(num_ranks=8, num_microbatches=4, sends_own=True)).phases["weight sync"][
        "messages"
    ]
    assert by_one > 0 == own


def test_messages_of_two_buckets_are_in_flight() -> None:
    large = replace(DENSE, num_layers=80)
    found = memory(large, tensor_model_parallel_size=4).phases["weight sync"]
    assert found["messages"] == pytest.approx(2 * BUCKET_BYTES * 3 / 4, rel=0.01)
    assert found["one weight"] == 2 * DENSE.vocab_size * DENSE.hidden_size


def test_expert_parallelism_shards_weights_but_not_activations() -> None:
    whole, spread = memory(EXPERTS), memory(EXPERTS, expert_model_parallel_size=4)
    assert spread.weights < 0.4 * whole.weights
    assert activations(spread) == activations(whole)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_router_and_latents_are_whole_on_every_tensor_parallel_rank(pipeline: int) -> None:
    a = replace(EXPERTS, qk_norm=False, q_rank=256, kv_rank=128, nope_dim=64, rope_dim=32, value_dim=64, num_heads=8)
    sizes = {"pipeline_model_parallel_size": pipeline, "core_args": {"expert_tensor_parallel_size": 1}}
    whole, cut = (memory(a, tensor_model_parallel_size=number, **sizes).weights / 2 for number in (1, 4))
    layers, hidden = 8 / pipeline, 1024
    undivided = layers * hidden * (16 + 256 + 128 + 32)
    experts = layers * 3 * hidden * 1024 * 16
    assert cut == pytest.approx((whole - experts - undivided) / 4 + undivided + experts)
    frozen = find_frozen(a, TrainConfig(freeze_params=["norm"]))
    parallel = ParallelSizes(tensor=4, pipeline=pipeline, context=1, expert=1, data=1, expert_tensor=1)
    trained = trained_parameters(a, parallel, NO_MTP, frozen)
    assert trained.dense == pytest.approx(rank_parameters(a, parallel, NO_MTP).dense, rel=1e-3)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_model_that_scores_is_on_the_device_while_it_does(role: str) -> None:
    work = MegatronWork(num_ranks=8, num_microbatches=4, scorers={role: DENSE})
    found, on_gpu = memory(work=work), memory(work=work, micro=replace(MICRO, device="cuda"))
    assert found.phases[role]["its weights"] == getattr(found, role) == found.weights
    # Its weights are on the host until they are copied.
    assert on_gpu.phases[role]["its weights"] == on_gpu.weights and getattr(on_gpu, role) == 0
    assert getattr(memory(), role) == 0 and role not in memory().phases
    # Of another architecture it is a separate model, divided as the policy.
    large = replace(DENSE, num_layers=16)
    work = replace(work, scorers={role: large})
    separate = memory(work=work, micro=replace(MICRO, device="cuda"), tensor_model_parallel_size=2)
    assert getattr(separate, role) == 2 * large.parameters / 2 and role not in separate.phases


def test_a_critic_has_no_logits_and_no_weight_sync() -> None:
    found = memory(work=MegatronWork(num_ranks=8, num_microbatches=4, is_critic=True))
    assert set(found.phases) == {"backward pass", "checkpoint"}


def test_only_adapters_have_gradients_and_states() -> None:
    work = MegatronWork(num_ranks=8, num_microbatches=4, adapters=AdapterSpec(rank=16))
    plain, whole = memory(), memory(work=work)
    # q, k, v, o, gate, up and down of 8 layers; A and B together rank * (in + out).
    hidden, keys, inner = DENSE.hidden_size, 4 * 64, DENSE.intermediate_size
    numbers = 8 * 16 * (2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + inner))
    assert whole.weights == plain.weights + 2 * numbers
    assert all(phase["gradients"] == 4 * numbers for phase in whole.phases.values())
    assert whole.optimizer == 12 * numbers / 8  # divided over the data-parallel ranks
    # Of column-parallel layers the ranks divide B, of row-parallel ones A: the half of width `hidden` is whole.
    divided = memory(work=work, tensor_model_parallel_size=4, use_distributed_optimizer=False)
    own = 8 * 16 * (7 * hidden + (2 * hidden + 2 * keys + 3 * inner) / 4)
    assert divided.optimizer == 12 * own
    attention = 8 * 16 * (2 * (hidden + hidden) + 2 * (hidden + keys))
    experts = memory(EXPERTS, work=work)
    assert all(phase["gradients"] == 4 * attention for phase in experts.phases.values())
