"""Memory of the divergence over tokens from a teacher in the plan."""

import pytest

from rlscale.config import RunConfig, load_config_with_notes
from rlscale.plan import HARDWARE, Plan, make_plan

KINDS = ("sampled", "top_k", "full")
TEACHER = ("algo.opd_kl_coef=0.1", "model.teacher_load=/no/such")
VOCABULARY, WIDTH = 151936, 2560  # of the policy, for which the teacher is taken


def config(*words: str, experiment: str = "qwen3_4b_grpo") -> RunConfig:
    return load_config_with_notes([f"experiment={experiment}", *words], to_run=False).config


def plan(config: RunConfig) -> Plan:
    return make_plan(config, HARDWARE["h100"], prompt_tokens=512)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_copy_of_the_output_layer_and_a_few_tiles_are_counted(backend: str) -> None:
    on_gpu = ("cluster.device=cuda", f"train={backend}", *TEACHER)
    configs = [config(*on_gpu, f"algo.opd_kl={kind}") for kind in KINDS]
    sampled, top, full = (plan(each) for each in configs)
    assert sampled.trainer is not None and top.trainer is not None and full.trainer is not None
    ranks = configs[0].megatron.tensor_model_parallel_size if backend == "megatron" else 1
    for name, parts in full.trainer.phases.items():
        assert parts["teacher's output layer"] == 2 * (VOCABULARY / ranks) * WIDTH
        before = dict(sampled.trainer.phases[name])
        assert {key: value for key, value in parts.items() if key in before} == before
    assert not any("teacher's output layer" in parts for parts in top.trainer.phases.values())
    tile = 4 * (2**25 // (VOCABULARY // ranks)) * (VOCABULARY // ranks)
    assert full.trainer.phases["logits"]["teacher's logits"] == pytest.approx(3 * tile)
    assert full.trainer.phases["gradient of logits"]["teacher's logits"] == pytest.approx(2 * tile)
    # The most likely tokens need no logits of the teacher, but as many tiles for the gradient.
    given = top.trainer.phases["logits"]["teacher's logits"]
    assert top.trainer.phases["gradient of logits"]["teacher's logits"] == pytest.approx(given + 2 * tile)


def test_a_small_vocabulary_has_all_logits_of_a_micro_batch() -> None:
    found = plan(config(*TEACHER, "algo.opd_kl=full", experiment="quickstart"))
    assert found.trainer is not None
    phase = found.trainer.phases["gradient of logits"]
    assert phase["teacher's logits"] > phase["logits"]
