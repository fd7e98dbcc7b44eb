"""Host memory of a rank up to its first step, compared with hand-computed values."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from rlscale.config import load_config_with_notes
from rlscale.plan import HARDWARE, Plan, make_plan
from rlscale.plan.host_memory import COPIED_BYTES, PROCESS_BYTES
from rlscale.plan.tables import print_plan

ON_CPU = ("cluster.device=cpu", "rollout=embedded")
BUCKET = 512 * 2**20
SMALL = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}


def plan(*overrides: str, experiment: str = "qwen3_4b_grpo") -> Plan:
    arguments = [f"experiment={experiment}", "cluster.device=cuda", *overrides]
    return make_plan(load_config_with_notes(arguments, to_run=False).config, HARDWARE["h100"], prompt_tokens=512)


def printed(found: Plan) -> str:
    text = io.StringIO()
    print_plan(found, [], Console(file=text, width=200))
    return re.sub(r"  +", "  ", text.getvalue())


def test_a_rank_on_a_cpu_keeps_the_shards_of_all_its_models() -> None:
    roles = ("algo.advantage_estimator=ppo", "algo.opd_kl_coef=0.1", "model.teacher_load=/no/such")
    found = plan(*ON_CPU, *roles, "cluster.offload_train=false")
    assert found.host is not None and found.trainer is not None and found.critic is not None
    weights = 4 * found.model.parameters / 4  # float32 on 4 ranks
    assert found.host.models.keys() == {"policy", "reference", "critic", "teacher"}
    assert all(size == pytest.approx(weights, rel=1e-6) for size in found.host.models.values())
    assert found.host.load == 0, "rows are copied from mapped files into the shards"
    assert found.host.peak == PROCESS_BYTES + found.host.kept + found.host.sync
    table = printed(found).partition("host memory of a trainer rank up to the first step")[2]
    for row in ("policy", "reference", "critic", "teacher"):
        assert f"\n{row}  3.75 GiB" in table
    assert "\nPython and packages  267 MiB" in table and "copy" not in table
    assert "\nbuffers of the first weight sync  " in table and "\npeak  " in table
    assert found.trainer.teacher == found.trainer.weights, "it is on the device, too"
    assert "teacher" in found.memory_budgets[0].parts
    offloaded = plan(*ON_CPU, *roles)
    assert offloaded.host is not None and "copy of the offloaded policy  3.75 GiB" in printed(offloaded)
    assert offloaded.host.peak == found.host.peak + found.host.models["policy"]
    assert found.to_dict()["host"]["peak"] == found.host.peak


def test_buffers_of_the_first_sync() -> None:
    several, disk = (plan(*ON_CPU, f"train.weight_channel={channel}").host for channel in ("process_group", "disk"))
    assert several is not None and disk is not None
    assert several.sync == disk.sync, "two buckets of half the size, or one"
    embedding = 2 * 151936 * 2560
    assert disk.sync == BUCKET + 3 * (embedding + 2**25)
    alone = plan(*ON_CPU, experiment="quickstart").host
    assert alone is not None and alone.sync < 2**25, "a small model has one small bucket"


def test_a_rank_on_a_gpu_keeps_only_copies_of_offloaded_models() -> None:
    on_gpu, offloaded = (plan(f"cluster.offload_train={value}").host for value in ("false", "true"))
    assert on_gpu is not None and offloaded is not None
    assert (on_gpu.kept, on_gpu.load) == (0, COPIED_BYTES)
    assert offloaded.models["policy"] == pytest.approx(4_022_468_096, rel=1e-6)


def test_experts_of_a_layer_are_stacked_while_a_model_is_loaded() -> None:
    found = plan("train=fsdp", experiment="qwen3_30b_a3b_gspo").host
    assert found is not None
    num_ranks = plan("train=fsdp", experiment="qwen3_30b_a3b_gspo").layout.num_trainers
    assert found.load == 4 * 2 * (128 / num_ranks) * 768 * 2048 + COPIED_BYTES
    assert plan(experiment="qwen3_30b_a3b_gspo").host is None, "Megatron-core's load is not planned"


def test_a_dedicated_critic_has_a_column() -> None:
    found = plan("cluster.critic_num_gpus_per_node=2", *ON_CPU, experiment="qwen3_4b_ppo")
    assert found.host is not None and found.critic_host is not None
    assert "critic" not in found.host.models and found.critic_host.models.keys() == {"critic"}
    assert found.critic_host.sync == 0, "its weights stay"
    assert "host memory of a trainer rank and a critic rank up to the first step" in printed(found)


def test_roles_have_the_shapes_of_their_own_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **HEADS}))
    own = (f"critic.load={tmp_path}", f"model.teacher_load={tmp_path}", "algo.opd_kl_coef=0.1")
    found = plan(*ON_CPU, "algo.advantage_estimator=ppo", *own)
    assert found.host is not None and found.critic is not None
    assert found.host.models["teacher"] == found.host.models["critic"]
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 2 * 16 + 3 * 64 * 128 + 2 * 64
    assert found.host.models["teacher"] == 4 * (2 * layer + 512 * 64 + 64) / 4
    assert found.critic.weights == found.host.models["critic"]


@pytest.mark.parametrize("role", ["teacher", "reference"])
def test_a_model_that_scores_can_need_more_than_the_policy(role: str, tmp_path: Path) -> None:
    large = {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **large}))
    words = {
        "teacher": ("algo.opd_kl_coef=0.1", f"model.teacher_load={tmp_path}", "algo.use_kl_loss=false"),
        "reference": (f"model.ref_load={tmp_path}", "algo.use_kl_loss=true"),
    }
    moves = ("cluster=one_node_colocate", "cluster.offload_train_mode=move", *words[role])
    found = plan(*moves)
    # Moved to the GPU to score, alone: 405e9 float32 weights over 8 ranks do not fit on a GPU of 80 GB.
    (budget,) = found.memory_budgets
    assert found.trainer is not None and budget.parts[role] == getattr(found.trainer, role) > 150e9
    assert "optimizer" not in budget.parts and not budget.fits


def test_supervised_training_syncs_no_weights() -> None:
    found = plan(experiment="sft").host
    assert found is not None and found.sync == 0
