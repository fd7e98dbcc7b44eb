"""Wrong commands of clusters, rehearsals, jobs and machines: exit code 2, one line each, and advice that works.

The third column is the command that a reader of the error types next. It is checked in the same way and has no error.
"""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.cli import convert, crashtest, doctor, launch, plan, report, serve, train
from rlscale.cli.app import main_train
from rlscale.config import RunConfig
from tests.tiny_model import write_tiny_qwen3

WRONG_INPUT = 2
EXTERNAL = "rollout.engine=external rollout.external_engine_addrs="
ON_GPUS = "train experiment=qwen3_30b_a3b_gspo on=rehearsal"
KUBERAY = "launch kuberay --stdout --image r/i --claim c"
SEE = "--help lists the arguments"

CASES: list[tuple[str, str, str | None]] = [
    # Clusters: addresses, sizes, engines.
    (
        "train cluster.ray_address=banana",
        "cluster.ray_address must be auto, local or <host>:<port>, got banana; write e.g. 10.0.0.1:6379, or remove it "
        "to start Ray here",
        "train",
    ),
    (
        "train cluster.ray_address=10.0.0.1:99999",
        "cluster.ray_address must be auto, local or <host>:<port>, got 10.0.0.1:99999",
        "train cluster.ray_address=local",
    ),
    (
        "train cluster.ray_address=127.0.0.1:1",
        "cluster.ray_address must be the address of a running Ray cluster, got 127.0.0.1:1; start one with",
        "train cluster.ray_address=null",
    ),
    (
        f"train {EXTERNAL}['http://127.0.0.1:30000']",
        "rollout.external_engine_addrs must contain addresses as host:port, got http://127.0.0.1:30000; write "
        "127.0.0.1:30000",
        None,
    ),
    (f"train {EXTERNAL}['127.0.0.1']", "addresses as host:port, got 127.0.0.1; write e.g. 10.0.0.1:30000", None),
    (f"train {EXTERNAL}['127.0.0.1:0']", "addresses as host:port, got 127.0.0.1:0; write e.g. 10.0.0.1:30000", None),
    (f"train {EXTERNAL}['u@h:1']", "addresses as host:port, got u@h:1; write e.g. 10.0.0.1:30000", None),
    (f"train {EXTERNAL}['127.0.0.1:1']", "must name servers that respond, got http://127.0.0.1:1", None),
    (
        "train cluster.num_gpus_per_node=0",
        "cluster.num_gpus_per_node must be > 0, got 0; remove it to use 2, from cluster=cpu",
        "train cluster.num_gpus_per_node=2",
    ),
    (
        "train cluster.rollout_num_gpus=3 rollout=sglang cluster.rollout_num_gpus_per_engine=2",
        "cluster.rollout_num_gpus_per_engine must divide the 3 GPUs of all engines, got 2; set it to 1, or "
        "cluster.rollout_num_gpus=4",
        "train cluster.rollout_num_gpus=4 rollout=sglang cluster.rollout_num_gpus_per_engine=2",
    ),
    (
        "train cluster.rollout_num_gpus=2 cluster.rollout_num_gpus_per_engine=2",
        "cluster.rollout_num_gpus_per_engine must be 1 with rollout.engine=embedded, got 2; set it to 1",
        "train cluster.rollout_num_gpus=2 cluster.rollout_num_gpus_per_engine=1",
    ),
    (
        "train rollout=sglang sglang.nnodes=2",
        "sglang.nnodes must not be set, because rlscale sets it, got 2; remove it: the cluster.* keys place the "
        "engines",
        "train rollout=sglang",
    ),
    (
        "train rollout=sglang sglang.enable_lora=true",
        "sglang.enable_lora must not be set, because rlscale sets it, got true; remove it: train.lora.sync=adapter",
        "train rollout=sglang",
    ),
    (
        "train rollout=sglang sglang.disaggregation_mode=prefill",
        "sglang.disaggregation_mode must not be set, because rlscale sets it, got prefill; remove it: a file of",
        "train rollout=sglang",
    ),
    (
        "train train=megatron megatron.mtp_num_layers=1",
        "megatron.mtp_num_layers must be null for a qwen3 model, got 1; remove it",
        "train train=megatron",
    ),
    (
        "train train=megatron megatron.rope_type=yarn",
        "megatron.rope_type must be rope, as in config.json, got yarn; set it to rope",
        "train train=megatron megatron.rope_type=rope",
    ),
    (
        "train fault_tolerance.wait_for_nodes_s=-1",
        "fault_tolerance.wait_for_nodes_s must be >= 0, got -1.0; remove it to use the default",
        "train",
    ),
    ("train run.dir={file}", "run.dir must name a folder that can be written, got {file}; {file} is a file", "train"),
    (
        "train model.warmup_experiment=nope",
        "model.warmup_experiment must be the name of an experiment, got nope; rlscale-train --help lists",
        "train model.warmup_experiment=null",
    ),
    (
        "train train.only_train_params=[nope]",
        "train.only_train_params must have patterns that match a parameter name, got nope; the model has",
        "train train.only_train_params=[model.embed_tokens.weight]",
    ),
    ("train --nodes 2", "--nodes must be written as key=value, got --nodes=2", None),
    # Rehearsals.
    (
        f"{ON_GPUS} rollout=external rollout.external_engine_addrs=['10.0.0.1:1']",
        "rollout.engine must be sglang or embedded with run.rehearsal, got external; start the rehearsal with "
        "rollout.engine=sglang",
        f"{ON_GPUS} rollout.engine=sglang",
    ),
    (
        f"{ON_GPUS} reward=judge reward.engine.num_gpus=1",
        "reward.engine.num_gpus must be 0 with run.rehearsal, got 1; set it to 0 and reward.type=random",
        f"{ON_GPUS} reward.engine.num_gpus=0 reward.type=random",
    ),
    (
        f"{ON_GPUS} reward.custom_path=nope:score",
        "reward.custom_path must be importable, got nope:score; importing 'nope' failed",
        f"{ON_GPUS} reward.custom_path=null",
    ),
    (
        "train experiment=qwen3_30b_a3b_gspo model.model_type=glm_moe_dsa on=rehearsal",
        "train.backend must be fsdp with model.model_type=glm_moe_dsa",
        None,
    ),
    ("train on=rehears", "on must be one of its options, got rehears; did you mean rehearsal?", "train on=rehearsal"),
    # Jobs.
    (
        "launch slrum --stdout",
        "launcher must be one of slurm, kuberay, skypilot, got slrum; did you mean slurm?",
        "launch slurm --stdout",
    ),
    (
        "launch slurm --stdout --time soon",
        "--time must be a time limit of Slurm, [days-]hours:minutes:seconds, got soon; write e.g. --time 24:00:00",
        "launch slurm --stdout --time 24:00:00",
    ),
    (
        "launch slurm --stdout --partiton gpu",
        "--partiton must be a known option, got --partiton; did you mean --partition?",
        "launch slurm --stdout --partition gpu",
    ),
    (
        "launch slurm --nodes 2",
        "--nodes must be written as key=value, got --nodes=2; did you mean cluster.actor_num_nodes=2?",
        "launch slurm --stdout cluster.actor_num_nodes=2",
    ),
    ("launch slurm --time", "--time must have a value, got nothing; write --time <value>", None),
    (
        "launch slurm --stdout --cpus 0",
        "--cpus must be an integer, at least 1, got 0; remove --cpus to use the default",
        "launch slurm --stdout",
    ),
    (
        "launch slurm --stdout --env A=secret",
        "--env must be the name of an environment variable, never its value",
        "launch slurm --stdout --env WANDB_API_KEY",
    ),
    ("launch slurm --claim c", "--claim must be an option of slurm, got --claim; it is an option of kuberay", None),
    (
        "launch slurm --stdout cluster.ray_address=auto",
        "cluster.ray_address must not be given to a job, got auto; remove it: the job starts Ray on its nodes",
        "launch slurm --stdout",
    ),
    (
        "launch kuberay --stdout --claim c",
        "--image must be given, got nothing; add --image registry.example.com/rlscale:cuda",
        "launch kuberay --stdout --claim c --image registry.example.com/rlscale:cuda",
    ),
    (f"{KUBERAY} --namespace 'A b'", "--namespace must have at most 63 lower-case letters", f"{KUBERAY} --namespace a"),
    (
        "launch skypilot --stdout",
        "--bucket or --volume must be given, one of the two, got nothing; add one of",
        "launch skypilot --stdout --bucket s3://b",
    ),
    (
        "launch skypilot --stdout --bucket s3://b --volume v",
        "--bucket or --volume must be given, one of the two, got s3://b and v; remove one of them",
        "launch skypilot --stdout --volume v",
    ),
    (
        "launch skypilot --stdout --bucket mine",
        "--bucket must be the URL of a bucket, got mine; write e.g. --bucket s3://my-runs",
        "launch skypilot --stdout --bucket s3://my-runs",
    ),
    # Plans.
    (
        "plan --hardware h1000",
        "--hardware must be one of h100, h200, b200, a100, cpu, got h1000; did you mean h100?",
        "plan --hardware h100",
    ),
    (
        "plan --prompt-tokens 0",
        "--prompt-tokens must be a number of tokens, at least 1, got 0; remove it to use the limit of the config",
        "plan",
    ),
    (
        "plan --schedule /nope",
        "--schedule must name a readable file, got /nope; No such file or directory; give the path of a JSONL file",
        None,
    ),
    # The doctor.
    ("doctor --list --only torhc", "--only must name checks (machine, imports, torch, ", "doctor --list --only torch"),
    (
        "doctor --list --device tpu",
        "--device must be one of auto, cpu, cuda, got tpu; did you mean cpu?",
        "doctor --list --device cpu",
    ),
    ("doctor --list --only", f"--only must have a value, got nothing; rlscale-doctor {SEE}", None),
    (
        "doctor --list --deadline-scale inf",
        "--deadline-scale must be above 0 and at most 100, got inf; remove it to use 1",
        "doctor --list",
    ),
    (
        "doctor --list --deadline-scale nan",
        "--deadline-scale must be above 0 and at most 100, got nan",
        "doctor --list",
    ),
    (
        "doctor --list --deadline-scale fast",
        f"--deadline-scale must be a number, got fast; rlscale-doctor {SEE}",
        "doctor --list --deadline-scale 2",
    ),
    (
        "doctor --out {file}/x",
        "--out must name a folder that can be written, got {file}/x; {file} is a file; choose another --out",
        "doctor --list --out {folder}/x",
    ),
    (
        "doctor --list --skpi ray",
        "--skpi must be a known argument, got --skpi; did you mean --skip?",
        "doctor --list --skip ray",
    ),
    ("report runs/one runs/two", f"arguments must end before runs/two, got one too many; rlscale-report {SEE}", None),
    # Weights and servers.
    (
        "convert {model}",
        f"target must be given, got nothing; rlscale-convert {SEE}",
        "convert {model} {folder}/new",
    ),
    (
        "convert /nope {folder}/new",
        "SOURCE must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B",
        "convert {model} {folder}/new",
    ),
    ("convert {model} {folder}", "TARGET must be a new folder, got {folder}, which exists; choose another", None),
    (
        "convert {model} {folder}/new --mode rwa",
        "--mode must be one of raw, bridge, got rwa; did you mean raw?",
        "convert {model} {folder}/new --mode raw",
    ),
    (
        "convert {model} {folder}/new --tensor-parallel two",
        f"--tensor-parallel must be an integer, got two; rlscale-convert {SEE}",
        "convert {model} {folder}/new --tensor-parallel 1",
    ),
    (
        "serve --model-path /nope",
        "--model-path must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B",
        "serve --model-path {model}",
    ),
    ("serve", f"--model-path must be given, got nothing; rlscale-serve {SEE}", "serve --model-path {model}"),
    (
        "serve --model-path {model} --port 99999",
        "--port must be a number from 0 to 65535, got 99999; 0 chooses a free one",
        "serve --model-path {model} --port 0",
    ),
    (
        "serve --model-path {model} --max-context-len 0",
        "--max-context-len must be at least 1, got 0; remove it to use the default",
        "serve --model-path {model}",
    ),
    (
        "serve --model-path {model} --dtype int8",
        f"--dtype must be one of float32, bfloat16, got int8; rlscale-serve {SEE}",
        "serve --model-path {model} --dtype bfloat16",
    ),
    ("serve --model-path {model} --device tpu", "--device must be auto, cpu, cuda or cuda:<index>, got tpu", None),
    ("serve --model-path {model} --device meta", "--device must be auto, cpu, cuda or cuda:<index>, got meta", None),
    # Crash tests.
    (
        "crashtest experiment=quickstart",
        "experiment must be a name, got experiment=quickstart; write rlscale-crashtest quickstart",
        "crashtest quickstart",
    ),
    ("crashtest quickstart --kills 0", "--kills must be at least 1, got 0", "crashtest quickstart --kills 1"),
    (
        "crashtest quickstart --victims nodes",
        "--victims must be one of driver, trainer, engine, router, node, got nodes; did you mean node?",
        None,
    ),
    ("crashtest quickstart --gap 1", "--gap must have 2 arguments, got another number of them", None),
    (
        "crashtest quickstart --folder {file}",
        "--folder must name a folder that can be written, got {file}; {file} is a file; choose another --folder",
        "crashtest quickstart --folder {folder}/new",
    ),
    (
        "crashtest quickstart --folder {full}",
        "--folder must be new or empty, got {full}; remove it or choose another",
        "crashtest quickstart --folder {folder}/new",
    ),
    (
        "crashtest quickstart --folder {folder}/new --name a/b",
        "--name must be a file name without a folder, got a/b; --report names the folder",
        "crashtest quickstart --folder {folder}/new --report {folder}/a --name b",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def paths(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A working folder with a file, a folder and a model. No variable of this machine changes what is checked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "full" / "run").mkdir(parents=True)
    return {"model": str(model)} | {name: str(tmp_path / name) for name in ("file", "folder", "full")}


class Started:
    """Stands for a trainer: that it runs means that the command had no error."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def run(self) -> Any:
        return SimpleNamespace()


def check(name: str, words: list[str]) -> int:
    """Runs a command up to the point at which it would start processes or load a model. Returns its exit code."""
    if name == "train":
        return main_train(words, make_job=Started, check_job=train.check_run)
    if name in ("launch", "plan", "doctor"):
        return {"launch": launch.main, "plan": plan.main, "doctor": doctor.main}[name](words)
    if name == "convert":
        return WRONG_INPUT if convert.check_arguments(convert.make_parser().parse_args(words)) else 0
    module: Any = {"serve": serve, "crashtest": crashtest}[name]
    arguments = module.make_parser().parse_args(words)
    module.check_arguments(arguments)
    return 0


def refuse(name: str, words: list[str]) -> int:
    """Runs a wrong command. Returns its exit code."""
    if name == "train":
        return check(name, words)
    modules: dict[str, Any] = {"launch": launch, "plan": plan, "doctor": doctor, "convert": convert, "serve": serve}
    modules |= {"report": report}
    try:
        return int((modules | {"crashtest": crashtest})[name].main(words))
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


@pytest.mark.slow
@pytest.mark.parametrize(("command", "expected", "advice"), CASES, ids=[case[0][:60] for case in CASES])
def test_a_wrong_command_is_one_line_and_its_advice_works(
    command: str,
    expected: str,
    advice: str | None,
    paths: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    name, *words = shlex.split(command.format(**paths))
    assert refuse(name, words) == WRONG_INPUT
    printed = capsys.readouterr().err.splitlines() + [record.getMessage() for record in caplog.records]
    lines = [line for line in printed if not line.endswith("nothing was started") and "warning: " not in line[:9]]
    assert [line for line in lines if expected.format(**paths) in line], "\n".join(lines)
    assert all("Traceback" not in line and "usage:" not in line for line in lines)
    if advice is None:
        assert len(lines) == 1
        return
    name, *words = shlex.split(advice.format(**paths))
    assert check(name, words) == 0, capsys.readouterr().err
