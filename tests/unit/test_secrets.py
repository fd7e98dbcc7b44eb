"""Secrets are recognised and redacted; all other text is kept."""

import pytest
import yaml

from rlscale.secrets import REDACTED, is_secret, redact_override, redact_yaml


@pytest.mark.parametrize(
    "name",
    [
        "logging.wandb.key",
        "custom.reward.key",
        "rollout.router_api_key",
        "custom.hf_token",
        "token",
        "db.password",
        "secret",
        "aws_secret_value",
        "reward.auth_token",
        "wandb_key",
        "apikey",
        "Authorization",
        "KAGGLE_KEY",
        "AZURE_OPENAI_KEY",
        "PGPASSWORD",
        "custom.accessToken",
        "custom.search.apiKey",
        "MYSQL_PWD",
        "custom.db_pwd",
        "GITHUB_PAT",
    ],
)
def test_secrets_are_recognised(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "data.input_key",
        "data.label_key",
        "data.metadata_key",
        "reward.key",
        "+reward.key",
        "rollout.stop_token_ids",
        "train.max_tokens_per_gpu",
        "throughput.tokens_per_s",
        "model.eos_token",
        "model.tokenizer",
        "data.multimodal_keys",
        "custom.inputKey",
        "custom.stopTokenIds",
        "PWD",
        "OLDPWD",
        "custom.bit_pat",
        "algo.calculate_per_token_loss",
        "",
    ],
)
def test_names_of_columns_and_tokens_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("algo.eps_clip=0.1", "algo.eps_clip=0.1"),
        ("data.input_key=question", "data.input_key=question"),
        ("logging.wandb.key=abc123", f"logging.wandb.key={REDACTED}"),
        ("++custom={api_key: abc123, n: 2}", f"++custom={{api_key: {REDACTED}, n: 2}}"),
        ("++custom={hf_token: 'abc 123, x', n: 2}", f"++custom={{hf_token: {REDACTED}, n: 2}}"),
        ("++custom={api_key: ${oc.env:MINE}, n: 2}", f"++custom={{api_key: {REDACTED}, n: 2}}"),
        ("++custom={headers: {Authorization: Bearer abc123}}", f"++custom={{headers: {{Authorization: {REDACTED}}}}}"),
        ("++custom={key: {input: question}}", "++custom={key: {input: question}}"),
        ("reward.url=http://me:abc123@host/x", f"reward.url=http://{REDACTED}@host/x"),
        ("custom.cache=redis://:abc123@host/0", f"custom.cache=redis://{REDACTED}@host/0"),
        ("custom.cache=redis://me:abc@123@host/0", f"custom.cache=redis://{REDACTED}@host/0"),
        ("reward.url=https://abc123@host/x", f"reward.url=https://{REDACTED}@host/x"),
        ("reward.url=https://host/x?key=abc123&n=2", f"reward.url=https://host/x?key={REDACTED}&n=2"),
        (
            "agent.mcp_servers=[https://host/mcp?n=2&api_key=abc123, https://host/m]",
            f"agent.mcp_servers=[https://host/mcp?n=2&api_key={REDACTED}, https://host/m]",
        ),
        ("reward.url=https://host:80/a@b?input_key=q", "reward.url=https://host:80/a@b?input_key=q"),
        ("custom.clone=ssh://git@host/x", "custom.clone=ssh://git@host/x"),
        ("agent.env={KAGGLE_KEY: abc123}", f"agent.env={{KAGGLE_KEY: {REDACTED}}}"),
        ("+experiment=quickstart", "+experiment=quickstart"),
        ("~logging.wandb", "~logging.wandb"),
    ],
)
def test_overrides_keep_all_but_secrets(typed: str, kept: str) -> None:
    assert redact_override(typed) == kept


def test_yaml_without_secrets_is_kept_to_the_letter() -> None:
    text = "data:\n  input_key: question  # a column\nrollout:\n  stop_token_ids: [1, 2]\n"
    assert redact_yaml(text) == text


def test_yaml_with_secrets_loses_only_them() -> None:
    text = "b: 1\nlogging: {wandb: {key: abc123, project: p}}\nservers: [{api_key: abc123, port: 1}]\nhf_token: null\n"
    redacted = redact_yaml(text)
    assert "abc123" not in redacted
    assert yaml.safe_load(redacted) == {
        "b": 1,
        "logging": {"wandb": {"key": REDACTED, "project": "p"}},
        "servers": [{"api_key": REDACTED, "port": 1}],
        "hf_token": None,
    }


def test_secrets_inside_of_command_lines_are_redacted() -> None:
    text = "run: {name: key=abc123, overrides: [algo.eps_clip=0.1, logging.wandb.key=abc123]}\n"
    assert yaml.safe_load(redact_yaml(text))["run"] == {
        "name": "key=abc123",
        "overrides": ["algo.eps_clip=0.1", f"logging.wandb.key={REDACTED}"],
    }


def test_secrets_of_urls_are_redacted_in_yaml() -> None:
    signed = "https://host/b?X-Amz-Date=3&X-Amz-Signature=abc123', 'https://host/c?se=3&sig=abc123"
    text = f"urls: ['https://abc123@host/x', 'http://host/mcp?api_key=abc123', 'redis://:abc123@host/0', '{signed}']\n"
    assert yaml.safe_load(redact_yaml(text))["urls"] == [
        f"https://{REDACTED}@host/x",
        f"http://host/mcp?api_key={REDACTED}",
        f"redis://{REDACTED}@host/0",
        f"https://host/b?X-Amz-Date=3&X-Amz-Signature={REDACTED}",
        f"https://host/c?se=3&sig={REDACTED}",
    ]


def test_the_value_of_a_reward_to_train_on_is_stored() -> None:
    text = "reward: {key: score}\nlogging: {wandb: {key: k}}\nrun: {overrides: ['reward={key: acc}', wandb.key=k]}\n"
    found = yaml.safe_load(redact_yaml(text))
    assert found["reward"] == {"key": "score"} and found["logging"] == {"wandb": {"key": REDACTED}}
    assert found["run"]["overrides"] == ["reward={key: acc}", f"wandb.key={REDACTED}"]
