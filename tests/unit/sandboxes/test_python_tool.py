"""The text of a result that a model gets."""

import pytest

from rlscale.sandboxes.python_tool import MAX_SHOWN, describe_result
from rlscale.sandboxes.sandbox import ExecResult


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ExecResult(stdout="2\n", stderr="", exit_code=0), "2"),
        (ExecResult(stdout="", stderr="", exit_code=0), "[no output]"),
        (ExecResult(stdout="1\n", stderr="ValueError: x\n", exit_code=1), "1\nValueError: x"),
        (ExecResult(stdout="", stderr="", exit_code=3), "[exit code 3]"),
        (ExecResult(stdout="ab", stderr="", exit_code=0, truncated=True), "ab\n[output cut]"),
    ],
)
def test_a_result_is_described(result: ExecResult, text: str) -> None:
    assert describe_result(result) == text


def test_the_middle_of_a_long_output_is_cut_out() -> None:
    text = describe_result(ExecResult(stdout="a" * MAX_SHOWN + "b" * 5 + "c" * MAX_SHOWN, stderr="", exit_code=0))
    assert text.startswith("aaa") and text.endswith("ccc") and len(text) < MAX_SHOWN + 100
    assert f"[... {MAX_SHOWN + 5} characters ...]" in text
