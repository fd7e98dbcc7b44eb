"""The command `rlscale-train`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlscale.cli.app import main_train

if TYPE_CHECKING:
    from rlscale.config import RunConfig
    from rlscale.trainer import RunResult


def main() -> None:
    """Entry point of the package."""
    sys.exit(main_train(sys.argv[1:], run_job=run_training))


def run_training(config: RunConfig) -> RunResult:
    """Trains what `config` says."""
    # Only now, when the config is known to be right: this import takes seconds (torch, transformers, Ray).
    from rlscale.trainer import Trainer

    return Trainer(config, overrides=config.run.overrides).run()


if __name__ == "__main__":
    main()
