"""Reinforcement learning for language models.

Example:
    import rlscale

    config = rlscale.load_config(["experiment=quickstart", "data.num_rollout=20"])
    result = rlscale.Trainer(config).run()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlscale.config import config_from_hydra, load_config
    from rlscale.config.hydra.config_store import register
    from rlscale.driver.trainer import RunResult, Trainer
    from rlscale.errors import ConfigError
    from rlscale.migration.migrate import migrate
    from rlscale.types import Sample

    __version__: str

__all__ = [
    "ConfigError",
    "RunResult",
    "Sample",
    "Trainer",
    "__version__",
    "config_from_hydra",
    "load_config",
    "migrate",
    "register",
]

_MODULES = {
    "ConfigError": "rlscale.errors",
    "RunResult": "rlscale.driver.trainer",
    "Sample": "rlscale.types",
    "Trainer": "rlscale.driver.trainer",
    "config_from_hydra": "rlscale.config",
    "load_config": "rlscale.config",
    "migrate": "rlscale.migration.migrate",
    "register": "rlscale.config.hydra.config_store",
}


def __getattr__(name: str) -> Any:
    """Imports on first use (PEP 562), so that `import rlscale` is instant and needs no torch."""
    if name == "__version__":
        return _find_version()
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, which are not imported yet, for `dir` and completion in a console."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})


def _find_version() -> str:
    # Imported here: it takes 50 ms, and most programs do not read the version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rlscale")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
