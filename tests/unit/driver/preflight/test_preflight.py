"""The list of all checks before Ray starts, and how it is combined with the problems of the config."""

import socket
import sys
from pathlib import Path

import pytest
import ray

from rlscale.cluster import ray_session
from rlscale.config import RunConfig, load_config, load_config_with_notes
from rlscale.config.problems import ALL_KEYS
from rlscale.config.resolve.defaults import resolve
from rlscale.config.rules import Rule
from rlscale.driver.preflight import (
    CHECKS,
    OF_WHOLE_CONFIGS,
    check_cluster,
    check_gateway,
    check_run,
    check_script,
    check_sizes_on_cpu,
    check_warmup,
)
from rlscale.driver.preflight.eval_checks import check_eval_sets
from rlscale.driver.warmup import warmup_config
from rlscale.errors import ConfigError
from rlscale.rehearsal.first_checks import NOT_NEEDED
from tests.unit.config.rules.cases import CASES
from tests.unit.config.rules.valid_config import Values, config_with


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and a cache without files, and no Ray cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def paths(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config_with_notes(["experiment=quickstart", *overrides], check=check_run)
    return [problem.path for problem in caught.value.problems]


def test_the_quickstart_has_no_problem() -> None:
    assert check_run(load_config(["experiment=quickstart"])) == []


def test_problems_of_the_config_and_of_its_files_are_one_list() -> None:
    wrong = ["optim.lrr=1", "batch.rollout_batch_size=7", "batch.global_batch_size=1024", "data.prompt_data=gone.jsonl"]
    assert paths(wrong) == ["optim.lrr", "batch.global_batch_size", "data.prompt_data"]


def test_the_address_of_the_gateway_must_be_free() -> None:
    gateway = {"gateway.enabled": True, "gateway.host": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = check_gateway(config_with({**gateway, "gateway.port": port}))
        assert check_gateway(config_with({**gateway, "gateway.enabled": False, "gateway.port": port})) == []
    assert str(problem) == (
        f"gateway.port must be a free port of 127.0.0.1, got {port} (Address already in use); choose another port, or "
        "remove it for a free one"
    )
    assert check_gateway(config_with({**gateway, "gateway.port": port})) == check_gateway(config_with(gateway)) == []
    (problem,) = check_gateway(config_with({**gateway, "gateway.host": "192.0.2.1"}))
    assert "gateway.host must be an address of this machine, got 192.0.2.1 (Cannot assign" in str(problem)


def test_a_path_has_one_problem() -> None:
    assert paths(["cluster.ray_address=banana", "data.prompt_data=gone.jsonl"]) == [
        "cluster.ray_address",
        "data.prompt_data",
    ]


def test_a_check_that_reads_a_broken_key_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    # The default of train.backend is megatron.
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    assert paths(["train.backend=fdsp", "data.prompt_data=gone.jsonl"]) == ["train.backend", "data.prompt_data"]


def test_without_an_experiment_nothing_else_is_checked() -> None:
    assert paths(["experiment=quickstrat", "data.prompt_data=gone.jsonl"])[:1] == ["experiment"]
    assert check_run(config_with({"data.prompt_data": "gone.jsonl"}), {ALL_KEYS}) == []


@pytest.mark.parametrize(
    "values",
    [
        {"run.dir": "runs/a", "checkpoint.save": "runs/a/checkpoints"},
        {"train.backend": "megatron", "run.dir": "runs/a", "model.megatron_to_hf_mode": "bridge"},
        {"model.build": None, "model.hf_checkpoint": "/gone", "model.ref_load": "/gone/too", "run.dir": "runs/a"},
        {"train.only_train_params": ["nope"], "train.lora.load": "/gone", "train.lora.rank": 1, "run.dir": "runs/a"},
        {"eval.interval": 1, "eval.config": str(Path(__file__)), "run.dir": "runs/a"},
        {"checkpoint.load": "/gone", "cluster.ray_address": "127.0.0.1:1", "run.dir": "runs/a"},
    ],
)
def test_the_keys_that_a_check_reads_can_be_recorded(values: Values) -> None:
    config = config_with(values)
    for check in CHECKS:
        if check not in OF_WHOLE_CONFIGS:
            problems, read = Rule(check).trace(config)
            assert problems == check(config) and read


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), [case[:2] for case in CASES])
def test_a_config_that_breaks_a_rule_is_checked_all_the_same(name: str, values: Values) -> None:
    config, _ = resolve(config_with(values), has_cuda=lambda: False)
    assert set(check_run(config, {"optim.lr"})) <= set(check_run(config))


def test_the_model_of_a_judge_is_checked(tmp_path: Path) -> None:
    judged = ["reward.type=judge", "reward.engine.num_gpus=1"]
    assert check_run(load_config(["experiment=quickstart", *judged])) == []
    (tmp_path / "empty").mkdir()
    for model in ("/gone/judge", str(tmp_path / "empty")):
        assert paths([*judged, f"reward.engine.hf_checkpoint={model}"]) == ["reward.engine.hf_checkpoint"]


def test_a_judge_on_sglang_needs_its_interpreter() -> None:
    judged = ["reward.type=judge", "reward.engine.num_gpus=1", "reward.engine.kind=sglang"]
    assert paths([*judged, f"sglang.python={sys.executable}_gone"]) == ["sglang.python"]


def test_the_script_of_a_scripted_engine_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    config = config_with({"rollout.engine": "scripted", "rollout.script_path": str(file), "debug.rollout_only": True})
    (problem,) = check_script(config)
    assert str(problem) == f"rollout.script_path must name an existing file, got {file}; check the path"
    file.write_text('{"answers": ["a"]}')
    assert check_script(config) == []


