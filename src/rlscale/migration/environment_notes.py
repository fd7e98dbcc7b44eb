"""Environment variables of an input: those that a script reads, and those that it sets for its processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlscale.migration.findings import Finding, Kind
from rlscale.migration.foreign_arguments import Reading
from rlscale.migration.shell_values import template_of, value_of
from rlscale.secrets import is_secret

ALWAYS_SET = frozenset(
    {"HOME", "USER", "PATH", "PWD", "HOSTNAME", "SHELL", "LANG", "TMPDIR", "RANDOM", "SECONDS", "UID"}
)
"""Variables that every shell has."""

_NOT_NEEDED = re.compile(
    r"PYTHON(PATH|UNBUFFERED|FAULTHANDLER)|[nN][oO]_[pP][rR][oO][xX][yY]|https?_proxy|MASTER_(ADDR|PORT)|RAY_\w+"
    r"|no_proxy|WANDB_(MODE|DIR)|TOKENIZERS_PARALLELISM|LD_LIBRARY_PATH|HYDRA_FULL_ERROR|VLLM_\w+|MACHINE_RANK|WORLD_SIZE"
    r"|NCCL_NVLS_ENABLE|CUDA_DEVICE_MAX_CONNECTIONS|GLOO_SOCKET_IFNAME|TP_SOCKET_IFNAME|NCCL_SOCKET_IFNAME"
)
FAKE_QUANTIZATION = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
"""Variable by which slime's patched Megatron-core rounds the weights of experts to INT4 in the forward pass."""

_NO_FAKE_QUANTIZATION = (
    "trains with weights rounded to INT4 by a patch of Megatron-core that rlscale does not have; here weights are "
    "trained in train.dtype, and rollout.weight_precision quantises them for the engines alone"
)
_REASONS = {
    "OPEN_TRAINING_INT4_GROUP_SIZE": "is the group size of the INT4 training that is not translated; groups of "
    "rollout.weight_precision=int4 have 32 inputs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "Megatron-core orders its kernels by it: set it to 1 with tensor or context "
    "parallelism on GPUs before Blackwell, e.g. train.env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1",
    "NCCL_NVLS_ENABLE": "NCCL decides by itself whether NVLink can reduce",
    "VLLM": "engines are SGLang's",
}


def variable_findings(reading: Reading, yaml: str) -> Iterator[Finding]:
    """A line for each variable that the input reads."""
    for use in reading.uses.values():
        if use.name in ALWAYS_SET:
            continue
        is_read = f"oc.env:{use.name}" in yaml
        if is_secret(use.name):
            text = "is a secret: set it where the run starts"
        elif use.given is not None:
            text = f"is {use.given}, as given"
        elif use.default is not None:
            shown = use.default or "nothing"
            text = f"has the default {shown}, which the experiment keeps" if is_read else f"took its default, {shown}"
            text += f"; --set {use.name}=<value> writes another"
        elif is_read:
            text = f"has no default: the experiment reads it where it starts, or give --set {use.name}=<value>"
        else:
            reason = "the script decides or computes by it" if use.decides else "no argument depends on it"
            text = f"is not set, and {reason}; --set {use.name}=<value> gives it a value"
        yield Finding(kind=Kind.variable, subject=use.name, text=text, source=use.source)


def environment_findings(reading: Reading) -> Iterator[Finding]:
    """A line for each environment variable that the input sets for the processes of the run."""
    for name, text in reading.environment.items():
        source = text[0].source if text else None
        shown = "<redacted>" if is_secret(name) else template_of(text)
        if is_secret(name):
            finding = Finding(kind=Kind.secret, subject=name, text="set it where the run starts", source=source)
        elif re.search(r"\$\{?[A-Z]", value_of(text)):
            reason = "stands in single quotes, so the processes get the name of the variable instead of its value"
            finding = Finding(kind=Kind.wrong, subject=f"{name}={value_of(text)}", text=reason, source=source)
        elif name == FAKE_QUANTIZATION and value_of(text) not in ("", "0"):
            finding = Finding(kind=Kind.lost, subject=f"{name}={shown}", text=_NO_FAKE_QUANTIZATION, source=source)
        elif reason := _reason(name):
            finding = Finding(kind=Kind.environment, subject=f"{name}={shown}", text=reason, source=source)
        elif _NOT_NEEDED.fullmatch(name):
            finding = Finding(kind=Kind.environment, subject=f"{name}={shown}", text="not needed", source=source)
        else:
            reason = f"export it where the run starts; train.env_vars.{name} sets it for the trainers only"
            finding = Finding(kind=Kind.environment, subject=f"{name}={shown}", text=reason, source=source)
        yield finding


def _reason(name: str) -> str:
    return _REASONS.get(name) or _REASONS.get(name.partition("_")[0], "")
