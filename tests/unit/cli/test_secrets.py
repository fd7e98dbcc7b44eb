"""Secrets are removed from the command line."""

import pytest

from rlscale.cli.secrets import move_secrets
from rlscale.config import load_config
from rlscale.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "secret"),
    [
        ("logging.wandb.key=abc", "abc"),
        ("++logging.wandb.key='a b'", "a b"),
        ("sglang.api_key=abc", "abc"),
    ],
)
def test_a_secret_is_moved(word: str, secret: str) -> None:
    (moved,), variables = move_secrets([word])
    assert variables == {"RLSCALE_SECRET_0": secret}
    assert moved == f"{word.partition('=')[0]}=${{oc.env:RLSCALE_SECRET_0}}"


@pytest.mark.parametrize(
    ("word", "moved", "secrets"),
    [
        (
            "train.env_vars={HF_TOKEN: abc, N: 1}",
            "train.env_vars={HF_TOKEN: ${oc.env:RLSCALE_SECRET_0}, N: 1}",
            ["abc"],
        ),
        ("+custom={a: {api_key: 'x, y'}}", "+custom={a: {api_key: ${oc.env:RLSCALE_SECRET_0}}}", ["x, y"]),
        (r"+custom={api_key: x\,y z}", "+custom={api_key: ${oc.env:RLSCALE_SECRET_0}}", ["x,y z"]),
        (
            "+custom=[{token: abc}, {password: def}]",
            "+custom=[{token: ${oc.env:RLSCALE_SECRET_0}}, {password: ${oc.env:RLSCALE_SECRET_1}}]",
            ["abc", "def"],
        ),
        ("reward.rm_url=http://me:abc@h/x", "reward.rm_url=http://${oc.env:RLSCALE_SECRET_0}@h/x", ["me:abc"]),
        ("reward.url='http://h/x?key=abc&n=1'", "reward.url='http://h/x?key=${oc.env:RLSCALE_SECRET_0}&n=1'", ["abc"]),
    ],
)
def test_secrets_inside_of_a_value_are_moved(word: str, moved: str, secrets: list[str]) -> None:
    assert move_secrets([word]) == ([moved], {f"RLSCALE_SECRET_{i}": secret for i, secret in enumerate(secrets)})


@pytest.mark.parametrize(
    "word",
    [
        "data.label_key=answer",
        "logging.wandb.key=null",
        "logging.wandb.key=${oc.env:MINE}",
        "train.env_vars={HF_TOKEN: ${oc.env:MINE}}",
        "--cfg",
        "algo=gspo",
    ],
)
def test_other_arguments_are_unchanged(word: str) -> None:
    assert move_secrets([word]) == ([word], {})


def test_the_reference_gives_the_config_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    words, variables = move_secrets(["logging=wandb", "logging.wandb.key=abc"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_config(words).logging.wandb.key == "abc"


def test_references_inside_of_a_value_give_the_config_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    words, variables = move_secrets(
        ["train.env_vars={HF_TOKEN: 'a, b', URL: 'http://me:abc@h', SEARCH: 'http://:c@h/x?token=d&n=1'}"]
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    urls = {"URL": "http://me:abc@h", "SEARCH": "http://:c@h/x?token=d&n=1"}
    assert load_config(words).train.env_vars == {"HF_TOKEN": "a, b", **urls}
    assert sorted(variables.values()) == [":c", "a, b", "d", "me:abc"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sglang.api_key=abc123", "sglang.api_key must not be set, because rlscale sets it, got <redacted>; remove it"),
        ("sglang.hf_token=abc123", "sglang.hf_token must be a key of this group"),
        ("logging.wandb.key=[abc123]", "logging.wandb.key must be"),
        ("reward.url=[http://me:abc123@h]", "reward.url must be"),
        ("logging.wandb.key={abc123", "write 'logging.wandb.key=\"<redacted>\"'"),
        ("logging.wandb.key=abc123,x", "logging.wandb.key must have one value"),
        ("+logging.wandb.key.x=abc123", "logging.wandb.key.x must be a known key, got <redacted>"),
        ("custom={api_key: abc123", "write 'custom={api_key: <redacted>}'"),
        ("train.env_vars.HF_TOKEN=[abc123]", 'got {"HF_TOKEN": "<redacted>"}; write train.env_vars.<name>=<value>'),
        ("++logging={wandb: {key: [abc123]}}", 'got {"wandb": {"key": "<redacted>"}}'),
        ("network.http_proxy=http://me:abc123@h/x?y=1", "http://<redacted>@h/x?y=1"),
    ],
)
def test_no_message_shows_a_secret(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(["rollout=sglang", word])
    text = str(raised.value)
    assert message in text and "abc123" not in text


def test_a_secret_that_is_missing_is_null_in_a_message() -> None:
    with pytest.raises(ConfigError, match=r"sglang\.api_key must .*, got null"):
        load_config(["rollout=sglang", "sglang.api_key=null", "sglang.tp_size=3", "cluster.rollout_num_gpus=0"])