def test_an_odd_list_of_evaluation_files_is_left_to_its_rule() -> None:
    assert check_eval_sets(config_with({"eval.interval": 1, "eval.prompt_data": ["a", "b", "c"]})) == []


def test_too_few_gpus_are_reported_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        raise AssertionError("Ray must not start")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray_session, "_count_gpus", lambda: 1)
    config = config_with({"cluster.device": "cuda", "cluster.actor_num_gpus_per_node": 2})
    (problem,) = check_cluster(config)
    assert str(problem).startswith(
        "cluster must fit on the GPUs that Ray has, got 3 required (2 for training, 1 for generation) and 1 available; "
    )
    for enough in (3, None):  # None: not known
        monkeypatch.setattr(ray_session, "_count_gpus", lambda number=enough: number)
        assert check_cluster(config) == []


def test_gpus_are_counted_as_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    monkeypatch.setattr(manager, "get_current_node_num_accelerators", lambda: 4)
    for visible, number in ((None, 4), ("0,2", 2), ("", 0), ("0,1,2,3,4,5", 4)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert ray_session._count_gpus() == number


def warmed(**values: object) -> RunConfig:
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_config(["experiment=quickstart", *overrides])


def test_the_warm_up_is_checked_unless_it_has_run(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    warmup = "# @package _global_\ndefaults:\n  - quickstart_warmup\n\ndata:\n  prompt_data: gone.jsonl\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(warmup)
    config = load_config(["experiment=quickstart", "model.warmup_experiment=mine"], config_dir=tmp_path / "conf")
    (problem,) = check_warmup(config)
    assert str(problem) == (
        f"data.prompt_data must name a file that exists, got gone.jsonl; looked for {tmp_path}/gone.jsonl (in the "
        "warm-up, model.warmup_experiment=mine)"
    )
    finished = Path(str(warmup_of(config).run.dir))
    finished.mkdir(parents=True)
    (finished / "finished.json").touch()
    assert check_warmup(config) == []


def warmup_of(config: RunConfig) -> RunConfig:
    found = warmup_config(config)
    assert found is not None
    return found


def test_the_warm_up_must_exist() -> None:
    (problem,) = check_warmup(warmed(**{"model.warmup_experiment": "quickstart_warmpu"}))
    assert str(problem) == (
        "model.warmup_experiment must be the name of an experiment, got quickstart_warmpu; did you mean "
        "quickstart_warmup?"
    )
    assert check_warmup(warmed(**{"model.warmup_experiment": "null"})) == []


def test_a_problem_of_run_and_warm_up_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    found = check_run(load_config(["experiment=quickstart", "train=megatron"]))
    assert [problem.path for problem in found] == ["train.backend"]
    assert found[0].origin == ""


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), []),
        (("sglang.pp_size=2",), []),
        (("sglang.ep_size=2",), ["sglang.ep_size must be 1 with cluster.device=cpu, got 2; remove it"]),
        (
            ("sglang.enable_dp_attention=true", "sglang.dp_size=2"),
            ["sglang.dp_size must be 1 with cluster.device=cpu, got 2; remove it"],
        ),
        (("sglang.attn_dp_size=2",), ["sglang.attn_dp_size must be 1 with cluster.device=cpu, got 2; remove it"]),
        (
            ("cluster.rollout_num_gpus=4", "cluster.rollout_num_gpus_per_engine=4"),
            [
                "cluster.rollout_num_gpus_per_engine must be a divisor of model.num_key_value_heads=2 with "
                "cluster.device=cpu, got 4; set it to 2"
            ],
        ),
    ],
)
def test_parallel_sizes_of_sglang_on_a_cpu(overrides: tuple[str, ...], found: list[str]) -> None:
    two = ("rollout=sglang", "cluster.rollout_num_gpus=2")
    config = load_config([*two, "cluster.rollout_num_gpus_per_engine=2", *overrides])
    assert config.cluster.device == "cpu"
    problems = [str(problem) for problem in check_sizes_on_cpu(config)]
    assert len(problems) == len(found) and all(map(str.startswith, problems, found)), problems


def test_a_rehearsal_does_not_have_the_limits_of_sglang_on_a_cpu() -> None:
    sizes = ("cluster.rollout_num_gpus=4", "cluster.rollout_num_gpus_per_engine=4", "sglang.ep_size=2")
    paths = set[str]()
    for groups in (("sglang.attn_dp_size=2",), ("sglang.enable_dp_attention=true", "sglang.dp_size=2")):
        paths |= {problem.path for problem in check_sizes_on_cpu(load_config(["rollout=sglang", *sizes, *groups]))}
    assert len(paths) == 4 and paths <= NOT_NEEDED


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["agent.command=[no-such-agent,--fast]"], ["agent.command.0"]),
        (["agent.command=[python,no_such_agent.py]"], ["agent.command.1"]),
        (["agent.function_path=no_such_module:agent"], ["agent.function_path"]),
        (["agent.function_path=json:loads"], ["agent.function_path"]),
    ],
)
@pytest.mark.slow
def test_agents_that_are_not_found_are_reported_before_the_run(overrides: list[str], wrong: list[str]) -> None:
    assert paths(overrides) == wrong
    for right in (f"agent.command=[python,'{__file__}']", "agent.function_path=operator:add"):
        assert check_run(load_config(["experiment=quickstart", right])) == []
