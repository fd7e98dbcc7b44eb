"""Plans compared with hand-computed values and with the parts of the program that they describe."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlscale.architectures.architecture import Architecture
from rlscale.config import RunConfig, load_config_with_notes
from rlscale.expert_routes import RouteShape
from rlscale.models.quantized_weights import quantize_weights
from rlscale.plan import HARDWARE, Plan, find_hardware, make_plan
from rlscale.plan.activations import AttentionKernel, MicrobatchSpec, layer_saved_bytes
from rlscale.plan.engine_weights import WeightFormat
from rlscale.plan.fsdp_memory import TrainerWork, trainer_memory
from rlscale.plan.model_size import route_bytes_per_token
from rlscale.plan.placement import Layout, place_actors
from rlscale.plan.tables import placement_rows
from tests.tiny_model import write_tiny

H100 = HARDWARE["h100"]


@cache
def config(*overrides: str, experiment: str = "qwen3_4b_grpo") -> RunConfig:
    return load_config_with_notes([f"experiment={experiment}", "cluster.device=cuda", *overrides], to_run=False).config


def plan(*overrides: str, experiment: str = "qwen3_4b_grpo", **lengths: int) -> Plan:
    return make_plan(config(*overrides, experiment=experiment), H100, **{"prompt_tokens": 512, **lengths})


def test_weights_and_optimizer_are_sharded_in_float32() -> None:
    found = plan()
    assert found.trainer is not None
    assert found.trainer.weights == pytest.approx(4 * found.model.parameters / 4, rel=1e-6)
    assert found.trainer.optimizer == 2 * found.trainer.weights
    assert found.trainer.reference == found.trainer.weights
    alone = plan("algo.use_kl_loss=false")
    assert alone.trainer is not None and alone.trainer.reference == 0


def test_optimizer_state_depends_on_the_optimizer() -> None:
    adam, host, muon = (plan(f"optim.name={name}").trainer for name in ("adam", "deepspeed_cpu_adam", "muon"))
    assert adam is not None and host is not None and muon is not None
    assert host.optimizer == 0 and host.weights == adam.weights
    # Qwen3-4B: 4,022,468,096 parameters, of them 3,633,315,840 in matrices inside layers; 4 ranks.
    matrices = 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728)
    assert adam.optimizer - muon.optimizer == 4 * matrices / 4


def test_the_base_of_adapters_is_a_reference_without_weights() -> None:
    kl = ("algo.use_kl_loss=true",)
    own, base, other = (
        plan(*kl, *more).trainer
        for more in ((), ("train.lora.rank=16",), ("train.lora.rank=16", "model.ref_load=Qwen/Qwen3-4B-Base"))
    )
    assert own is not None and base is not None and other is not None
    assert own.reference > 0 == base.reference < other.reference


def test_a_sync_of_adapters_sends_their_bytes_alone() -> None:
    merged, alone = (
        plan("train.lora.rank=16", "rollout.engine=embedded", f"train.lora.sync={sync}").sync
        for sync in ("merged", "adapter")
    )
    assert merged is not None and alone is not None
    numbers = 36 * 16 * (2560 + 4096 + 2 * (2560 + 1024) + 4096 + 2560 + 3 * (2560 + 9728))
    assert (alone.num_bytes, alone.num_buckets) == (2 * numbers, 1)
    assert merged.num_bytes > 100 * alone.num_bytes


def test_adapters_need_neither_moments_nor_gradients_of_the_weights() -> None:
    plain, adapted = plan().trainer, plan("train.lora.rank=16").trainer
    assert plain is not None and adapted is not None
    # Qwen3-4B: q, k, v, o, gate, up and down of 36 layers; A and B together rank * (in + out); 4 ranks.
    numbers = 36 * 16 * (2560 + 4096 + 2 * (2560 + 1024) + 4096 + 2560 + 3 * (2560 + 9728))
    assert adapted.optimizer == 8 * numbers / 4
    assert adapted.weights == plain.weights + 4 * numbers / 4 and adapted.step < plain.step
    several = [plan(*overrides, "batch.max_tokens_per_gpu=2048").trainer for overrides in ([], ["train.lora.rank=16"])]
    gradients = [each.phases["logits"]["gradients"] for each in several if each is not None]
    assert gradients[1] == pytest.approx(4 * numbers) and gradients[0] > 50 * gradients[1]


def test_recomputing_saves_activations_and_costs_operations() -> None:
    kept, recomputed = plan("fsdp.gradient_checkpointing=false"), plan("fsdp.gradient_checkpointing=true")
    assert recomputed.trainer is not None and kept.trainer is not None
    assert recomputed.trainer.peak < kept.trainer.peak / 2
    assert kept.trainer_alternative == recomputed.trainer
    assert recomputed.roofline.seconds > kept.roofline.seconds


def test_a_chunk_of_logits_has_the_configured_size() -> None:
    of_512, of_8192 = (plan(f"train.log_probs_chunk_size={n}").trainer for n in (512, 8192))
    assert of_512 is not None and of_8192 is not None
    logits = of_8192.phases["logits"]["logits"] - of_512.phases["logits"]["logits"]
    assert logits == 8 * (8192 - 512) * 151_936  # two numbers in float32 for each


def test_several_micro_batches_accumulate_unsharded_gradients() -> None:
    a = plan().model
    work = MicrobatchSpec(tokens=1000, logit_rows=900, sample_len=1000, dtype_bytes=2, kernel=AttentionKernel.fused)
    one, two = (
        trainer_memory(a, TrainerWork(num_ranks=8, num_microbatches=n, recompute=True, largest=work)) for n in (1, 2)
    )
    difference = two.phases["logits"]["gradients"] - one.phases["logits"]["gradients"]
    assert difference == 4 * a.parameters


def test_context_parallel_ranks_have_twice_the_tokens_and_more_keys() -> None:
    overrides = ("batch.use_dynamic_batch_size=true", "batch.max_tokens_per_gpu=9216")
    apart, shared = (plan(*overrides, f"fsdp.context_parallel_size={size}") for size in (1, 2))
    assert apart.trainer is not None and shared.trainer is not None
    assert (apart.batches.ranks, shared.batches.ranks) == (4, 2)
    assert shared.batches.microbatch_tokens == 2 * apart.batches.microbatch_tokens
    assert (shared.trainer.weights, shared.trainer.optimizer) == (apart.trainer.weights, apart.trainer.optimizer)
    # Each rank has as many tokens as before, and keys and values of all before them: 2.5 times as many as tokens.
    work = MicrobatchSpec(tokens=100, logit_rows=50, sample_len=200, dtype_bytes=2, device="cuda")
    more = layer_saved_bytes(apart.model, 0, replace(work, context_ranks=2)) - layer_saved_bytes(apart.model, 0, work)
    assert more == 100 * 2 * 1.5 * (2 * 8 * 128)  # Qwen3-4B: 8 key heads of 128
    assert apart.trainer.step < shared.trainer.step < 1.3 * apart.trainer.step


def test_a_wider_engine_has_a_larger_cache() -> None:
    narrow, wide = (
        plan("rollout=sglang", f"cluster.rollout_num_gpus_per_engine={n}", "sglang.mem_fraction_static=0.8")
        for n in (1, 4)
    )
    assert narrow.engine is not None and wide.engine is not None
    assert narrow.engine.weights == 2 * narrow.model.parameters
    assert narrow.engine.total == pytest.approx(0.8 * H100.memory_bytes)
    assert wide.engine.weights == narrow.engine.weights / 4
    assert wide.engine.cache_tokens > 4 * narrow.engine.cache_tokens


def test_dp_attention_replicates_attention_weights_and_separates_caches() -> None:
    overrides = ("cluster.rollout_num_gpus_per_engine=4", "sglang.mem_fraction_static=0.8")
    shared = plan(*overrides).engine
    separate = plan(*overrides, "sglang.dp_size=2", "sglang.enable_dp_attention=true").engine
    assert shared is not None and separate is not None
    # Qwen3-4B: 8 key heads over 4 ranks, or 4 over each of two pairs; q, k, v and o twice.
    assert separate.bytes_per_token == shared.bytes_per_token == 2 * 36 * 2 * 128 * 2
    attention = 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 2 * 128)
    table = 151936 * 2560  # the embedding, which is the output layer
    assert separate.weights - shared.weights == pytest.approx(2 * (attention + table) / 4)
    latent = ("sglang.dp_size=1", "sglang.enable_dp_attention=false")
    whole, cut = plan(*latent, experiment="deepseek_r1").engine, plan(experiment="deepseek_r1").engine
    assert whole is not None and cut is not None
    assert whole.bytes_per_token == 8 * cut.bytes_per_token == 61 * (512 + 64) * 2
    # Each of 8 groups divides an output layer, or all 64 GPUs divide one.
    one_head = plan("sglang.enable_dp_lm_head=false", experiment="deepseek_r1").engine
    assert one_head is not None
    assert cut.weights - one_head.weights == pytest.approx(7 * 129280 * 7168 * 2 / 64)


def test_the_embedded_engine_has_the_cache_that_it_allocates() -> None:
    from rlscale.engines.embedded.scheduler_options import SchedulerOptions
    from rlscale.models.batch_shapes import cache_length

    found = plan("rollout=embedded", "rollout.num_slots=16", response_tokens=1000)
    assert found.engine is not None
    length = cache_length(1512)
    assert found.engine.cache_tokens == length * SchedulerOptions(num_slots=16).slots_of(length)


def test_a_colocated_gpu_has_trainer_and_engine() -> None:
    apart = plan("rollout=sglang")
    assert [budget.where for budget in apart.memory_budgets] == ["GPU of a trainer rank", "GPU of an engine"]
    stays = ("cluster.offload_train=false", "cluster.offload_rollout=false")
    together = plan("rollout=sglang", "cluster=one_node_colocate", *stays)
    (budget,) = together.memory_budgets
    assert {"weights", "engine weights"} <= budget.parts.keys()


@pytest.mark.parametrize(("dtype", "factor"), [("auto", 1), ("fp8_e5m2", 2), ("bfloat16", 1), ("fp4_e2m1", 32 / 9)])
def test_a_cache_in_lower_precision_holds_more_tokens(dtype: str, factor: float) -> None:
    plain, found = plan().engine, plan(f"sglang.kv_cache_dtype={dtype}").engine
    assert plain is not None and found is not None
    assert found.cache_tokens == pytest.approx(factor * plain.cache_tokens, rel=1e-5)
    assert found.cache == plain.cache


def test_a_gpu_with_offloading_needs_memory_for_the_larger_part() -> None:
    (budget,) = plan("rollout=sglang", "cluster=one_node_colocate").memory_budgets
    assert budget.where.endswith(", one loaded at a time") and "weights" not in budget.parts
    assert "engine weights" in budget.parts
    (small,) = plan("rollout=sglang", "cluster=one_node_colocate", "sglang.mem_fraction_static=0.05").memory_budgets
    assert "weights" in small.parts and "engine weights" not in small.parts


def test_external_engines_are_not_planned() -> None:
    found = plan("rollout=external", "rollout.external_engine_addrs=['10.0.0.1:30000']")
    assert found.engine is None
    assert {actor for place in found.places for actor in place.actors} == {f"actor rank {i}" for i in range(4)}
    assert found.sync is not None and found.sync.num_bytes == 2 * found.model.parameters
    assert "weight sync" in [part.name for part in found.roofline.parts]


def test_a_run_without_a_trainer_has_engines_only() -> None:
    found = plan("debug.rollout_only=true")
    assert found.trainer is None and found.sync is None
    assert [budget.where for budget in found.memory_budgets] == ["GPU of an engine"]
    assert [part.name for part in found.roofline.parts] == ["prefill", "decode"]
    assert found.to_dict()["trainer"] is None


def test_a_shared_critic_adds_to_the_memory_of_a_trainer() -> None:
    stays = ("cluster.offload_train=false", "cluster.offload_rollout=false")
    found = plan(*stays, experiment="qwen3_4b_ppo")
    assert found.trainer is not None
    assert found.places[3].actors[:2] == ("actor rank 3", "critic rank 3")
    assert found.memory_budgets[0].parts["critic"] == found.trainer.weights + found.trainer.optimizer
    adapters = plan(*stays, "train.lora.rank=8", experiment="qwen3_4b_ppo")
    assert adapters.memory_budgets[0].parts["critic"] == found.memory_budgets[0].parts["critic"], (
        "all weights of the critic are trained"
    )
    tensors = ("train=megatron", "megatron.tensor_model_parallel_size=2", "model.use_hf_config_for_megatron=true")
    divided = plan(*stays, *tensors, experiment="qwen3_4b_ppo")
    assert divided.trainer is not None
    assert divided.memory_budgets[0].parts["critic"] == divided.trainer.weights + divided.trainer.optimizer
    moves = plan("cluster.offload_train_mode=move", "cluster.offload_rollout=false", experiment="qwen3_4b_ppo")
    assert "critic" not in moves.memory_budgets[0].parts, "policy and critic are offloaded alternately"


def test_a_dedicated_critic_has_the_last_gpus() -> None:
    overrides = ("cluster.actor_num_gpus_per_node=4", "cluster.num_gpus_per_node=4")
    found = plan(*overrides, "cluster.critic_num_gpus_per_node=2", experiment="qwen3_4b_ppo")
    together = plan(*overrides, experiment="qwen3_4b_ppo")
    assert found.critic is not None and together.critic is not None
    assert [place.actors for place in found.places[-2:]] == [("critic rank 0",), ("critic rank 1",)]
    assert found.places[3].actors[0] == "actor rank 3" and found.places[-3].actors[-1].startswith("engine")
    own = next(budget for budget in found.memory_budgets if budget.where == "GPU of a critic rank")
    assert own.parts["weights"] == found.critic.weights == 2 * together.critic.weights
    assert own.parts["optimizer"] == 2 * own.parts["weights"]
    assert all("critic" not in budget.parts for budget in found.memory_budgets)
    assert "logits" not in found.critic.phases


def test_offloading_on_a_cpu_doubles_the_memory() -> None:
    moves = ("cluster.device=cpu", "cluster.offload_train=true", "rollout=embedded", "algo.use_kl_loss=false")
    twice = plan(*moves).memory_budgets[0].parts
    assert twice["copies on the host"] == twice["weights"] + twice["optimizer"]
    once = plan(*moves, "train.weights_backuper=false").memory_budgets[0].parts
    assert once["copies on the host"] == 0


def test_supervised_training_generates_nothing() -> None:
    found = plan(experiment="sft", response_tokens=512)
    assert found.engine is None and found.sync is None
    assert [part.name for part in found.roofline.parts] == ["forward and backward", "optimizer"]


def test_staleness_lets_generation_and_training_overlap() -> None:
    def seconds(found: Plan) -> dict[str, float]:
        return {part.name: part.seconds for part in found.roofline.parts}

    synchronous, asynchronous = plan(), plan("rollout.max_staleness=1")
    assert seconds(synchronous) == seconds(asynchronous)
    parts = seconds(asynchronous)
    generation = parts["prefill"] + parts["decode"]
    assert synchronous.roofline.seconds == pytest.approx(sum(parts.values()))
    assert asynchronous.roofline.seconds == pytest.approx(
        generation + parts["weight sync"]
    )  # training is the shorter one


def test_decoding_is_bound_by_memory_and_training_by_compute() -> None:
    bound = {part.name: part.bound for part in plan().roofline.parts}
    assert bound["decode"] == "memory bandwidth"
    assert bound["forward and backward"] == "compute"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [((), False), (("batch.num_steps_per_rollout=2", "batch.global_batch_size=128"), True),
     (("train.reuse_logprobs=false",), True), (("algo.use_rollout_logprobs=true",), False),
     (("train.keep_old_actor=true",), False), (("train.keep_old_actor=true", "rollout.max_staleness=1"), True),
     (("algo.opd_kl_coef=0.1", "model.teacher_load=/no/such"), True),
     (("algo.opd_kl_coef=0.1", "algo.opd_kl=full", "model.teacher_load=/no/such"), False),
     (("algo.use_rollout_logprobs=true", "algo.use_rollout_entropy=true", "algo.ppo_epochs=2"), True)],
)  # fmt: skip
def test_the_pass_for_old_logprobs_is_counted_if_it_runs(overrides: tuple[str, ...], expected: bool) -> None:
    assert ("old logprobs" in [part.name for part in plan(*overrides).roofline.parts]) is expected


def seconds_of_training(*overrides: str) -> float:
    found = plan(*overrides, response_tokens=512)
    return next(part.seconds for part in found.roofline.parts if part.name == "forward and backward")


@pytest.mark.parametrize(
    ("overrides", "reached", "trained", "head"),
    [((), 1, 1, 2), (("train.freeze_params=['layers[.]([0-9]|1[0-7])[.]','embed_tokens']",), 0.5, 0.5, 1),
     (("train.freeze_params=['layers[.](1[89]|2[0-9]|3[0-9])[.]','embed_tokens']",), 1, 0.5, 1)],
)  # fmt: skip
def test_weights_that_are_frozen_have_no_gradients_to_compute(
    overrides: tuple[str, ...], reached: float, trained: float, head: int
) -> None:
    found = plan(response_tokens=512)
    cost, tokens = found.model.forward_cost, found.batches.tokens
    linear, pairs, rows = cost.per_token, cost.per_pair * 512, cost.per_logit_row * found.batches.trainable_tokens
    forward = tokens * (linear + pairs) + rows
    backward = tokens * (linear * (reached + trained) + pairs * 2 * reached) + rows * head
    again = tokens * (linear + pairs) * reached  # recomputed
    assert found.recompute
    assert seconds_of_training(*overrides) == pytest.approx((forward + backward + again) / (4 * 989e12), rel=1e-3)


def test_sliding_windows_shorten_every_bound(tmp_path: Path) -> None:
    def parts(**fields: object) -> dict[str, float]:
        content = {"model_type": "mistral", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
        (tmp_path / "config.json").write_text(json.dumps({**content, "vocab_size": 100, **fields}))
        found = plan("model=hf", f"model.hf_checkpoint={tmp_path}", "rollout=sglang", response_tokens=512)
        return {part.name: part.seconds for part in found.roofline.parts}

    full, wide, narrow = parts(), parts(sliding_window=1024), parts(sliding_window=64)
    assert full == wide
    changed = {name for name, seconds in full.items() if narrow[name] < seconds}
    assert {"prefill", "decode", "forward and backward"} <= changed


def test_the_backward_pass_of_adapters_has_no_gradients_of_the_base() -> None:
    found = plan(response_tokens=512)
    cost, tokens = found.model.forward_cost, found.batches.tokens
    base = tokens * cost.per_token + found.batches.trainable_tokens * cost.per_logit_row
    whole, adapters = seconds_of_training(), seconds_of_training("train.lora.rank=1")
    assert whole - adapters == pytest.approx(base / (4 * 989e12), rel=0.01)


def test_gradients_are_reduced_among_the_ranks_that_share_them() -> None:
    slow = replace(H100, link_bandwidth=1e6, network_bandwidth=1e6)

    def seconds(*overrides: str, experiment: str) -> float:
        found = make_plan(config(*overrides, experiment=experiment), slow, prompt_tokens=512)
        return next(part.seconds for part in found.roofline.parts if part.name == "forward and backward")

    sizes = ("megatron.tensor_model_parallel_size=4", "megatron.expert_model_parallel_size=8",
             "megatron.expert_tensor_parallel_size=1")  # fmt: skip
    moe = plan(*sizes, experiment="qwen3_30b_a3b_gspo")
    experts = 48 * 128 * 3 * 2048 * 768
    # Two ranks share each part of the dense weights, none those of experts. Gradients of 4 bytes, weights of 2.
    expected = moe.batches.steps * 6 * (moe.model.parameters - experts) / 4 * 1 / 2 / 1e6
    assert seconds(*sizes, experiment="qwen3_30b_a3b_gspo") == pytest.approx(expected, rel=1e-6)
    # FSDP gathers weights for every pass, but reduces only the gradients of adapters.
    whole, adapters = (seconds(*words, experiment="qwen3_4b_grpo") for words in ((), ("train.lora.rank=1",)))
    dense = plan()
    assert whole - adapters == pytest.approx(dense.batches.steps * 4 * dense.model.parameters * 3 / 4 / 1e6, rel=0.01)


def test_decoding_reads_the_experts_of_its_tokens() -> None:
    from rlscale.plan.roofline import weight_fraction

    a = plan(experiment="qwen3_30b_a3b_gspo").model
    one, many = weight_fraction(a, 1), weight_fraction(a, 1000)
    assert one == pytest.approx(a.active_parameters / a.parameters, rel=1e-6)
    assert many == pytest.approx(1.0)
    assert weight_fraction(plan().model, 1) == 1.0
    every = replace(a, experts_per_token=a.num_experts)
    assert weight_fraction(every, 1) == 1.0


def test_expert_routing_of_a_rollout_uses_host_memory() -> None:
    overrides = ("train=megatron", "algo.use_rollout_routing_replay=true")
    found = plan(*overrides, experiment="qwen3_30b_a3b_gspo")
    assert found.batches.route_bytes == found.batches.tokens * 48 * 8  # 128 experts: a byte each
    assert plan(*overrides[:1], experiment="qwen3_30b_a3b_gspo").batches.route_bytes == 0


@pytest.mark.parametrize("num_experts", [128, 255, 256, 384])
def test_route_bytes_match_those_of_samples(num_experts: int) -> None:
    a = replace(plan("train=megatron", experiment="qwen3_30b_a3b_gspo").model, num_experts=num_experts)
    shape = RouteShape(num_layers=a.num_layers, num_chosen=a.experts_per_token, num_experts=num_experts)
    assert route_bytes_per_token(a) == shape.bytes_per_token


def test_parallel_sizes_divide_the_memory_of_a_megatron_rank() -> None:
    overrides = ("train=megatron", "cluster.actor_num_gpus_per_node=8")
    whole = plan(*overrides, "megatron.use_distributed_optimizer=false")
    spread = plan(*overrides)
    cut = plan(*overrides, "megatron.tensor_model_parallel_size=4", "megatron.use_distributed_optimizer=false")
    assert whole.trainer is not None and spread.trainer is not None and cut.trainer is not None
    assert whole.trainer.weights == 2 * whole.model.parameters
    assert spread.trainer.optimizer == whole.trainer.optimizer / 8
    assert cut.trainer.weights == whole.trainer.weights / 4
    muon = plan(*overrides, "optim.name=muon").trainer
    assert muon is not None and muon.optimizer == whole.trainer.optimizer > spread.trainer.optimizer
    host = ("megatron.optimizer_cpu_offload=true", "megatron.optimizer_offload_fraction=0.75")
    offloaded, float32 = plan(*overrides, *host).trainer, plan(*overrides, "train.dtype=float32").trainer
    assert offloaded is not None and offloaded.optimizer == spread.trainer.optimizer / 4
    assert float32 is not None and float32.optimizer == 2 * float32.weights / 8  # the weights are the master weights


def test_memory_on_a_cpu_is_that_of_the_machine() -> None:
    quickstart = load_config_with_notes(["experiment=quickstart"]).config
    found = make_plan(quickstart, find_hardware("cpu"))
    (budget,) = found.memory_budgets
    assert budget.fits
    assert budget.available == find_hardware("cpu").memory_bytes > 2**30


def test_a_machine_with_too_little_memory_is_reported() -> None:
    quickstart = load_config_with_notes(["experiment=quickstart"]).config
    found = make_plan(quickstart, replace(HARDWARE["cpu"], memory_bytes=1e9))
    assert len(found.over_budget) == 1


def test_places_fill_node_after_node() -> None:
    layout = Layout(num_trainers=16, num_engines=4, gpus_per_engine=4, colocate=False)
    found = place_actors(layout, gpus_per_node=8)
    assert (found[15].node, found[15].gpu, found[15].actors) == (1, 7, ("actor rank 15",))
    assert (found[20].node, found[20].gpu, found[20].actors) == (2, 4, ("engine 1",))
    assert list(placement_rows(found)) == [("0-1", "0-7", "actor ranks 0-15"), ("2-3", "0-7", "engines 0-3")]


def test_mixed_nodes_have_a_row_for_each_kind_of_actor() -> None:
    layout = Layout(num_trainers=4, num_engines=4, gpus_per_engine=1, colocate=False)
    rows: list[Any] = list(placement_rows(place_actors(layout, gpus_per_node=8)))
    assert rows == [("0", "0-3", "actor ranks 0-3"), ("0", "4-7", "engines 0-3")]


def test_constants_match_those_of_modules_that_import_torch() -> None:
    from rlscale.engines.embedded.scheduler_options import SchedulerOptions
    from rlscale.engines.launch_sglang import ON_CPU
    from rlscale.models import hf_weights
    from rlscale.models.batch_shapes import MIN_LENGTH
    from rlscale.plan import activations, host_memory, plan
    from rlscale.plan import engine_memory as engine
    from rlscale.training.attention import packed as attention
    from rlscale.training.fsdp import export, export_plan
    from rlscale.training.modules import logprob_head as head

    assert activations.TILE_ELEMENTS == head.TILE_ELEMENTS
    assert activations.MIN_CHUNKED_VOCABULARY == head.MIN_VOCABULARY
    assert plan.MAX_MATRIX_LEN == attention._MAX_SHORT
    assert (host_memory.COPIED_BYTES, host_memory.MESSAGE_BYTES) == (hf_weights.BLOCK_BYTES, export.BUCKET_BYTES)
    assert host_memory.MAX_SENDERS == export_plan.MAX_SENDERS
    assert (MIN_LENGTH, SchedulerOptions().max_cached_tokens) == (engine.MIN_CACHE_LEN, engine.MAX_CACHED_TOKENS)
    assert engine.SGLANG_FRACTION["cpu"] == ON_CPU["mem_fraction_static"]
    assert ON_CPU["max_total_tokens"] == engine.SGLANG_CPU_TOKENS


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (
            "qwen3_next",
            {"linear_value_head_dim": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        ),
        ("qwen3_5_text", {"linear_value_head_dim": 16}),
        ("gpt_oss", {"intermediate_size": 64}),
        ("minimax_m2", {"intermediate_size": 64}),
    ],
)
def test_low_precision_of_a_family_has_the_size_of_its_tensors(
    tmp_path: Path, family: str, fields: dict[str, int]
) -> None:
    folder = write_tiny(tmp_path, family=family, **fields)
    weights = load_file(folder / "model.safetensors")
    a = Architecture.from_config_json(json.loads((folder / "config.json").read_text()))
    sent = dict(quantize_weights(weights.items(), "int4"))
    packed = [name for name in sent if name.endswith("_packed")]
    shapes = sum(tensor.nbytes for name, tensor in sent.items() if name.endswith("_shape"))
    found = WeightFormat(dtype_bytes=4, precision="int4").model_bytes(a)
    # Shapes of gate and up projections are counted once, and those of experts by matrix.
    assert sum(tensor.nbytes for tensor in sent.values()) - shapes <= found
    assert found <= sum(tensor.nbytes for tensor in sent.values()) - shapes + 16 * max(a.num_experts, 1) * len(packed)


def test_low_precision_counts_in_the_engine_and_in_a_sync() -> None:
    before = plan("rollout.weight_precision=null")
    fp8 = plan("rollout.weight_precision=fp8")
    assert before.engine is not None and fp8.engine is not None
    assert before.sync is not None and fp8.sync is not None
    a = before.model
    norms = a.num_layers * (2 * a.hidden_size + 2 * a.head_dim)  # Qwen3 also has norms of queries and keys
    linear = a.parameters - a.root_parameters - norms
    kept = 2 * (a.root_parameters + norms)
    assert before.sync.num_bytes == 2 * linear + kept
    # All widths of Qwen3-4B are multiples of 128.
    assert fp8.sync.num_bytes == linear * (1 + 4 / 128**2) + kept
    int4 = WeightFormat(dtype_bytes=2, precision="int4").model_bytes(a)
    assert int4 == linear * (1 / 2 + 2 / 32) + 16 * 7 * a.num_layers + kept
    ratio = fp8.sync.num_bytes / before.sync.num_bytes
    assert fp8.engine.weights / before.engine.weights == pytest.approx(ratio)
    assert fp8.engine.cache > before.engine.cache and fp8.engine.precision == "fp8"
