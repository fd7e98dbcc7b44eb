"""Packages that a config needs: a table, and the check that they are installed here.

Packages are searched, not imported, so that the check takes milliseconds. It searches on the driver's machine, which
stands for all nodes of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter

from rlscale.architectures.family import find_family
from rlscale.config import AttnImplementation, Device, OffloadMode, RunConfig, TrainBackendName, prompt_paths
from rlscale.config.groups.model import MegatronToHf
from rlscale.config.groups.sandbox import SandboxKind
from rlscale.config.installed import installed_version, is_installed
from rlscale.config.problems import show
from rlscale.config.resolve.eval_file import read_eval_file
from rlscale.config.rules import builtin_rewards, only_evaluates, uses_engines
from rlscale.config.rules.model import architecture_field
from rlscale.data.data_paths import is_parquet
from rlscale.errors import ConfigError, Problem
from rlscale.training.megatron.versions import CPU_VERSION, version_problem


class PackagePlace(StrEnum):
    """Machines that need a package."""

    driver = "driver"
    trainers = "trainers"  # of every node with trainer ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededPackage:
    """A package and the key that needs it: `<key> must <rule>, got <value>; <install>, or <instead>`."""

    key: str
    rule: str  # `{}` stands for the names of the missing packages
    modules: Mapping[str, str]  # searched for, with the names of their packages
    install: str  # a command that works, in this environment or in a checkout
    instead: str  # another value of the config
    place: PackagePlace
    is_needed: Callable[[RunConfig], bool]
    substitute: str | None = None  # a module with which the others are not needed


def _trains(config: RunConfig) -> bool:
    return not config.debug.rollout_only


def _trains_with(config: RunConfig, backend: TrainBackendName) -> bool:
    return _trains(config) and config.train.backend == backend


def _uses_megatron(config: RunConfig) -> bool:
    return _trains_with(config, TrainBackendName.megatron)


def _uses_bridge(config: RunConfig) -> bool:
    return _uses_megatron(config) and config.model.megatron_to_hf_mode == MegatronToHf.bridge


def _has_delta_nets_on_cuda(config: RunConfig) -> bool:
    family = architecture_field(config.model, "model_type")
    return _uses_megatron(config) and config.cluster.device == Device.cuda and find_family(family).delta_net


def _uses_flash_attention(config: RunConfig, kind: AttnImplementation) -> bool:
    """Whether transformers computes the attention: with several context-parallel ranks rlscale does."""
    return (
        _trains_with(config, TrainBackendName.fsdp)
        and config.cluster.device == Device.cuda
        and config.fsdp.attn_implementation == kind
        and config.fsdp.context_parallel_size == 1
    )


def _pauses_memory(config: RunConfig) -> bool:
    cluster = config.cluster
    return _trains(config) and bool(cluster.offload_train) and cluster.offload_train_mode == OffloadMode.tms


def _grades_with(key: str, names: Sequence[str], config: RunConfig) -> bool:
    """Whether the key names one of these rewards, or its boxed form."""
    named = [name for path, name in builtin_rewards(config).items() if path.startswith(key)]
    return uses_engines(config) and any(name.removeprefix("boxed_") in names for name in named)


def _trains_on_parquet(config: RunConfig) -> bool:
    if not config.data.rollout_global_dataset or only_evaluates(config):
        return False
    return any(map(is_parquet, prompt_paths(config.data)))


def _evaluates_on_parquet(config: RunConfig) -> bool:
    given = config.eval.prompt_data or []
    # Names and paths alternate; a single entry is a path.
    paths = given if len(given) == 1 else given[1::2]
    return _evaluates(config) and config.eval.config is None and any(map(is_parquet, paths))


def _evaluates_on_parquet_sets(config: RunConfig) -> bool:
    if not _evaluates(config) or config.eval.config is None:
        return False
    try:
        return any(is_parquet(each.path) for each in read_eval_file(config.eval.config))
    except ConfigError:  # another check reports a file that cannot be read
        return False


def _evaluates(config: RunConfig) -> bool:
    return config.eval.interval is not None and uses_engines(config)


def _needs_pyarrow(key: str, rule: str, instead: str, is_needed: Callable[[RunConfig], bool]) -> NeededPackage:
    """The entry of a key that can name Parquet files."""
    return NeededPackage(
        key=key,
        rule=rule,
        modules={"pyarrow": "pyarrow"},
        install="pip install 'rlscale[parquet]'",
        instead=instead,
        place=PackagePlace.driver,
        is_needed=is_needed,
    )


def _needs_graders(key: str, *, instead: str) -> tuple[NeededPackage, ...]:
    """The entries of a key that can name built-in rewards."""
    needed = (
        ("math_verify", "math-verify", "math", ("math", "deepscaler", "gpqa")),
        ("if_verifiable", "if-verifiable", "ifbench", ("ifbench",)),
    )
    return tuple(
        NeededPackage(
            key=key,
            rule="have its library {}",
            modules={module: package},
            install=f"pip install 'rlscale[{extra}]'",
            instead=instead,
            place=PackagePlace.driver,
            is_needed=partial(_grades_with, key, names),
        )
        for module, package, extra, names in needed
    )


NEEDED_PACKAGES: tuple[NeededPackage, ...] = (
    NeededPackage(
        key="train.backend",
        rule="be fsdp without {}",
        modules={"megatron.core": "megatron-core", "psutil": "psutil"},
        install="pip install 'rlscale[megatron]'",
        instead="choose train=fsdp",
        place=PackagePlace.trainers,
        is_needed=_uses_megatron,
    ),
    NeededPackage(
        key="train.backend",
        rule="be fsdp without {} for a model with gated delta nets on CUDA",
        modules={"fla": "flash-linear-attention"},
        install="pip install 'rlscale[linear-attention]'",
        instead="choose train=fsdp and train.qkv_format=bshd",
        place=PackagePlace.trainers,
        is_needed=_has_delta_nets_on_cuda,
    ),
    NeededPackage(
        key="model.megatron_to_hf_mode",
        rule="be raw without {}",
        modules={"mbridge": "mbridge", "einops": "einops"},
        install="pip install 'rlscale[bridge]'",
        instead="remove it",
        place=PackagePlace.trainers,
        is_needed=_uses_bridge,
    ),
    NeededPackage(
        key="sandbox.kind",
        rule="be subprocess or fusion without {}",
        modules={"docker": "docker"},
        install="pip install 'rlscale[docker]'",
        instead="set sandbox.kind=subprocess",
        place=PackagePlace.driver,
        is_needed=lambda config: config.sandbox.kind == SandboxKind.docker,
    ),
    NeededPackage(
        key="fsdp.attn_implementation",
        rule="be sdpa or eager without {}",
        modules={"flash_attn": "flash-attn"},
        # It builds against the installed torch, which pip hides from builds by default.
        install="pip install flash-attn --no-build-isolation",
        instead="set fsdp.attn_implementation=sdpa, with the flash attention that comes with torch",
        place=PackagePlace.trainers,
        is_needed=lambda config: _uses_flash_attention(config, AttnImplementation.flash_attention_2),
        substitute="kernels",  # with it transformers downloads the same attention
    ),
    NeededPackage(
        key="fsdp.attn_implementation",
        rule="be flash_attention_2, sdpa or eager without {}",
        # Without its own package, which must be built for the GPU, transformers downloads it with kernels.
        modules={"flash_attn_interface": "kernels"},
        install="pip install kernels",
        instead="set fsdp.attn_implementation=sdpa, with the flash attention that comes with torch",
        place=PackagePlace.trainers,
        is_needed=lambda config: _uses_flash_attention(config, AttnImplementation.flash_attention_3),
        substitute="kernels",
    ),
    NeededPackage(
        key="train.lora.rank",
        rule="be 0 without {}",
        modules={"peft": "peft"},
        install="pip install 'rlscale[lora]'",
        instead="set train.lora.rank=0 to train all weights",
        place=PackagePlace.trainers,
        is_needed=lambda config: _trains(config) and config.train.lora.rank > 0,
    ),
    NeededPackage(
        key="cluster.offload_train_mode",
        rule="be move without {}",
        modules={"torch_memory_saver": "torch-memory-saver"},
        install="pip install 'rlscale[gpu]'",
        instead="set cluster.offload_train_mode=move",
        place=PackagePlace.trainers,
        is_needed=_pauses_memory,
    ),
    NeededPackage(
        key="agent.mcp_servers",
        rule="be null without {}",
        modules={"mcp": "mcp"},
        install="pip install 'rlscale[agents]'",
        instead="remove it",
        place=PackagePlace.driver,
        is_needed=lambda config: uses_engines(config) and config.agent.mcp_servers is not None,
    ),
    *_needs_graders("reward.type", instead="choose reward=exact_match"),
    *_needs_graders("reward.functions", instead="name other rewards"),
    *_needs_graders("data.reward_by_source", instead="name other rewards"),
    _needs_pyarrow("data.prompt_data", "end in .jsonl without {}", "convert it", _trains_on_parquet),
    _needs_pyarrow("eval.prompt_data", "name .jsonl files without {}", "convert them", _evaluates_on_parquet),
    _needs_pyarrow("eval.config", "name a file of .jsonl files without {}", "convert them", _evaluates_on_parquet_sets),
)
"""Trackers and SGLang, which may have another interpreter, are checked elsewhere."""


def check_packages(config: RunConfig) -> list[Problem]:
    """Problems of packages that are not installed here, and of a Megatron-core that does not run on a CPU."""
    needed = [each for each in NEEDED_PACKAGES if each.is_needed(config)]
    problems = [_missing(each, names, config) for each in needed if (names := _missing_names(each))]
    return problems + _check_version(config)


def _missing_names(package: NeededPackage) -> list[str]:
    if package.substitute is not None and is_installed(package.substitute):
        return []
    return [name for module, name in package.modules.items() if not is_installed(module)]


def _missing(package: NeededPackage, names: Sequence[str], config: RunConfig) -> Problem:
    where = ""
    if package.place == PackagePlace.trainers:
        where = " on every node (searched on this machine only)"
    return Problem(
        path=package.key,
        rule=package.rule.format(" and ".join(names)),
        value=show(attrgetter(package.key)(config)),
        fix=f"{package.install}{where}, or {package.instead}",
    )


def _check_version(config: RunConfig) -> list[Problem]:
    """Problem of a Megatron-core whose functions the replacements for the CPU do not fit."""
    version = installed_version("megatron-core")
    is_patched = _uses_megatron(config) and config.cluster.device == Device.cpu
    if not is_patched or version is None or version.startswith(CPU_VERSION):
        return []
    return [version_problem(version)]
