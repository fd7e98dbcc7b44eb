"""Reinforcement learning for language models.

Example:
    import rlscale

    config = rlscale.load_config(["experiment=quickstart", "data.num_rollout=20"])
    result = rlscale.Trainer(config).run()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlscale.config import load_config
    from rlscale.driver.trainer import Trainer

    __version__: str

__all__ = ["Trainer", "__version__", "load_config"]

_HOMES = {"load_config": "rlscale.config", "Trainer": "rlscale.driver.trainer"}


def __getattr__(name: str) -> Any:
    """Imports on first use (PEP 562), so that `import rlscale` is instant and needs no torch."""
    if name == "__version__":
        return _find_version()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _find_version() -> str:
    # Imported here: it takes a twentieth of a second, and hardly anybody asks for the version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rlscale")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
