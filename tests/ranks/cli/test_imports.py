"""Config errors, `--cfg job` and `import rlscale` load no slow packages."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"
SCRIPT = """
import sys
import rlscale
try:
    from rlscale.cli.train import main
    sys.argv = ["rlscale-train", *{words!r}]
    main()
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "ray", "transformers", "numpy", "optuna", "joblib") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--cfg", "job"], 0),
        (["algo.eps_clp=1"], 2),
        (["--help"], 0),
        (["--version"], 0),
        (["-sc", "install=bash"], 0),
        (["-m", "algo.eps_clip=0.1,-1"], 2),
    ],
)
def test_the_command_loads_no_slow_package(words: list[str], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT.format(words=words)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


PLAN = """
import sys
from rlscale.cli.plan import main
code = main({words!r})
heavy = [name for name in ("torch", "ray", "transformers", "numpy") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [([], 0), (["experiment=qwen3_4b_grpo", "model=qwen3_32b", "--json"], 0), (["algo.eps_clp=1"], 2)],
)
def test_the_plan_loads_no_slow_package(words: list[str], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLAN.format(words=words)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert not list(tmp_path.iterdir())


def test_the_package_loads_its_entry_points_lazily() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys, rlscale; assert 'pydantic' not in sys.modules; rlscale.load_config(); rlscale.__version__; "
        "assert 'torch' not in sys.modules; assert not hasattr(rlscale, 'nothing')",
    ]
    subprocess.run(command, env={"PYTHONPATH": str(SOURCE)}, timeout=60, check=True)


LOOK = """
import sys
from rlscale.cli.config import main
code = main({words!r})
heavy = [name for name in ("torch", "ray", "transformers", "numpy") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["help", "algo"], 0),
        (["explain", "algo.eps_clip", "algo=gspo"], 0),
        (["diff", "quickstart", "qwen3_4b_grpo"], 0),
        (["minimize", "quickstart"], 0),
        (["schema"], 0),
        (["explain", "algo.eps_clp"], 2),
    ],
)
def test_inspection_loads_no_slow_package(words: list[str], code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(words=words)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_wrong_input_of_an_evaluation_loads_no_slow_package(tmp_path: Path) -> None:
    code = "import sys; from rlscale.cli.eval import main; code = main(['nowhere/a/b']); "
    code += "assert not {'torch', 'ray', 'transformers'} & set(sys.modules); sys.exit(code)"
    env = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        ("rlscale.cluster.engine_actor, rlscale.engines.launch_embedded", "pydantic omegaconf aiohttp"),
        ("rlscale.cluster.rank_actor, rlscale.training.fsdp.backend", "hydra omegaconf rlscale.plan.plan"),
        ("rlscale.agents.environment_child", "hydra omegaconf"),
    ],
)
def test_processes_of_a_run_load_no_package_that_they_do_not_use(modules: str, slow: str) -> None:
    """Each of a run's processes would start a fifth of a second later."""
    code = f"import sys, {modules}; loaded = {{*{slow.split()}}} & sys.modules.keys(); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, timeout=60, check=True)


def test_a_config_needs_hydra_only_to_be_composed() -> None:
    """Ranks and engines get a config that is composed; Hydra would cost each a quarter of a second."""
    code = (
        "import sys, rlscale.config, rlscale.worker.policy, rlscale.worker.critic; "
        "assert 'hydra' not in sys.modules; "
        "assert rlscale.config.to_yaml(rlscale.config.load_config()).startswith('run:'); "
        "assert {*rlscale.config.__all__} <= {*dir(rlscale.config)}; "
        "assert all(hasattr(rlscale.config, name) for name in rlscale.config.__all__); "
        "assert not hasattr(rlscale.config, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, timeout=60, check=True)
