"""Everything that knows Hydra: overrides, YAML files, composition, sweeps."""
