"""The series of learning rates of LoRA: its runs, table, picture and page, and a run of one step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.config import ModelBuild, ModelConfig
from rlscale.models.tiny import build_model

ROOT = Path(__file__).parents[3]


def row(rank: int, multiple: int, seed: int, *ends: float) -> dict[str, Any]:
    return {
        "rank": rank,
        "multiple": multiple,
        "seed": seed,
        "held_out": [[10 * i, value] for i, value in enumerate(ends)],
        "trained_parameters": 1000 * (rank or 500),
        "logprob_diff": 1e-7,
        "load": 0.5,
        "cpu_s": 30.0,
    }


ROWS = [row(8, 1, 1, 0.3, 0.4), row(8, 3, 1, 0.3, 0.5), row(8, 3, 2, 0.3, 0.9), row(0, 1, 1, 0.3, 0.75)]


def test_runs_without_a_row_are_missing() -> None:
    from lora_regret import Point, all_points, missing_points

    assert len(set(all_points())) == 48
    left = missing_points(ROWS)
    assert len(left) == 44 and Point(rank=8, multiple=3, seed=2) not in left
    assert Point(rank=8, multiple=3, seed=3) in left


def test_the_best_rate_is_that_of_the_highest_mean() -> None:
    from lora_regret import best_multiple, mean_curve

    assert (best_multiple(ROWS, 8), best_multiple(ROWS, 0), best_multiple(ROWS, 64)) == (3, 1, None)
    assert mean_curve(ROWS, 8, 3) == [(0, pytest.approx(0.3)), (10, pytest.approx(0.7))]


def test_the_table_has_means_and_ranges() -> None:
    from lora_regret import Settings, table

    lines = table(ROWS, Settings(base_lr=1e-3)).splitlines()
    assert lines[0] == "| trained | parameters | 0.001 | 0.003 | 0.01 | 0.03 |"
    assert "| rank 8 | 8,000 | 0.40 (1 seed) | **0.70** (0.50 - 0.90, 2 seeds) | - | - |" in lines
    assert "| rank 64 | 0 | - | - | - | - |" in lines and lines[-1].startswith("| full | 500,000 | **0.75** (1 seed) |")


def test_results_are_written_and_read_again(tmp_path: Path) -> None:
    from lora_regret import Settings, asdict, read, write

    settings = Settings()
    write({"machine": {}, "settings": asdict(settings), "runs": ROWS}, tmp_path, tmp_path / "picture.svg")
    assert "44 of 48 runs are missing" in (tmp_path / "lora_regret.md").read_text()
    assert read(tmp_path / "lora_regret.json", settings) == ROWS
    with pytest.raises(SystemExit, match="runs of other settings"):
        read(tmp_path / "lora_regret.json", Settings(num_rollouts=1))
    picture = (tmp_path / "picture.svg").read_text()
    assert "prefers-color-scheme: dark" in picture
    assert [text for text in ("rank 8", "full", "held-out reward", "learning rate") if text not in picture] == []
    assert "rank 64" not in picture


def test_the_page_has_the_measured_table() -> None:
    from lora_regret import Settings, table

    content = json.loads((ROOT / "benchmarks" / "results" / "lora_regret.json").read_text())
    page = (ROOT / "docs" / "how-to" / "lora-rates.md").read_text()
    assert table(content["runs"], Settings(**content["settings"])) in page


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_trains_in_one_process(tmp_path: Path, rank: int) -> None:
    from lora_regret_run import Point, Settings, train, world_of_one

    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    model = build_model(ModelConfig(build=ModelBuild.tiny_qwen3, num_attention_heads=4, **sizes), tmp_path)
    settings = Settings(num_rollouts=2, eval_interval=1, num_prompts=2, num_samples=2, base_lr=1e-2, num_warmup=1)
    threads = torch.get_num_threads()
    with world_of_one():
        found = train(Path(model), Point(rank=rank, multiple=1, seed=1), settings)
    torch.set_num_threads(threads)
    assert [step for step, _ in found["held_out"]] == [0, 1, 2] and len(found["rewards"]) == 2
    # The second rollout is of updated weights, so the engine has them.
    assert found["logprob_diff"] < 1e-5
    # Adapters of rank 4 on the 7 linear layers of 2 layers, widths 32 and 16 (keys, values).
    assert not rank or found["trained_parameters"] == 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 32))
