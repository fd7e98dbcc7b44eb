"""The example of a framework's agent without the framework. With it: tests/contract/agents."""

import sys

import pytest

from rlscale.config import load_config
from rlscale.config.user_functions import check_hooks


def test_a_missing_framework_is_one_line_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agents", None)
    monkeypatch.delitem(sys.modules, "rlscale.examples.framework_agent", raising=False)
    (problem,) = check_hooks(load_config(["experiment=framework_agent"]))
    assert str(problem).startswith(
        "agent.function_path must be importable, got rlscale.examples.framework_agent:run; importing "
        "'rlscale.examples.framework_agent' failed: ModuleNotFoundError: openai-agents is missing; "
        "pip install 'rlscale[examples]'"
    )
