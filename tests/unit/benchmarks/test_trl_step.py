"""Computations of the comparison with TRL and of the start-up benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.models.hf_models import load_causal_lm, load_tokenizer


def make_case(**changes: Any) -> Any:
    from trl_cases import Case

    given = {
        "name": "test",
        "title": "a test",
        "min_ratio": 2.0,
        "num_prompts": 2,
        "num_samples": 2,
        "max_new_tokens": 4,
        "dtype": "float32",
        "num_steps": 3,
        "num_warmup": 1,
        "reward": "parity",
        "micro_batch": 4,
        "max_tokens": 100,
    }
    return Case(**given | changes)


def make_run(side: str, step_s: list[float]) -> Any:
    from trl_step import Run

    return Run(
        side=side,
        case="test",
        step_s=step_s,
        generate_s=[0.1],
        mean_lengths=[2.0],
        max_lengths=[4],
        wall_s=9.0,
        load=0.0,
    )


def test_steps_are_counted_from_the_end_of_the_last_warmup_step() -> None:
    from trl_step import counted_steps

    assert counted_steps([10.0, 20.0, 21.0, 23.0], num_warmup=2) == [1.0, 2.0]
    with pytest.raises(AssertionError):
        counted_steps([10.0, 20.0], num_warmup=2)


def test_ratios_are_relative_to_the_faster_variant_of_trl() -> None:
    from trl_step import OURS, TRL, TRL_COMPILED, summarise, table

    fast, slow, _ = OURS
    runs = [
        make_run(TRL, [4.0, 4.0, 90.0]),
        make_run(TRL_COMPILED, [2.0]),
        make_run(fast, [0.5, 0.5]),
        make_run(slow, [1.0]),
        make_run(fast, [0.4]),
    ]
    summary = summarise(make_case(), runs)
    assert summary["ratios"] == {fast: 4.0, slow: 2.0}
    assert summary["sides"][TRL]["samples_per_s"] == 1.0
    assert summary["sides"][fast]["fastest_run_s"] == 0.4
    assert table(summary).count("\n") == 3 and "**4.00**" in table(summary)


@pytest.mark.parametrize(("end_rate", "least", "most"), [(0, 0.0, 1e-6), (0.25, 0.05, 0.5), (0.9, 0.4, 1.0)])
@pytest.mark.slow
def test_a_prepared_model_ends_its_answers_at_the_configured_rate(
    tmp_path: Path, end_rate: float, least: float, most: float
) -> None:
    from trl_cases import prepare

    figures = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": end_rate == 0}
    files = prepare(make_case(figures=figures, prompt_len=8, end_rate=end_rate), tmp_path)
    model, tokenizer = load_causal_lm(str(files.model), dtype=torch.float32), load_tokenizer(str(files.model))
    with torch.no_grad():
        probabilities = model(torch.tensor(files.prompt_ids[:64])).logits.softmax(dim=-1)[..., tokenizer.eos_token_id]
    assert least <= float(probabilities.mean()) <= most
    assert json.loads(files.prompts.read_text().splitlines()[0])["prompt"] == files.texts[0]


def test_overrides_have_the_sizes_of_the_case(tmp_path: Path) -> None:
    from trl_cases import Prepared
    from trl_step import overrides

    import rlscale

    files = Prepared(model=tmp_path, prompts=tmp_path / "p.jsonl", texts=[], labels=[], prompt_ids=[], num_parameters=1)
    config = rlscale.load_config(overrides(make_case(), files, folder=tmp_path / "run"))
    assert (config.batch.rollout_batch_size, config.batch.n_samples_per_prompt) == (2, 2)
    assert (config.rollout.max_response_len, config.data.num_rollout, config.rollout.shuffle) == (4, 3, False)
    assert config.eval.interval is None and config.model.warmup_experiment is None


def test_parity_is_one_for_an_even_sum() -> None:
    from types import SimpleNamespace

    from trl_rewards import parity

    assert [parity(SimpleNamespace(tokens=[9, *ids], response_len=len(ids))) for ids in ([1, 2], [2, 4])] == [0.0, 1.0]


def test_startup_parts_are_medians_in_order_of_their_ends() -> None:
    from startup import medians, table

    runs = [{"b": (1.0, 3.0), "a": (0.0, 1.0)}, {"b": (2.0, 6.0), "a": (0.0, 2.0)}, {"b": (2.0, 5.0), "a": (0.0, 2.0)}]
    assert medians(runs) == {"a": (0.0, 2.0), "b": (2.0, 3.0)}
    ends = [{**run, "first training step": (5.0, 7.5)} for run in runs]
    assert "| **7.50** |" in table({"now": ends})
