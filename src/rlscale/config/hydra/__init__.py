"""All code that imports Hydra: overrides, YAML files, composition, completion, sweeps."""
