"""The benchmark of engines in low precision: its runs, its tables, its gradients, and the page that quotes them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlscale.config import ModelBuild, ModelConfig
from rlscale.models.tiny import build_model
from rlscale.types import Group, Prompt, Sample

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "low_precision.json"
PAGE = ROOT / "docs" / "how-to" / "low-precision.md"


def learned(precision: str | None, tis: bool, seed: int, after: float) -> dict[str, Any]:
    rewards = {"before": 0.3, "after": after, "after_dense": after + 0.01}
    differences = {"mean": 0.1, "max": 2.0 + seed, "k3": 0.02, "tis_mean": 0.999, "tis_clipfrac": 0.01}
    return {"model": "dense", "precision": precision, "tis": tis, "seed": seed, **rewards, **differences}


def test_each_seed_has_every_case_once() -> None:
    from low_precision import learnings, syncs

    assert len(set(syncs())) == 3 * 2 * 3 and len(set(learnings())) == 3 * 2 * 5
    first = [each for each in learnings() if each.seed == 1 and each.model == "dense"]
    assert learnings()[:5] == first
    assert [(each.precision, each.tis) for each in first][:2] == [(None, False), ("fp8", False)]


def test_the_table_of_learning_has_means_and_ranges() -> None:
    from low_precision import learning_table

    rows = [learned("int4", True, 1, 0.8), learned("int4", True, 2, 0.9), learned(None, False, 1, 0.7)]
    full, tis = learning_table(rows).splitlines()[2:]
    assert full.startswith("| dense | as trained | no | 0.300 | 0.700 (0.700 - 0.700) |") and full.endswith(
        "- | - | 1 |"
    )
    assert "0.850 (0.800 - 0.900) | 0.860 (0.810 - 0.910) | 1.0e-01 | 4.0e+00 |" in tis
    assert tis.endswith("| 0.9990 | 1.00% | 2 |")


def test_the_table_of_a_sync_compares_with_the_same_dtype() -> None:
    from low_precision import sync_table

    sent = {("float32", None): 400, ("float32", "fp8"): 104, ("bfloat16", None): 200, ("bfloat16", "fp8"): 102}
    measured = {"parameters": 100, "planned_bytes": 104.0, "mean": 0.1, "max": 1.0, "k3": 0.01}
    rows = [
        {"model": "dense", "dtype": dtype, "precision": precision, "sent_bytes": number, **measured}
        for (dtype, precision), number in sent.items()
    ]
    ratios = [line.split(" | ")[5] for line in sync_table(rows).splitlines()[2:]]
    assert ratios == ["1.00", "0.26", "1.00", "0.51"]


def test_runs_without_a_row_are_missing() -> None:
    from low_precision import Learning, find_row

    row = learned("int4", True, 1, 0.8)
    assert find_row([row], Learning(model="dense", precision="int4", tis=True, seed=1)) is row
    assert find_row([row], Learning(model="dense", precision="int4", tis=False, seed=1)) is None


def test_the_pages_have_the_measured_tables() -> None:
    from low_precision import gradient_table, learning_table, sync_table

    content = json.loads(RESULTS.read_text())
    text, page = RESULTS.with_suffix(".md").read_text(), PAGE.read_text()
    tables = (sync_table(content["sync"]), gradient_table(content["gradient"]), learning_table(content["learning"]))
    assert all(table in text for table in tables)
    assert gradient_table(content["gradient"]) in page
    # The page has some of the rows of the longer table.
    assert [line for line in page.splitlines() if " | float32 | " in line] == [
        line for line in sync_table(content["sync"]).splitlines() if " | float32 | " in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "weight"), [(1.5, 1.5), (3.0, 2.0)])
def test_a_gradient_has_the_truncated_weights_of_its_tokens(tmp_path: Path, ratio: float, weight: float) -> None:
    from low_precision_gradient import gradient

    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    model = build_model(ModelConfig(build=ModelBuild.tiny_qwen3, num_attention_heads=4, **sizes), tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = Prompt(index=0, text="", token_ids=(5, 6, 7))
    group = Group(index=0, prompt=prompt, samples=[])
    for reward, response in ((1.0, [8, 9]), (0.0, [10, 11, 12])):
        ids = [*prompt.token_ids, *response]
        logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        own = [float(logprobs[len(prompt.token_ids) - 1 + i, token]) for i, token in enumerate(response)]
        sample = Sample(index=len(group.samples), group_index=0, prompt=prompt, seed=0)
        sample.append(response, logprobs=[each - math.log(ratio) for each in own], weight_versions=[0] * len(response))
        sample.reward = reward
        group.samples.append(sample)
    plain = gradient(policy, [group], tis=False)
    assert plain.norm() > 0
    torch.testing.assert_close(gradient(policy, [group], tis=True), weight * plain, atol=1e-6, rtol=1e-4)
