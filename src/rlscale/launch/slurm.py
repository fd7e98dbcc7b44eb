"""The batch script of a Slurm job: starts Ray on all nodes, runs the command on the first, and requeues itself."""

from __future__ import annotations

import shlex

from rlscale.errors import Problem
from rlscale.launch.job import JobSpec, one_line, shell_words
from rlscale.launch.options import SlurmOptions

SUFFIX = ".sbatch"

INTERRUPTED = 130
"""Exit code of a run that was interrupted."""


def check_slurm(options: SlurmOptions) -> list[Problem]:
    """Problem of a time limit that is no longer than `--save-before`.

    Slurm would send the signal when the job starts, and the job would requeue itself without end.
    """
    limit_s = _seconds(options.time) if options.time is not None else 0
    if limit_s == 0 or limit_s > options.save_before:  # Slurm takes 0 for no limit
        return []
    rule = f"be longer than --save-before, {options.save_before} seconds"
    fix = "write a longer one, or a smaller --save-before, which must exceed one step"
    return [Problem(path="--time", rule=rule, value=f"{options.time}, {limit_s} seconds", fix=fix)]


def _seconds(limit: str) -> int:
    """Seconds of a time limit in the forms of Slurm: without days a single number is minutes, with days it is hours."""
    days, has_days, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if has_days or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def write_slurm(job: JobSpec, options: SlurmOptions) -> str:
    """The text of the script."""
    assert options.workdir is not None, "the command sets it"
    parts = [
        _HEADER.format(comment=job.comment),
        _directives(job, options),
        _ENVIRONMENT.format(
            workdir=shlex.quote(options.workdir),
            setup="".join(f"{line}\n" for line in options.setup) or ":\n",
            checks="".join(_check_variable(name) for name in job.env),
            image=_image(options),
        ),
        _ADDRESS.format(interface=shlex.quote(options.interface or "")),
        _START_RAY.format(
            cpus=job.needs.ray_cpus,
            gpus=job.needs.gpus,
            step_options=_step_options(job),
            cleanup_options="--overlap --ntasks-per-node=1 --mem=0",
            join_timeout=options.join_timeout,
        ),
        _RUN.format(command=shell_words(job.train_command), interrupted=INTERRUPTED),
    ]
    return "\n".join(parts)


def _directives(job: JobSpec, options: SlurmOptions) -> str:
    needs = job.needs
    lines = [
        f"--job-name={job.name}",
        f"--nodes={needs.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={needs.cpus}",
    ]
    if needs.gpus:
        lines.append(f"--gpus-per-node={needs.gpus}")
    # Whole nodes come with all of their memory, whatever the plan says; a size that the user gives is asked for.
    takes_all = needs.is_whole and options.memory is None
    lines += ["--exclusive"] if needs.is_whole else []
    lines.append("--mem=0" if takes_all else f"--mem={needs.memory_gib}G")
    given = {name: getattr(options, name) for name in ("partition", "account", "qos", "constraint", "time")}
    lines += [f"--{name}={value}" for name, value in given.items() if value is not None]
    lines += [
        f"--signal=B:USR1@{options.save_before}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        f'--chdir="{options.workdir}"',
    ]
    if job.restarts_nodes and needs.num_nodes > 1:
        lines.append("--no-kill")
    return "".join(f"#SBATCH {one_line(line)}\n" for line in lines)


def _check_variable(name: str) -> str:
    return f': "${{{name}:?the job needs this environment variable; set it and submit again}}"\n'


def _image(options: SlurmOptions) -> str:
    if options.image is None:
        return "in_image=()"
    assert options.workdir is not None, "the command sets it"
    words = ["apptainer", "exec", "--nv", "--bind", options.workdir, options.image]
    return f"in_image=({' '.join(map(shlex.quote, words))})"


def _step_options(job: JobSpec) -> str:
    # A step gets one CPU and no memory unless it says otherwise; --overlap shares those of the job with the driver.
    words = ["--overlap", "--ntasks-per-node=1", f"--cpus-per-task={job.needs.cpus}", "--cpu-bind=none", "--mem=0"]
    words += ["--export=ALL", "--unbuffered", "--label"]
    # With fault tolerance the run decides what the loss of a node means.
    words.append("--no-kill" if job.restarts_nodes else "--kill-on-bad-exit=1")
    return " ".join(words)


_HEADER = """\
#!/bin/bash
{comment}#
# submit                            sbatch <this file>
# save a checkpoint and requeue     scancel --batch --signal=USR1 <job>
# end                               scancel <job>
"""

_ENVIRONMENT = """\
cd {workdir} || exit 1

# Environment; the steps on all nodes inherit it.
{setup}set -uo pipefail
{checks}export PYTHONPATH={workdir}${{PYTHONPATH:+:$PYTHONPATH}}
{image}

# Whoever reaches Ray's ports can run programs as you, unless a token is required. It exists only in this job.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$("${{in_image[@]}}" python -c 'import secrets; print(secrets.token_hex(32))')" || exit 1
export RAY_AUTH_TOKEN
"""

