"""Names of parameters in a plan, and what patterns freeze of a decoder on both backends."""

from functools import cache

import pytest

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import TINY_MODELS, TINY_VISION, tiny_model_fields
from rlscale.config import load_config_with_notes
from rlscale.models.parameter_names import in_memory, tiny_parameters
from rlscale.plan import HARDWARE, Plan, make_plan
from rlscale.plan.frozen_parameters import list_parameters
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.mtp_layers import MtpLayers
from tests.unit.rehearsal.model_options import model_fields

LAYERS = "train.freeze_params=['layers[.]([0-9]|1[0-9])[.]','embed_tokens']"
"""Of 36 layers the first 20, and the embedding, which is the output layer."""


@cache
def plan(*overrides: str) -> Plan:
    given = ["experiment=qwen3_4b_grpo", "cluster.device=cuda", *overrides]
    config = load_config_with_notes(given, to_run=False).config
    return make_plan(config, HARDWARE["h100"], prompt_tokens=512, response_tokens=512)


def trainer(*overrides: str) -> TrainerMemory:
    found = plan(*overrides).trainer
    assert found is not None
    return found


@pytest.mark.parametrize("build", [build for build in TINY_MODELS if build not in TINY_VISION])
def test_parameters_have_the_names_of_transformers(build: str) -> None:
    a = Architecture.from_fields(tiny_model_fields(build))
    found = list_parameters(a)
    assert sum(each.elements for each in found) == a.parameters
    assert {each.name for each in found} == set(tiny_parameters(build, {}) or ())


@pytest.mark.parametrize("option", ["glm4_9b", "glm45_106b_a12b", "kimi_k2", "qwen25_7b", "llama32_1b"])
def test_parameters_of_published_models_have_their_names(option: str) -> None:
    a = Architecture.from_fields(model_fields(option))
    found, family = list_parameters(a), find_family(a.model_type).hf_names
    assert family is not None and sum(each.elements for each in found) == a.parameters
    layers = [
        weight
        for layer in range(a.num_layers)
        for weight, _ in family.layer_weights(layer, num_experts=int(a.has_experts(layer)), without=a.missing_features)
    ]
    tensors = [name for weight in (*family.before, *layers, *family.after) for name in weight.hf]
    assert {each.name for each in found} == set(in_memory(tensors, is_tied=a.tied))


@pytest.mark.parametrize(("model_type", "first"), [("glm4_moe", "model.layers.3.enorm.weight"), ("mimo", None)])
def test_layers_for_multi_token_prediction_have_published_names(model_type: str, first: str | None) -> None:
    build = "tiny_qwen3_moe" if first else "tiny_qwen3"
    a = Architecture.from_fields(tiny_model_fields(build) | {"model_type": model_type, "num_layers": 3})
    own = list_parameters(a, num_mtp=2)[len(list_parameters(a)) :]
    mtp = MtpLayers(number=2)
    assert sum(each.elements for each in own) == mtp.parameters(a)
    assert sum(each.elements for each in own if each.is_expert) == mtp.expert_parameters(a)
    assert own[0].name == (first or "model.mtp_layers.0.token_layernorm.weight")


def test_frozen_layers_have_no_gradient_no_state_and_no_backward_pass() -> None:
    whole, frozen = trainer(), trainer(LAYERS)
    a, number = plan().model, 4
    left = 16 * a.layer_parameters(0) + a.hidden_size
    assert frozen.weights == whole.weights
    assert frozen.optimizer == pytest.approx(8 * left / number, rel=1e-3)
    # Several micro-batches: the gradients of all trained weights are accumulated, unsharded.
    assert frozen.phases["logits"]["gradients"] == pytest.approx(4 * left, rel=1e-6)
    assert frozen.phases["logits"]["activations"] < 0.6 * whole.phases["logits"]["activations"]
    # With a trained embedding every layer passes a gradient on.
    through = trainer("train.freeze_params=['layers[.]([0-9]|1[0-9])[.]']")
    assert through.phases["logits"]["activations"] == whole.phases["logits"]["activations"]
    head = trainer("train.only_train_params=['model.norm']")
    assert not any(name.startswith("backward pass") for name in head.phases)
    assert head.optimizer == 8 * a.hidden_size / number


def test_muon_keeps_one_moment_of_trained_matrices() -> None:
    adam, muon = trainer(LAYERS), trainer(LAYERS, "optim.name=muon")
    a = plan().model
    norms = 2 * a.hidden_size + 2 * a.head_dim
    assert adam.optimizer - muon.optimizer == pytest.approx(4 * 16 * (a.layer_parameters(0) - norms) / 4, rel=1e-6)


def test_the_optimizer_reads_trained_weights_only() -> None:
    whole, frozen = (
        next(part.seconds for part in plan(*words).roofline.parts if part.name == "optimizer")
        for words in ((), (LAYERS,))
    )
    trained = plan(LAYERS).trained
    assert trained is not None and frozen / whole == pytest.approx(trained.trained / plan().model.parameters)


MEGATRON = ("train=megatron", "cluster.actor_num_gpus_per_node=8", "cluster.num_gpus_per_node=8")
STAGES = (*MEGATRON, "megatron.pipeline_model_parallel_size=2", "megatron.use_distributed_optimizer=false")


def test_megatron_counts_the_stage_with_most_trained_weights() -> None:
    a = plan().model
    whole, frozen = trainer(*STAGES), trainer(*STAGES, LAYERS)
    assert frozen.weights == whole.weights
    # The second stage has layers 18 to 35, the first two of them frozen, and the final norm.
    left = 16 * a.layer_parameters(0) + a.hidden_size
    assert {phase["gradients"] for phase in frozen.phases.values()} == {4 * left}
    assert frozen.optimizer == 12 * left
    every = trainer(*MEGATRON, "megatron.use_distributed_optimizer=false", LAYERS)
    assert every.optimizer == frozen.optimizer
