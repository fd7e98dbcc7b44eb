"""The YAML file of a SkyPilot task: installs rlscale, starts Ray on all nodes and runs the command on the first."""

from __future__ import annotations

from typing import Any

from rlscale.errors import Problem
from rlscale.launch.documents import dump_yaml
from rlscale.launch.job import JobSpec, shell_words
from rlscale.launch.options import SkyPilotOptions

SUFFIX = ".sky.yaml"

TOKEN = "RAY_AUTH_TOKEN"

ACCELERATORS = {"h100": "H100", "h200": "H200", "b200": "B200", "a100": "A100-80GB"}
"""Names that SkyPilot has for the hardware of a plan."""


def write_skypilot(job: JobSpec, options: SkyPilotOptions) -> str:
    """The text of the file."""
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.needs.num_nodes,
        "resources": _resources(job, options),
        # Values come from the command that submits: `sky jobs launch --secret NAME` reads them from its environment.
        "secrets": dict.fromkeys([TOKEN, *job.env]),
    }
    if options.volume is not None:
        task["volumes"] = {options.mount: options.volume}
    else:
        # Not MOUNT: a checkpoint gets its name by renaming a folder, which plain mounts of buckets cannot do.
        task["file_mounts"] = {options.mount: {"source": options.bucket, "mode": "MOUNT_CACHED"}}
    if options.workdir is not None:
        task["workdir"] = options.workdir
    setup = [*(_INSTALL if options.image is None else ()), *options.setup]
    if setup:
        task["setup"] = "set -e\n" + "".join(f"{line}\n" for line in setup)
    # `ray start` and the run are background processes of one shell, so that the shell can end both.
    task["run"] = _RUN.format(
        cpus=job.needs.ray_cpus,
        gpus=job.needs.gpus,
        join_timeout=options.join_timeout,
        command=shell_words(job.train_command, indent="    "),
    )
    return job.comment + dump_yaml(task)


def check_skypilot(job: JobSpec, options: SkyPilotOptions) -> list[Problem]:
    """Problems of the options that depend on each other or on the size of the job."""
    if (options.bucket is None) == (options.volume is None):
        value = "nothing" if options.bucket is None else f"{options.bucket} and {options.volume}"
        fix = "add one of --bucket s3://<name> and --volume <name>, where a preempted run resumes"
        if options.bucket is not None:
            fix = "remove one of them"
        return [Problem(path="--bucket or --volume", rule="be given, one of the two", value=value, fix=fix)]
    if options.bucket is not None and job.needs.num_nodes > 1:
        rule, fix = f"be used with one node, not {job.needs.num_nodes}", "use --volume <name>, which the nodes share"
        return [Problem(path="--bucket", rule=rule, value=options.bucket, fix=fix)]
    return []


def secret_flags(job: JobSpec) -> list[str]:
    """Arguments of `sky jobs launch` that pass the secrets by name."""
    return [word for name in (TOKEN, *job.env) for word in ("--secret", name)]


def _resources(job: JobSpec, options: SkyPilotOptions) -> dict[str, Any]:
    needs = job.needs
    found: dict[str, Any] = {"cpus": f"{needs.cpus}+", "memory": f"{needs.memory_gib}+"}
    if needs.gpus:
        name = options.accelerator or ACCELERATORS.get(options.hardware or "h100", "H100")
        # A machine with that many GPUs comes with its CPUs and memory; a minimum would only exclude some.
        found = {"accelerators": f"{name}:{needs.gpus}"}
        given = {"cpus": options.cpus, "memory": options.memory}
        found |= {key: f"{value}+" for key, value in given.items() if value is not None}
    given_as_they_are = {"infra": options.infra, "image_id": options.image, "disk_size": options.disk}
    found |= {key: value for key, value in given_as_they_are.items() if value is not None}
    if options.spot:
        found["use_spot"] = True
    return found


_INSTALL = ("pip install --constraint constraints.txt .",)
"""In the folder of --workdir, which must be a checkout of rlscale."""

_RUN = """\
set -uo pipefail
# Whoever reaches Ray's ports can run programs as you, unless a token is required.
export RAY_AUTH_MODE=token PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
: "${{RAY_AUTH_TOKEN:?submit with a random RAY_AUTH_TOKEN in the environment and --secret RAY_AUTH_TOKEN}}"

# A separate Ray, next to the one with which SkyPilot manages the nodes.
mapfile -t ips <<<"$SKYPILOT_NODE_IPS"
head="${{ips[0]}}:6479"
options=(--node-ip-address="${{ips[$SKYPILOT_NODE_RANK]}}" --num-cpus={cpus} --num-gpus={gpus}
  --labels="sky-rank=$SKYPILOT_NODE_RANK" --temp-dir=/tmp/rlscale-ray --disable-usage-stats)
head_answers() {{ (exec 3<>"/dev/tcp/${{head/://}}") 2>/dev/null; }}

if [[ "$SKYPILOT_NODE_RANK" != 0 ]]; then
  until head_answers; do sleep 2; done
  ray start --address="$head" "${{options[@]}}" --block &
  ray=$!
  # This node ends with the head, which decides whether the job has failed. Never `ray stop`: it would end the Ray of
  # SkyPilot too.
  while head_answers; do sleep 5; done
  kill "$ray" && wait "$ray"
  exit 0
fi

ray start --head --port=6479 --include-dashboard=false "${{options[@]}}" --block &
ray=$!
export RAY_ADDRESS="$head"
code=1
if python -m rlscale.cluster.wait_for_nodes --timeout {join_timeout} --label sky-rank \\
  $(seq 0 $((SKYPILOT_NUM_NODES - 1))); then
  {command}
  code=$?
fi
kill "$ray" && wait "$ray"
exit $code
"""
