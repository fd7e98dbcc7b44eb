"""A Hydra application that trains with rlscale: its own settings, and rlscale's groups below `rlscale`.

python examples/hydra_app/app.py                                   # prints the resolved config of the run
python examples/hydra_app/app.py rlscale/algo=cispo seed=7         # another algorithm and seed
python examples/hydra_app/app.py dry_run=false                     # trains
"""

import sys

import hydra
from omegaconf import DictConfig

import rlscale
from rlscale.config import to_yaml

# Before hydra.main looks for the groups.
rlscale.register()


@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(config: DictConfig) -> None:
    """Prints the config of the run, or trains."""
    try:
        run = rlscale.config_from_hydra(config.rlscale)
        if config.dry_run:
            print(to_yaml(run), end="")
            return
        result = rlscale.Trainer(run).run()
    except rlscale.ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    print(f"held-out reward of {config.project}: {result.objective:.3f}")


if __name__ == "__main__":
    main()
