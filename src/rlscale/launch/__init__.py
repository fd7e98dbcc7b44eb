"""Job files for Slurm, KubeRay and SkyPilot: pure functions from a planned run to the text of one file."""
