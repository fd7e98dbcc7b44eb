"""Process groups and weight shards by arithmetic."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.parallel_state import RankGenerator

from rlscale.architectures.architecture import Architecture
from rlscale.config import load_config_with_notes
from rlscale.models.hf_models import build_causal_lm
from rlscale.models.random_weights import write_random
from rlscale.plan.model_size import policy_architecture
from rlscale.rehearsal.cut_layout import LayoutSizes, read_sizes
from rlscale.rehearsal.layout_check import check_layout, check_transfer, plan_weight_sync
from rlscale.rehearsal.rank_layout import planned_weights, rank_groups, sharded_weights
from rlscale.training.fsdp.export_plan import MAX_SENDERS
from rlscale.training.fsdp.shards import persistent_buffers
from tests.unit.rehearsal.model_options import MEGATRON_OPTIONS, OPTIONS, model_fields

SIZES = LayoutSizes(nodes=4, gpus=8, gpus_per_node=8, tensor=2, pipeline=2, context=2, expert=4)


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, nodes=8, tensor=4, expert=2, expert_tensor=2)])
def test_groups_are_those_of_megatron_core(sizes: LayoutSizes) -> None:
    groups = rank_groups(sizes)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=sizes.tensor, ep=1, dp=sizes.data, pp=sizes.pipeline, cp=sizes.context, order=order)
    copies = sizes.ranks // (sizes.expert * sizes.expert_tensor * sizes.pipeline)
    experts = RankGenerator(tp=sizes.expert_tensor, ep=sizes.expert, dp=copies, pp=sizes.pipeline, cp=1, order=order)
    names = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
    assert {name: groups[name] for name in names} == {name: dense.get_ranks(axis) for name, axis in names.items()}
    names = {"expert_tensor": "tp", "expert": "ep", "expert_data": "dp"}
    assert {name: groups[name] for name in names} == {name: experts.get_ranks(axis) for name, axis in names.items()}


@pytest.mark.slow
@pytest.mark.parametrize("option", MEGATRON_OPTIONS)
def test_planned_weights_are_all_of_the_model(option: str) -> None:
    a = Architecture.from_fields(model_fields(option))
    weights = list(planned_weights(a, SIZES, stages=[0] * a.num_layers))
    # The bias on the scores of experts is a buffer, which is sent, too.
    biases = [each.num_elements for each in weights if each.weight.megatron.endswith("router.expert_bias")]
    has_biases = a.is_latent or a.model_type in ("glm4_moe", "minimax_m2")
    assert biases == [a.num_experts] * (sum(map(a.has_experts, range(a.num_layers))) if has_biases else 0)
    assert sum(each.num_elements for each in weights) == a.parameters + sum(biases)


@pytest.mark.parametrize("experiment", ["qwen3_30b_a3b_gspo", "glm4_9b_dapo", "deepseek_r1"])
@pytest.mark.slow
def test_the_uncut_layouts_of_the_recipes_are_consistent(experiment: str) -> None:
    config = load_config_with_notes([f"experiment={experiment}"], to_run=False).config
    report = check_layout(config, policy_architecture(config.model))
    assert report.faults == ()
    assert report.lines[0].startswith(f"{read_sizes(config).ranks} trainer ranks: ")
    assert "weight transfer: " in report.lines[-1]


@pytest.mark.parametrize("nodes", [1, 8])
def test_fsdp_ranks_have_a_transfer_plan(nodes: int) -> None:
    given = ["experiment=qwen3_4b_grpo", f"cluster.actor_num_nodes={nodes}"]
    config = load_config_with_notes(given, to_run=False).config
    sizes, a = read_sizes(config), policy_architecture(config.model)
    plan = plan_weight_sync(config, a, sizes)
    assert check_transfer(plan, sizes) == []
    assert all(weight.num_shards == sizes.ranks for weight in plan.weights)
    assert len(plan.receivers) == min(sizes.ranks, MAX_SENDERS)
    # The shards of weights with few rows are padded.
    assert a.parameters * 2 <= sum(weight.num_bytes for weight in plan.weights) < a.parameters * 2 * 1.001
    assert "weight transfer: " in check_layout(config, a).lines[-1]


# A vision tower is no part of the layout: only the decoder is planned.
@pytest.mark.parametrize("option", [each for each in OPTIONS if each.startswith("tiny_") and not each.endswith("_vl")])
def test_sharded_weights_are_those_of_transformers(option: str, tmp_path: Path) -> None:
    write_random(tmp_path, fields=model_fields(option), init_seed=0, build=option)
    model = build_causal_lm(str(tmp_path), dtype=torch.float32)
    a = Architecture.from_config_json(json.loads((tmp_path / "config.json").read_text()))
    buffers = {name for name, _ in persistent_buffers(model)}
    expected = {name: (p.shape[0], p.numel() // p.shape[0]) for name, p in model.named_parameters()}
    assert {name: shape for name, shape in sharded_weights(a) if name not in buffers} == expected


def test_a_family_that_the_backend_does_not_train_is_a_fault() -> None:
    config = load_config_with_notes(["experiment=glm45_355b_a32b", "model.model_type=glm_moe_dsa"], to_run=False).config
    report = check_layout(config, policy_architecture(config.model))
    assert report.faults == ("Megatron-core does not train glm_moe_dsa",)


def test_a_plan_without_a_shard_is_a_fault() -> None:
    config = load_config_with_notes(["experiment=glm4_9b_dapo"], to_run=False).config
    sizes = read_sizes(config)
    plan = plan_weight_sync(config, policy_architecture(config.model), sizes)
    assert check_transfer(plan, sizes) == []
    first = plan.buckets[0]
    name = plan.weights[first.weight_indices[0]].name
    without = replace(plan, buckets=(replace(first, buffers=first.buffers[:1]), *plan.buckets[1:]))
    assert f"{name} must arrive with all its shards" in check_transfer(without, sizes)
    assert f"{name} must be sent once, got 0 times" in check_transfer(replace(plan, buckets=plan.buckets[1:]), sizes)
    assert check_transfer(plan, replace(sizes, nodes=0)) == ["rank 0 is not one of 0"]
