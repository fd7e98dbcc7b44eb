"""The command `rlscale-config`."""

import json
from pathlib import Path

import pytest

from rlscale.cli.app import main_train
from rlscale.cli.config import main
from rlscale.config import load_config, to_yaml
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.keys import keys


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_help_lists_groups_and_documents_each(capsys: pytest.CaptureFixture[str]) -> None:
    overview = shown(capsys, "help")
    for group in {key.group for key in keys().values() if key.group}:
        assert f"\n  {group} (" in overview
        page = shown(capsys, "help", group)
        assert all(f"  {key.path}: " in page for key in keys().values() if key.group == group)
    assert max(len(line) for line in overview.splitlines()) <= 100


def test_help_of_a_group_shows_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(capsys, "help", "algo")
    assert "algo=gspo" in page and "arXiv 2507.18071" in page
    assert "  algo.eps_clip: a number, > 0; default 0.2" in page
    assert "SGLang" in shown(capsys, "help", "sglang") and "algo.mis.level" in shown(capsys, "help", "algo.mis")
    assert "experiment=quickstart" in shown(capsys, "help", "experiment")
    assert shown(capsys, "help", "algo.eps_clip").startswith("algo.eps_clip\n")
    assert "did you mean algo?" in refused(capsys, "help", "algoo")
    assert shown(capsys, "help", "custom").startswith("custom\n\n  custom: a mapping")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "explain", "algo.eps_clip", "experiment=quickstart", "algo=gspo")
    assert "value       0.0003" in text and "gspo.yaml:4" in text
    assert json.loads(shown(capsys, "explain", "algo.eps_clip", "--json"))["value"] == 0.2
    assert "abc" not in shown(capsys, "explain", "logging.wandb.key", "logging.wandb.key=abc")
    assert "abc" not in shown(capsys, "explain", "train.env_vars", "train.env_vars.MY_TOKEN=abc")
    assert "user:abc" not in shown(capsys, "explain", "reward.url", 'reward.url="http://user:abc@host/score"')
    assert "algo.eps_clip must be > 0" in refused(capsys, "explain", "optim.lr", "algo.eps_clip=-1")
    for group in ("algo", "algo.mis", "experiment"):
        assert f"it is a group: rlscale-config help {group}\n" in refused(capsys, "explain", group)
    assert "which rlscale sets; set cluster" in " ".join(shown(capsys, "explain", "sglang.tp_size").split())
    assert max(len(line) for line in shown(capsys, "explain", "megatron.lr").splitlines()) <= 100


def test_overrides_may_follow_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "explain", "algo.eps_clip", "--json", "algo=gspo", "algo.eps_clip=0.4")
    assert json.loads(text)["value"] == 0.4
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "algo.eps_clip", "--jsn", "algo=gspo"])
    with pytest.raises(SystemExit, match="2"):
        main(["diff", "quickstart", "sft", "more"])
    assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "rlscale-config: --jsn must be a known argument, got --jsn",
        "rlscale-config: arguments must end before more, got one too many",
    ]


def test_diff_of_experiments_runs_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(["algo.eps_clip=0.1"])
    Path("run").mkdir()
    Path("run/config.yaml").write_text(to_yaml(config), encoding="utf-8")
    text = shown(capsys, "diff", "run", "quickstart")
    assert text.splitlines() == [
        "2 keys differ: run -> quickstart",
        "  algo.eps_clip: 0.1 -> 0.2",
        "  algo.eps_clip_high: 0.1 -> 0.2",
    ]
    rows = json.loads(shown(capsys, "diff", "run/config.yaml", "algo.eps_clip=0.1 train.seed=7", "--json"))
    assert rows == [{"key": "train.seed", "before": 1234, "after": 7}]
    assert "run.name" in shown(capsys, "diff", "run", "quickstart", "--all")
    assert "megatron" in shown(capsys, "diff", "quickstart", "deepseek_r1"), "a part that is not built can be seen"


def test_diff_of_missing_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean quickstart?" in refused(capsys, "diff", "quickstrat", "quickstart")
    Path("other.yaml").write_text("a: 1\n", encoding="utf-8")
    assert "must contain a complete config" in refused(capsys, "diff", "other.yaml", "quickstart")
    Path("other.yaml").write_text("a: [1\n", encoding="utf-8")
    assert "must be valid YAML" in refused(capsys, "diff", "other.yaml", "quickstart")


@pytest.mark.slow
def test_minimize(capsys: pytest.CaptureFixture[str]) -> None:
    assert "- override /model: tiny_qwen3" in shown(capsys, "minimize", "quickstart")
    assert shown(capsys, "minimize", "algo.eps_clip=0.1", "--from", "quickstart") == (
        "rlscale-train experiment=quickstart algo.eps_clip=0.1\n"
    )
    assert shown(capsys, "minimize", "quickstart", "--command-line").startswith(
        "rlscale-train experiment=null cluster=cpu "
    )


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert "algo" in json.loads(shown(capsys, "schema"))["properties"]
    assert "eps_clip" in json.loads(shown(capsys, "schema", "algo"))["properties"]
    settings = json.loads(shown(capsys, "schema", "--write", "made"))
    assert settings["yaml.schemas"]["made/algo.json"] == "conf/algo/*.yaml"
    assert Path("made/experiment.json").is_file()
    (Path("mine") / "algo").mkdir(parents=True)
    Path("mine/algo/wide.yaml").write_text("eps_clip: 0.7\n", encoding="utf-8")
    assert '"wide"' in shown(capsys, "schema", "--config-dir", "mine")
    assert "algoo" in refused(capsys, "schema", "algoo")
    Path("file").touch()
    assert "--write must name a folder that can be written, got file" in refused(capsys, "schema", "--write", "file")


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COMP_LINE", f"rlscale-train {line}")
    assert main_train(["-sc", "query=bash"], make_job=lambda config: pytest.fail("a run was started")) == 0
    return capsys.readouterr().out.split()


@pytest.mark.slow
def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def complete(line: str) -> list[str]:
        return completed(line, monkeypatch, capsys)

    groups = ConfigFolders.find().groups()
    assert {"algo=", "algo.", "batch.", "experiment="} <= set(complete(""))
    assert complete("algo=gs") == ["algo=gspo"]
    assert complete("experiment=") == sorted(f"experiment={name}" for name in groups["experiment"])
    assert complete("+on=c") == ["+on=cpu"]
    assert complete("algo.eps_clip_") == ["algo.eps_clip_c=", "algo.eps_clip_high="]
    assert complete("algo=gspo optim.lr_d") == [
        "optim.lr_decay_iters=",
        "optim.lr_decay_power=",
        "optim.lr_decay_style=",
    ]
    assert complete("algo.loss_type=pol") == ["algo.loss_type=policy_loss"]
    assert complete("algo.use_tis=") == ["algo.use_tis=false", "algo.use_tis=true"]
    assert complete("algo.eps_clip=") == ["algo.eps_clip=0.2"]
    assert complete("algo.eps_clp=1 algo=ci") == ["algo=cispo"], "a wrong word before ends nothing"
    assert complete("nothing.here") == []


def test_an_invalid_request_for_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["-sc", "install=cmd"], make_job=lambda config: pytest.fail("a run was started")) == 2
    assert "-sc must be install|uninstall|query=<bash|fish|zsh>, got install=cmd" in capsys.readouterr().err