_ADDRESS = """\
# Address of this node: that of the interface, or of the node's name.
interface={interface}
node_ip() {{
  local address
  if [[ -n "$interface" ]]; then
    address="$(ip -4 -o addr show dev "$interface" | awk '{{sub("/.*", "", $4); print $4; exit}}')"
  else
    address="$(getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127[.]/ {{print $1; exit}}')"
  fi
  if [[ -z "$address" && "$SLURM_NNODES" == 1 ]]; then address=127.0.0.1; fi
  if [[ -z "$address" ]]; then
    echo "node $SLURMD_NODENAME must have an IPv4 address ${{interface:+on $interface }}that other nodes reach;" \\
      "name its interface with --interface (see 'ip -br address')" >&2
    return 1
  fi
  echo "$address"
}}
free_port() {{
  local code='import sys; from rlscale.engines.ports import free_port; print(free_port(sys.argv[1]))'
  "${{in_image[@]}}" python -c "$code" "$1"
}}

# Trainers and engines of several nodes connect over the same interface.
if [[ -n "$interface" ]]; then export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"; fi
head_ip="$(node_ip)" && head_port="$(free_port "$head_ip")" || exit 1
export interface head_ip head_port
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""

_START_RAY = """\
# Runs on every node: Ray's head on the first, which runs this script too, and a worker on each of the others.
ray_node() {{
  local options address ray code
  address="$(node_ip)" || return 1
  options=(--node-ip-address="$address" --num-cpus={cpus} --num-gpus={gpus} --labels="slurm-node=$SLURMD_NODENAME"
    --temp-dir="$ray_folder" --disable-usage-stats --block)
  if [[ "$SLURM_NODEID" == 0 ]]; then
    options+=(--head --port="$head_port" --include-dashboard=false)
  else
    options+=(--address="$head_ip:$head_port")
    until (exec 3<>"/dev/tcp/$head_ip/$head_port") 2>/dev/null; do sleep 1; done
  fi
  "${{in_image[@]}}" ray start "${{options[@]}}" &
  ray=$!
  # `scancel` sends SIGTERM to Ray and to this shell, which stays to remove the folder.
  trap 'kill "$ray" 2>/dev/null' TERM
  wait "$ray"
  code=$?
  while kill -0 "$ray" 2>/dev/null; do wait "$ray"; done
  rm -rf "$ray_folder"
  return $code
}}
# The names of Ray's sockets in this folder must stay below 108 characters.
export ray_folder="/tmp/ray-$SLURM_JOB_ID"
step="$(declare -p in_image); $(declare -f node_ip ray_node); ray_node"
srun {step_options} bash -c "$step" &
ray=$! driver="" requeue=0

end_ray() {{
  # A node on which the step is still starting misses the signal, and `srun` waits for it: repeat it until it ends.
  local i
  while kill "$ray" 2>/dev/null; do
    for i in {{1..25}}; do
      if kill -0 "$ray" 2>/dev/null; then sleep 0.2; fi
    done
  done
  wait "$ray" 2>/dev/null
  srun {cleanup_options} rm -rf "$ray_folder" 2>/dev/null
}}
requeue_job() {{
  echo "the run is interrupted; job $SLURM_JOB_ID is requeued and resumes" >&2
  # Slurm ends this script now; `exec`, because a shell that waits for a program handles no signal.
  scontrol requeue "$SLURM_JOB_ID" && exec sleep 60
}}
stop() {{
  if [[ -n "$driver" ]]; then kill -TERM "$driver" 2>/dev/null; return; fi
  end_ray
  if [[ $requeue == 1 ]]; then requeue_job; fi
  exit 143
}}
save_and_requeue() {{
  requeue=1
  if [[ -n "$driver" ]]; then kill -USR1 "$driver" 2>/dev/null; else stop; fi
}}
trap stop TERM
trap save_and_requeue USR1

export RAY_ADDRESS="$head_ip:$head_port"
"${{in_image[@]}}" python -m rlscale.cluster.wait_for_nodes --timeout {join_timeout} \\
  --label slurm-node "${{hosts[@]}}" &
joined=$!
wait -n "$ray" "$joined"
if ! kill -0 "$ray" 2>/dev/null; then
  echo "Ray must keep running on every node, but its step ended; its output is above" >&2
  kill "$joined" 2>/dev/null
  exit 1
fi
wait "$joined" || {{ end_ray; exit 1; }}
"""

_RUN = """\
"${{in_image[@]}}" {command} &
driver=$!

# A signal interrupts `wait`; the exit code is that of the run.
wait "$driver"
code=$?
while kill -0 "$driver" 2>/dev/null; do
  wait "$driver"
  code=$?
done
wait "$driver" 2>/dev/null
last=$?
if [[ $last != 127 ]]; then code=$last; fi
end_ray

# The run has saved a checkpoint before the time limit, or had not begun (138, killed by USR1). The next start of this
# job resumes in the same folder.
if [[ $requeue == 1 && ($code == {interrupted} || $code == 138) ]]; then requeue_job; fi
exit $code
"""
