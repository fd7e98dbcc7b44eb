"""Packages that a config needs."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from rlscale.config.installed import installed_version, is_installed
from rlscale.driver.preflight.packages import NEEDED_PACKAGES, NeededPackage, PackagePlace, check_packages
from tests.unit.config.rules.valid_config import MEGATRON, Values, config_with

ROOT = Path(__file__).parents[4]
ON_CUDA: Values = {"cluster.device": "cuda", "train.backend": "fsdp"}
ON_EVERY_NODE = "on every node (searched on this machine only)"

CASES: list[tuple[str, Values, str]] = [
    (
        "megatron.core",
        {**MEGATRON, "cluster.device": "cuda"},
        "train.backend must be fsdp without megatron-core, got megatron; pip install 'rlscale[megatron]' "
        f"{ON_EVERY_NODE}, or choose train=fsdp",
    ),
    (
        "fla",
        {**MEGATRON, "cluster.device": "cuda", "model.model_type": "qwen3_next"},
        "train.backend must be fsdp without flash-linear-attention for a model with gated delta nets on CUDA, got "
        f"megatron; pip install 'rlscale[linear-attention]' {ON_EVERY_NODE}, or choose train=fsdp and "
        "train.qkv_format=bshd",
    ),
    (
        "mbridge",
        {**MEGATRON, "model.megatron_to_hf_mode": "bridge"},
        "model.megatron_to_hf_mode must be raw without mbridge, got bridge; pip install 'rlscale[bridge]' "
        f"{ON_EVERY_NODE}, or remove it",
    ),
    (
        "docker",
        {"sandbox.kind": "docker", "sandbox.image": "python:3.11"},
        "sandbox.kind must be subprocess or fusion without docker, got docker; pip install 'rlscale[docker]', or set "
        "sandbox.kind=subprocess",
    ),
    (
        "flash_attn",
        ON_CUDA,
        "fsdp.attn_implementation must be sdpa or eager without flash-attn, got flash_attention_2; pip install "
        f"flash-attn --no-build-isolation {ON_EVERY_NODE}, or set fsdp.attn_implementation=sdpa, with the flash "
        "attention that comes with torch",
    ),
    (
        "flash_attn_interface",
        {**ON_CUDA, "fsdp.attn_implementation": "flash_attention_3"},
        "fsdp.attn_implementation must be flash_attention_2, sdpa or eager without kernels, got flash_attention_3; pip "
        f"install kernels {ON_EVERY_NODE}, or set fsdp.attn_implementation=sdpa, with the flash attention "
        "that comes with torch",
    ),
    (
        "peft",
        {"train.lora.rank": 8},
        f"train.lora.rank must be 0 without peft, got 8; pip install 'rlscale[lora]' {ON_EVERY_NODE}, or set "
        "train.lora.rank=0 to train all weights",
    ),
    (
        "torch_memory_saver",
        {**ON_CUDA, "fsdp.attn_implementation": "sdpa", "cluster.offload_train": True},
        "cluster.offload_train_mode must be move without torch-memory-saver, got tms; pip install 'rlscale[gpu]' "
        f"{ON_EVERY_NODE}, or set cluster.offload_train_mode=move",
    ),
    (
        "mcp",
        {"agent.mcp_servers": ["a"]},
        "agent.mcp_servers must be null without mcp, got [\"a\"]; pip install 'rlscale[agents]', or remove it",
    ),
    (
        "math_verify",
        {"reward.type": "math"},
        "reward.type must have its library math-verify, got math; pip install 'rlscale[math]', or choose "
        "reward=exact_match",
    ),
    (
        "if_verifiable",
        {"reward.type": "boxed_ifbench"},
        "reward.type must have its library if-verifiable, got boxed_ifbench; pip install 'rlscale[ifbench]', or choose "
        "reward=exact_match",
    ),
    (
        "math_verify",
        {"reward.type": None, "reward.functions": {"a": "gpqa"}},
        'reward.functions must have its library math-verify, got {"a": "gpqa"}; pip install \'rlscale[math]\', or name '
        "other rewards",
    ),
    (
        "if_verifiable",
        {"reward.type": None, "reward.functions": {"a": "f1", "b": "ifbench"}},
        'reward.functions must have its library if-verifiable, got {"a": "f1", "b": "ifbench"}; pip install '
        "'rlscale[ifbench]', or name other rewards",
    ),
    (
        "math_verify",
        {"data.reward_by_source": {"a": "gpqa"}},
        'data.reward_by_source must have its library math-verify, got {"a": "gpqa"}; pip install \'rlscale[math]\', or '
        "name other rewards",
    ),
    (
        "if_verifiable",
        {"data.reward_by_source": {"a": "f1", "b": "ifbench"}},
        'data.reward_by_source must have its library if-verifiable, got {"a": "f1", "b": "ifbench"}; pip install '
        "'rlscale[ifbench]', or name other rewards",
    ),
    (
        "pyarrow",
        {"data.prompt_data": "train.parquet@[:8]"},
        "data.prompt_data must end in .jsonl without pyarrow, got train.parquet@[:8]; pip install 'rlscale[parquet]', "
        "or convert it",
    ),
    (
        "pyarrow",
        {"eval.interval": 1, "eval.prompt_data": ["a", "a.jsonl", "b", "b.parquet"]},
        'eval.prompt_data must name .jsonl files without pyarrow, got ["a", "a.jsonl", "b", "b.parquet"]; pip install '
        "'rlscale[parquet]', or convert them",
    ),
]
IDS = [f"{module}-{number}" for number, (module, *_) in enumerate(CASES)]


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes packages that need a GPU importable."""
    for name in ("flash_attn", "flash_attn_interface", "fla", "torch_memory_saver"):
        module = type(sys)(name)
        module.__spec__ = metadata.__spec__
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("module", "values", "expected"), CASES, ids=IDS)
def test_a_missing_package_is_reported(
    module: str, values: Values, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The valid config trains with fsdp on a CPU.
    run = config_with({"train.backend": "fsdp", **values})
    assert check_packages(run) == []
    monkeypatch.setitem(sys.modules, module, None)
    assert [str(problem) for problem in check_packages(run)] == [expected]


@pytest.mark.parametrize(("module", "values"), [case[:2] for case in CASES], ids=IDS)
def test_a_run_that_does_not_use_it_needs_no_package(
    module: str, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert check_packages(config_with({"train.backend": "fsdp"})) == []
    package = next(each for each in NEEDED_PACKAGES if module in each.modules)
    if package.place == PackagePlace.trainers:
        assert check_packages(config_with({**values, "debug.rollout_only": True})) == []


def test_every_package_has_a_case() -> None:
    # The last entry needs a file; see below.
    assert [case[0] for case in CASES] == [next(iter(each.modules)) for each in NEEDED_PACKAGES[:-1]]


def test_a_file_of_evaluation_sets_may_name_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = tmp_path / "sets.yaml"
    file.write_text("eval: {datasets: [{name: a, path: a.parquet}]}")
    values: Values = {"train.backend": "fsdp", "eval.interval": 1, "eval.config": str(file)}
    (problem,) = check_packages(config_with(values))
    assert str(problem) == (
        f"eval.config must name a file of .jsonl files without pyarrow, got {file}; pip install 'rlscale[parquet]', or "
        "convert them"
    )
    # The problem of the file itself is that of another check.
    assert check_packages(config_with({**values, "eval.config": "gone.yaml"})) == []


def test_packages_of_one_command_are_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("megatron.core", "psutil"):
        monkeypatch.setitem(sys.modules, module, None)
    (problem,) = check_packages(config_with(MEGATRON))
    assert problem.rule == "be fsdp without megatron-core and psutil"


def test_an_untested_megatron_core_does_not_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlscale.driver.preflight.packages.installed_version", lambda name: "0.99.1")
    (problem,) = check_packages(config_with({**MEGATRON, "cluster.device": "cpu"}))
    assert "must have megatron-core 0.16.x to run without CUDA, got megatron with megatron-core 0.99.1" in str(problem)
    assert check_packages(config_with({**MEGATRON, "cluster.device": "cuda"})) == []


@pytest.mark.parametrize("package", NEEDED_PACKAGES, ids=lambda each: each.key)
def test_the_command_installs_the_package(package: NeededPackage) -> None:
    if "rlscale[" not in package.install:
        assert package.install.split()[:2] == ["pip", "install"]
        assert set(package.modules.values()) <= set(package.install.split())
        return
    extra = package.install.removeprefix("pip install 'rlscale[").removesuffix("]'")
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert all(any(line.startswith(name) for line in lines) for name in package.modules.values())


def test_kernels_replace_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert len(check_packages(config_with(ON_CUDA))) == 1
    monkeypatch.setitem(sys.modules, "kernels", sys.modules["torch_memory_saver"])
    assert check_packages(config_with(ON_CUDA)) == []


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("numpy") and is_installed("json.decoder")
    assert not is_installed("no_such_package") and not is_installed("no_such_package.part")
    assert installed_version("numpy") is not None and installed_version("no-such-package") is None
