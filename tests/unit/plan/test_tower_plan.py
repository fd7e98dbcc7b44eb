"""The vision tower in a plan: weights, frozen parts, and the activations of image tokens."""

import json
from functools import cache
from pathlib import Path

import pytest

from rlscale.architectures.tower_shape import PUBLISHED
from rlscale.config import load_config_with_notes
from rlscale.plan import HARDWARE, Plan, make_plan
from rlscale.plan.engine_weights import WeightFormat
from rlscale.plan.fsdp_memory import TrainerMemory

TOWER = 415_195_904
"""Parameters of the tower of Qwen3-VL-4B with its four projectors."""
DECODER = 4_022_468_096
FROZEN_TOWER = "train.freeze_params=['visual[.]']"


@cache
def plan(*overrides: str) -> Plan:
    config = load_config_with_notes(["experiment=geo3k_vlm", *overrides], to_run=False).config
    return make_plan(config, HARDWARE["h100"], prompt_tokens=1024, response_tokens=1024)


def trainer(*overrides: str) -> TrainerMemory:
    found = plan(*overrides).trainer
    assert found is not None
    return found


def test_the_tower_is_sharded_trained_and_sent_with_the_decoder() -> None:
    found = plan()
    assert found.model.tower is not None and found.model.tower.parameters == pytest.approx(TOWER, rel=1e-3)
    assert found.model.parameters == DECODER + found.model.tower.parameters
    memory = trainer()
    assert memory.weights == pytest.approx(4 * found.model.parameters / 8, rel=1e-4)
    assert memory.optimizer == 2 * memory.weights
    assert found.sync is not None and found.sync.num_bytes == 2 * found.model.parameters
    assert WeightFormat(dtype_bytes=2).model_bytes(found.model) == 2 * found.model.parameters
    # Tokens of text do not pass through the tower.
    without = plan("model.hf_checkpoint=someone/else")
    assert without.model.tower is None and without.model.parameters == DECODER
    assert found.model.forward_cost == without.model.forward_cost


def test_models_with_files_on_this_machine_have_their_towers(tmp_path: Path) -> None:
    a = plan().model
    text = {"num_hidden_layers": a.num_layers, "num_attention_heads": a.num_heads, "head_dim": a.head_dim}
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    text |= {"num_key_value_heads": a.num_kv_heads, **{name: getattr(a, name) for name in sizes}}
    vision = dict(PUBLISHED["Qwen/Qwen3-VL-4B-Instruct"])
    content = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = plan(f"model.hf_checkpoint={tmp_path}", "algo.advantage_estimator=ppo", "algo.use_kl_loss=true")
    assert found.model == a and found.trainer is not None and found.critic is not None
    assert found.trainer.reference == found.trainer.weights
    assert found.critic.weights == found.trainer.weights, "the output layer of this model is its embedding"
    judge = plan("reward=judge", "reward.engine.num_gpus=1", f"reward.engine.hf_checkpoint={tmp_path}").judge
    assert judge is not None and judge.weights == 2 * a.parameters


def test_frozen_parts_have_weights_alone() -> None:
    whole, blocks, tower = (
        trainer(*words) for words in ((), ("train.freeze_params=[vision]",), ("train.freeze_params=['visual[.]']",))
    )
    assert whole.weights == blocks.weights == tower.weights
    size = plan().model.tower
    assert size is not None
    assert whole.optimizer - tower.optimizer == pytest.approx(2 * 4 * size.parameters / 8, rel=1e-3)
    assert tower.optimizer < blocks.optimizer < whole.optimizer
    name = "backward pass of the vision tower"
    # Frozen blocks save nothing, and a frozen tower has no backward pass.
    assert name in whole.phases and name not in blocks.phases and name not in tower.phases
    projector = trainer("train.only_train_params=[projector]")
    assert projector.weights == whole.weights
    assert projector.optimizer == pytest.approx(2 * 4 * size.projector_parameters / 8, rel=1e-3)
    # The decoder passes a gradient on and has none itself; those of the projector are accumulated.
    moment, accumulated = projector.phases["backward pass of layer 35"], 4 * size.projector_parameters
    assert accumulated <= moment["gradients"] < 1.5 * accumulated
    assert whole.phases["backward pass of layer 35"]["gradients"] > 30 * accumulated


def test_each_part_is_counted_with_what_the_patterns_leave() -> None:
    found = plan("train.freeze_params=['visual[.](?!.*merger)','language_model.layers[.][0-9][.]']").trained
    assert found is not None
    parts = found.to_dict()["parts"]
    size, per_layer = plan().model.tower, plan().model.layer_parameters(0)
    assert size is not None
    assert parts == {
        "decoder": {"parameters": DECODER, "trained": DECODER - 10 * per_layer},
        "projector": {"parameters": size.projector_parameters, "trained": size.projector_parameters},
        "tower": {"parameters": size.parameters - size.projector_parameters, "trained": 0},
    }
    whole, none = plan().trained, plan("train.freeze_params=['visual[.]']").trained
    assert whole is not None and none is not None
    assert whole.trained == DECODER + size.parameters and none.trained == DECODER


def test_activations_grow_with_the_image_tokens_that_prompts_may_have() -> None:
    phase = "backward pass of the vision tower"
    images, text = trainer(), trainer("data.multimodal_keys=null")
    assert text.phases[phase]["activations"] == 0 < images.phases[phase]["activations"]
    # Recomputed blocks save their input: 4 patches a token, 24 blocks, 1024 values of two bytes, and one whole block.
    saved = images.phases[phase]["activations"] / (4 * 1024 * 4)
    assert saved > 24 * 1024 * 2
    more = trainer("fsdp.gradient_checkpointing=false").phases[phase]["activations"]
    assert more > 3 * images.phases[phase]["activations"]


def test_every_rank_of_the_first_stage_of_megatron_has_the_whole_tower() -> None:
    words = ("train=megatron", "megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=false")
    size = plan().model.tower
    assert size is not None
    whole, frozen = trainer(*words), trainer(*words, FROZEN_TOWER)
    assert whole.weights == 2 * (DECODER / 2 + size.parameters) == frozen.weights
    gradients = whole.phases["backward pass"]["gradients"] - frozen.phases["backward pass"]["gradients"]
    assert gradients == pytest.approx(4 * size.parameters, rel=1e-6)
    saved = [each.phases["backward pass"]["activations"] for each in (whole, frozen)]
    assert saved[0] > saved[1]
    stages = [trainer(*words, "megatron.pipeline_model_parallel_size=2", *more) for more in ((), (FROZEN_TOWER,))]
    assert stages[0].weights < whole.weights and stages[0].optimizer > stages[1].optimizer
