"""Plain Hydra composes rlscale's groups, typed, after `rlscale.register()`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

import rlscale
from rlscale.config import RunConfig
from rlscale.config.hydra.compose import make_loader
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.config_store import ConfFolder
from rlscale.config.run_config import AlgoConfig
from rlscale.errors import ConfigError
from tests.recipes import RUNNABLE
from tests.unit.config.options import GROUPS, OPTIONS

QUICK = ("quickstart", "qwen3_30b_a3b_gspo")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Registers the groups, and restores Hydra's state of this process."""
    store, plugins = ConfigStore.instance(), Plugins.instance()
    before = dict(store.repo)
    known = list(plugins.plugin_type_to_subclass_list[SearchPathPlugin])
    rlscale.register()
    yield
    store.repo = before
    plugins.plugin_type_to_subclass_list[SearchPathPlugin] = known


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Path]:
    """The config folder of an application; Hydra is initialised with it."""
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield tmp_path
    assert not GlobalHydra.instance().is_initialized()


def composed(app: Path, defaults: list[str], *overrides: str, values: str = "") -> DictConfig:
    lines = "".join(f"  - {entry}\n" for entry in (*defaults, "_self_"))
    (app / "app.yaml").write_text(f"defaults:\n{lines}{values}", encoding="utf-8")
    return compose("app", list(overrides))


def without_overrides(config: RunConfig) -> RunConfig:
    run = replace(config.run, overrides=[], dir=None)
    return replace(config, run=run)


@pytest.mark.slow
def test_one_typed_group(app: Path) -> None:
    config = composed(app, ["rlscale/algo: dapo"], "rlscale.algo.eps_clip=0.1")
    assert OmegaConf.get_type(config.rlscale.algo) is AlgoConfig
    assert (config.rlscale.algo.eps_clip, config.rlscale.algo.eps_clip_high) == (0.1, 0.28)
    with pytest.raises(HydraException, match="eps_clip"):
        compose("app", ["rlscale.algo.eps_clip=abc"])
    with pytest.raises(HydraException, match="eps_clp"):
        compose("app", ["rlscale.algo.eps_clp=0.1"])


@pytest.mark.parametrize(
    "experiment",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.nightly) for name in RUNNABLE if name not in QUICK),
    ],
)
@pytest.mark.slow
def test_an_experiment_is_that_of_the_command(app: Path, experiment: str) -> None:
    config = composed(app, ["rlscale: run", f"rlscale/experiment: {experiment}"])
    assert OmegaConf.get_type(config.rlscale) is RunConfig
    found = rlscale.config_from_hydra(config.rlscale)
    assert without_overrides(found) == without_overrides(rlscale.load_config([f"experiment={experiment}"]))


@pytest.mark.slow
def test_overlay_option_and_value(app: Path) -> None:
    defaults = ["rlscale: run", "rlscale/experiment: qwen3_4b_grpo", "rlscale/on: cpu", "override rlscale/algo: gspo"]
    values = "steps: 7\nrlscale:\n  data:\n    num_rollout: ${steps}\n"
    config = composed(app, defaults, "rlscale/optim=cosine", "steps=5", values=values)
    expected = ["experiment=qwen3_4b_grpo", "on=cpu", "algo=gspo", "optim=cosine", "data.num_rollout=5"]
    found = rlscale.config_from_hydra(config.rlscale)
    assert without_overrides(found) == without_overrides(rlscale.load_config(expected))


@pytest.mark.slow
def test_every_option_composes(app: Path) -> None:
    # Two options of a group cannot be selected at once, so each round takes the next option of every group.
    for index in range(max(len(GROUPS[group]) for group, _ in OPTIONS)):
        chosen = {group: GROUPS[group][index] for group, _ in OPTIONS if index < len(GROUPS[group])}
        config = composed(app, [f"rlscale/{group}: '{option}'" for group, option in chosen.items()])
        assert set(config.rlscale) == set(chosen)


@pytest.mark.slow
def test_arguments_of_a_library(app: Path) -> None:
    defaults = ["rlscale: run", "rlscale/experiment: qwen3_30b_a3b_gspo"]
    config = composed(app, defaults, "+rlscale.sglang.server_args.page_size=16")
    assert rlscale.config_from_hydra(config.rlscale).sglang.server_args["page_size"] == 16


@pytest.mark.slow
def test_all_problems_are_raised_together(app: Path) -> None:
    defaults = ["rlscale: run", "rlscale/experiment: quickstart"]
    config = composed(app, defaults, "rlscale.optim.lr=-1", "rlscale.batch.global_batch_size=50")
    with pytest.raises(ConfigError) as caught:
        rlscale.config_from_hydra(config.rlscale)
    texts = [str(problem) for problem in caught.value.problems]
    assert [text.split(" ")[0] for text in texts] == ["optim.lr", "batch.global_batch_size"]
    assert all("composed config" in text for text in texts)


@pytest.mark.slow
def test_a_missing_value_and_an_unresolved_one(app: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch\.rollout_batch_size must be set"):
        rlscale.config_from_hydra(composed(app, ["rlscale: run"]).rlscale)
    config = composed(app, ["rlscale: run"], values="rlscale:\n  optim:\n    lr: ${nowhere}\n")
    with pytest.raises(ConfigError, match=r"optim\.lr must be resolvable"):
        rlscale.config_from_hydra(config.rlscale)


@pytest.mark.slow
def test_conf_is_on_the_search_path_behind_the_application(app: Path) -> None:
    (app / "algo").mkdir()
    (app / "algo" / "grpo.yaml").write_text("mine: 1\n", encoding="utf-8")
    assert composed(app, ["algo: grpo", "optim: cosine"]) == {
        "algo": {"mine": 1},
        "optim": {"lr_decay_style": "cosine"},
    }
    whole = compose("config", ["+experiment=quickstart", "train=megatron"])
    assert whole.train.backend == "megatron" and whole.model.build == "tiny_qwen3"


def test_the_folder_is_added_once() -> None:
    folders = ConfigFolders.find()
    assert ConfFolder in Plugins.instance().discover(SearchPathPlugin)
    paths = [str(each.path) for each in make_loader(folders).get_search_path().get_path()]
    assert sum(path.endswith(str(folders.main)) for path in paths) == 1
