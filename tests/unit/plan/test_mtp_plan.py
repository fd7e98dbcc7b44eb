"""Layers for multi-token prediction in a plan: weights, gradients, states, activations, operations, bytes on disk."""

from functools import cache

from rlscale.config import load_config_with_notes
from rlscale.plan import HARDWARE, Plan, make_plan
from rlscale.plan.frozen_parameters import NONE_FROZEN
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.head_lines import head_lines
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.megatron_parameters import rank_parameters, trained_parameters
from rlscale.plan.mtp_layers import NO_MTP, MtpLayers

FROZEN, TRAINED = ("megatron.mtp_num_layers=1",), ("megatron.mtp_num_layers=1", "megatron.enable_mtp_training=true")


@cache
def plan(*overrides: str) -> Plan:
    config = load_config_with_notes(["experiment=glm45_355b_a32b", *overrides], to_run=False).config
    return make_plan(config, HARDWARE["h100"], prompt_tokens=1024, response_tokens=1024)


def trainer(*overrides: str) -> TrainerMemory:
    found = plan(*overrides).trainer
    assert found is not None
    return found


def test_a_layer_has_the_weights_of_a_decoder_layer_and_its_own() -> None:
    a = plan().model
    hidden = a.hidden_size
    layer = a.layer_parameters(a.num_layers - 1) + 2 * hidden**2 + 3 * hidden
    assert MtpLayers(number=2).parameters(a) == 2 * layer
    found = plan(*TRAINED).trained
    assert found is not None and found.parameters == found.trained == a.parameters + layer
    frozen = plan(*FROZEN).trained
    assert frozen is not None and (frozen.parameters, frozen.trained) == (a.parameters + layer, a.parameters)


def test_the_last_stage_has_the_layers_and_a_copy_of_the_embedding() -> None:
    a, one = plan().model, ParallelSizes(tensor=1, pipeline=1, context=1, expert=1, data=1, expert_tensor=1)
    two = ParallelSizes(tensor=2, pipeline=2, context=1, expert=4, data=1, expert_tensor=1)
    mtp, table = MtpLayers(number=1), a.vocab_size * a.hidden_size
    assert rank_parameters(a, one, mtp).total - rank_parameters(a, one, NO_MTP).total == mtp.parameters(a)
    plain, own = rank_parameters(a, two, NO_MTP), rank_parameters(a, two, mtp)
    assert own.experts - plain.experts == mtp.expert_parameters(a) / 4
    router = a.num_experts * a.hidden_size  # whole on both tensor-parallel ranks
    assert own.dense - plain.dense == (mtp.parameters(a) - mtp.expert_parameters(a) + table + router) / 2
    # Frozen layers leave the copy trained, as the embedding is.
    trained = trained_parameters(a, two, mtp, NONE_FROZEN)
    assert (trained.experts, trained.dense - plain.dense) == (plain.experts, table / 2)


def test_only_trained_layers_have_gradients_activations_and_operations() -> None:
    without, frozen, trained = trainer(), trainer(*FROZEN), trainer(*TRAINED)
    assert without.weights < frozen.weights == trained.weights
    name = "backward pass of multi-token prediction"
    assert name in trained.phases and name not in frozen.phases
    assert frozen.phases["logits"]["activations"] == without.phases["logits"]["activations"]
    assert trained.phases["logits"]["activations"] > frozen.phases["logits"]["activations"]
    # Only the copy of the embedding has gradients next to frozen layers.
    assert frozen.phases["logits"]["gradients"] < trained.phases["logits"]["gradients"]
    seconds = [{part.name: part.seconds for part in plan(*words).roofline.parts} for words in ((), FROZEN, TRAINED)]
    step = [each["forward and backward"] for each in seconds]
    # A layer of 93, with its own output layer and no recomputation.
    assert step[0] == step[1] < step[2] < step[0] * 1.05
    assert seconds[1]["optimizer"] < seconds[2]["optimizer"]
    assert seconds[0]["old logprobs"] == seconds[2]["old logprobs"]


def test_they_are_sent_saved_and_exported() -> None:
    a = plan().model
    own, without, found = MtpLayers(number=1).parameters(a), plan(), plan(*TRAINED)
    assert without.sync is not None and found.sync is not None
    assert found.sync.num_bytes - without.sync.num_bytes == 2 * own
    assert without.checkpoint is not None and found.checkpoint is not None
    assert found.checkpoint.weights - without.checkpoint.weights == 2 * own
    assert found.checkpoint.optimizer - without.checkpoint.optimizer == 12 * own
    # Published checkpoints repeat embedding and output layer next to each of them.
    assert found.checkpoint.export - without.checkpoint.export == 2 * (own + 2 * a.vocab_size * a.hidden_size)
    frozen = plan(*FROZEN).checkpoint
    assert frozen is not None and frozen.optimizer == without.checkpoint.optimizer


def test_a_plan_prints_them() -> None:
    assert any(line.endswith("1 layer for multi-token prediction, trained") for line in head_lines(plan(*TRAINED)))
    lines = head_lines(plan(*FROZEN))
    assert any(line.endswith("for multi-token prediction, frozen") for line in lines)
    assert any("0 of 3.99 billion of the layers for multi-token prediction" in line for line in lines)


def test_fsdp_has_none() -> None:
    given = ["experiment=qwen3_4b_grpo", "cluster.device=cuda"]
    config = load_config_with_notes(given, to_run=False).config
    assert MtpLayers.from_config(config) == NO_MTP and make_plan(config, HARDWARE["h100"]).trained is not None


def test_adapters_freeze_them() -> None:
    found = plan(*FROZEN, "train.lora.rank=8").trained
    assert found is not None and not found.mtp.is_trained and found.trained == found.adapters
