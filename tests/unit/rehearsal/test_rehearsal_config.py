"""Configs of a rehearsal, loaded with all rules, for every recipe."""

from pathlib import Path

import pytest

from rlscale.config import load_config_with_notes
from rlscale.config.hydra.config_folders import packaged_folder
from rlscale.driver.warmup import to_hydra
from rlscale.errors import ConfigError
from rlscale.rehearsal.cut_layout import cut_layout, read_sizes
from rlscale.rehearsal.generated_files import stand_in_data
from rlscale.rehearsal.rehearsal import Rehearsal
from rlscale.rehearsal.rehearsal_config import Overrides, layout_overrides
from tests.recipes import AGENT_EXAMPLES, RUNNABLE


def loaded(experiment: str, *given: str, overrides: Overrides | None = None, to_run: bool = True):  # type: ignore[no-untyped-def]
    text = [f"{key}={to_hydra(value)}" for key, value in (overrides or {}).items()]
    return load_config_with_notes([f"experiment={experiment}", *given, *text], to_run=to_run).config


def test_every_recipe_is_listed() -> None:
    recipes = {file.stem for file in Path(packaged_folder() / "experiment").glob("*.yaml")}
    assert recipes == set(RUNNABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "overlays"),
    [*((name, ()) for name in RUNNABLE), *((name, ("on=qwen3_4b",)) for name in AGENT_EXAMPLES)],
)
def test_the_cut_layout_keeps_every_rule_of_a_run_on_gpus(experiment: str, overlays: tuple[str, ...]) -> None:
    config = loaded(experiment, *overlays, to_run=False)
    cut = cut_layout(read_sizes(config))
    on_gpus = loaded(experiment, *overlays, overrides=layout_overrides(config, cut), to_run=False)
    assert read_sizes(on_gpus) == cut
    assert on_gpus.batch.num_steps_per_rollout == config.batch.num_steps_per_rollout
    assert on_gpus.batch.n_samples_per_prompt == config.batch.n_samples_per_prompt
    assert on_gpus.batch.global_batch_size <= config.batch.global_batch_size
    assert on_gpus.model.hf_checkpoint == config.model.hf_checkpoint


def test_data_that_exists_is_used_and_missing_data_is_generated(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "1+1=", "label": "2"}\n')
    given = (f"data.prompt_data={mine}", 'eval.prompt_data=[aime, "missing/aime.jsonl@[100:200]"]')
    files = stand_in_data(loaded("qwen3_4b_grpo", *given), tmp_path / "made")
    assert files.train == (str(mine),)
    made = str(tmp_path / "made" / "eval_aime.jsonl")
    assert files.evaluation == ("aime", f"{made}@[100:200]")
    assert files.generated == {"missing/aime.jsonl@[100:200]": f"{made}@[100:200]"}
    assert len(Path(made).read_text().splitlines()) >= 200


def test_the_folder_of_a_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_text("{}")
    config = loaded("quickstart", "on=rehearsal", f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"run\.dir must be a new folder"):
        Rehearsal(config)._prepare(())
