"""The guides for users of other projects match the tables of rlscale-migrate."""

from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.config.keys import find_key, keys
from rlscale.config.passthrough import is_passthrough
from rlscale.errors import ConfigError
from rlscale.migration.argument_tables import read_defaults, read_table
from rlscale.migration.foreign_arguments import Project
from scripts.docs.migration_pages import example_overrides, make_page

FOLDER = Path(__file__).parents[3] / "docs" / "how-to"


@pytest.mark.parametrize("project", Project)
def test_a_page_is_current(project: Project) -> None:
    text = (FOLDER / f"from-{project}.md").read_text(encoding="utf-8")
    assert text == make_page(project), "run python -m scripts.docs.migration_pages docs/how-to"


@pytest.mark.parametrize("project", Project)
def test_every_argument_is_on_it(project: Project) -> None:
    page = make_page(project)
    assert all(f"| `{row.argument}` |" in page for row in read_table(project).values())


@pytest.mark.parametrize("project", Project)
def test_every_key_of_a_table_exists(project: Project) -> None:
    names = [row.key for row in read_table(project).values() if row.key]
    names += [default.key for default in read_defaults(project)]
    assert [name for name in names if find_key(name) is None and not is_passthrough(name)] == []


def test_every_argument_of_slime_with_a_key_is_in_the_table() -> None:
    """The list of arguments of the founding documents is part of the table."""
    from rlscale.plugins.argument_keys import ARGUMENT_KEYS

    table = read_table(Project.slime)
    known = {row.key for row in table.values()}
    renamed = {"logging.wandb.key", "model.name", "train.qkv_format"}
    assert set(ARGUMENT_KEYS.values()) - known - renamed == set()


def test_the_example_is_a_configuration() -> None:
    config = load_config(["experiment=null", *example_overrides()])
    assert config.batch.global_batch_size == 256 and config.cluster.colocate is True
    assert config.algo.grpo_std_normalization is False and config.rollout.engine == "sglang"
    assert len(keys()) > 200


def test_a_flag_as_slime_has_it_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"did you mean batch\.rollout_batch_size=32\?"):
        load_config(["--rollout-batch-size=32"])
