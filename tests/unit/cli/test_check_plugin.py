import pytest

from rlscale.cli.check_plugin import main
from rlscale.plugins.contracts import CONTRACTS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my_reward:score"], "--kind must be set, got nothing; one of loss, data_source"),
        (["--kind", "reward"], "MODULE:NAME must be one function, got nothing"),
        (["a:b", "c:d", "--kind=reward"], "MODULE:NAME must be one function, got a:b c:d"),
        (["a:b", "--kind", "rewrd"], "got rewrd; did you mean reward?"),
        (["a:b", "--kind", "reward", "--timeout", "soon"], "--timeout must be a number of seconds above 0, got soon"),
        (["a:b", "--knd", "reward"], "--knd must be a known flag, got --knd; did you mean --kind?"),
        (["a:b", "--kind", "reward", "algo.eps_clp=1"], "algo.eps_clp must be"),
    ],
)
def test_a_wrong_command_line_is_an_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    found = capsys.readouterr().err
    assert found.startswith("rlscale-check-plugin: ") and message in found


def test_the_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {kind} " in text and contract.call in text for kind, contract in CONTRACTS.items())
