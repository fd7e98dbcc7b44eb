"""HTML of the report: self-contained, and no text of a run is executable. `tests/browser` opens it in a browser."""

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import load_config, to_yaml
from rlscale.observe.provenance import write_provenance
from rlscale.observe.report import read_run, render
from tests.unit.observe.report.made_run import ATTACK, clean_checkout, make_run


class Structure(html.parser.HTMLParser):
    """Parsed page: tags with attributes, texts of scripts, and other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)
        else:
            self.text += f"{data} "


def render_run(folder: Path, **kind: Any) -> str:
    return render(read_run(make_run(folder, **kind), max_samples=1000))


def parse_data(page: str) -> dict[str, Any]:
    def refuse(name: str) -> Any:
        raise AssertionError(f"browsers do not read {name}")

    data: dict[str, Any] = json.loads(Structure(page).scripts[0], parse_constant=refuse)
    return data


def test_the_page_loads_no_external_resource(tmp_path: Path) -> None:
    page = render_run(tmp_path)
    loading = [attrs for _, attrs in Structure(page).tags if {"src", "srcset", "action", "data"} & attrs.keys()]
    links = [attrs["href"] for _, attrs in Structure(page).tags if "href" in attrs]
    assert loading == []
    assert all(link and link.startswith("#") for link in links)
    assert not re.search(r"@import|url\(", page)
    assert "default-src &#39;none&#39;" in page


def test_samples_stay_text(tmp_path: Path) -> None:
    page = render_run(tmp_path)
    assert ATTACK not in page
    structure = Structure(page)
    assert [tag for tag, _ in structure.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in structure.tags]
    assert not [attrs for _, attrs in structure.tags if any(name.startswith("on") for name in attrs)]
    assert ATTACK in structure.text  # in the warnings and overrides, readable
    assert any(ATTACK in token for sample in parse_data(page)["samples"]["samples"] for token in sample["tokens"])


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page(tmp_path: Path) -> None:
    import base64
    import hashlib

    structure = Structure(render_run(tmp_path))
    policy = next(attrs["content"] for tag, attrs in structure.tags if tag == "meta" and "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(structure.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_the_header_shows_the_results(tmp_path: Path) -> None:
    text = " ".join(Structure(render_run(tmp_path)).text.split())
    for part in ("held-out reward 0.100 → 0.900", "rollouts 12 of 12", "12,345 in 68 s", "experiment quickstart"):
        assert part in text
    assert "finished" in text and "not finished" not in text


@pytest.mark.parametrize(
    ("kind", "status", "absent"),
    [
        ({"finished": False}, "not finished", "tokens 12,345"),
        ({"evaluates": False}, "finished", "held-out reward"),
        ({"sft": True, "evaluates": False}, "finished", "training reward"),
        ({"num_rollouts": 0, "evaluates": False, "finished": False}, "not finished", "training reward"),
    ],
    ids=["unfinished", "without evaluation", "sft", "before the first rollout"],
)
@pytest.mark.slow
def test_runs_of_every_kind(tmp_path: Path, kind: dict[str, Any], status: str, absent: str) -> None:
    if kind.get("num_rollouts") == 0:
        make_run(tmp_path, num_rollouts=1)
        for name in ("metrics.jsonl", "samples.jsonl", "distributions.jsonl", "finished.json"):
            (tmp_path / name).unlink()
        page = render(read_run(tmp_path, max_samples=10))
    else:
        page = render_run(tmp_path, **kind)
    text = " ".join(Structure(page).text.split())
    assert status in text
    assert absent not in text


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    talks = parse_data(render_run(tmp_path))["conversations"]["trajectories"]
    assert [talk["rewards"]["aux"] for talk in talks if talk["rewards"]] == [None]


def test_phases_keep_their_order(tmp_path: Path) -> None:
    assert list(parse_data(render_run(tmp_path))["time"]["phases"]) == ["rollout", "train", "eval", "other"]


def test_the_warning_limit_is_that_of_the_run(tmp_path: Path) -> None:
    data = parse_data(render_run(tmp_path))
    assert data["diff_limit"] == 1e-4 and data["has_diff_limit"]


@pytest.mark.parametrize(("overrides", "expected"), [((), False), (("debug.logprob_diff_warn=0.5",), True)])
@pytest.mark.parametrize(
    "cause", [("rollout.max_staleness=1", "rollout.pause_mode=in_place"), ("rollout.weight_precision=fp8",)]
)
@pytest.mark.slow
def test_a_run_whose_engine_samples_otherwise_has_a_limit_only_if_one_is_set(
    tmp_path: Path, cause: tuple[str, ...], overrides: tuple[str, ...], expected: bool
) -> None:
    make_run(tmp_path, num_rollouts=1)
    given = ["rollout=embedded", *cause, *overrides]
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(given)))
    assert parse_data(render(read_run(tmp_path, max_samples=10)))["has_diff_limit"] == expected


def test_non_finite_metrics_cause_a_warning(tmp_path: Path) -> None:
    text = " ".join(Structure(render_run(tmp_path)).text.split())
    assert "not a finite number, of 13 records: train/grad_norm in 1, first in rollout 2" in text


def test_a_resumed_run_labels_the_numbers_of_the_last_start(tmp_path: Path) -> None:
    make_run(tmp_path)
    config_yaml = (tmp_path / "config.yaml").read_text()
    write_provenance(tmp_path, config_yaml=config_yaml, overrides=["custom.a='b c'"], read_git=clean_checkout)
    text = " ".join(Structure(render(read_run(tmp_path, max_samples=10))).text.split())
    assert "12,345 in 68 s (last start)" in text
    assert "Start 2: 2" in text and " UTC" in text and "+00:00" not in text


def test_commands_can_be_copied_into_a_shell(tmp_path: Path) -> None:
    make_run(tmp_path)
    overrides = ["+custom={a: b c}", "algo=grpo"]
    write_provenance(tmp_path, config_yaml="{}", overrides=overrides, read_git=clean_checkout)
    text = " ".join(Structure(render(read_run(tmp_path, max_samples=10))).text.split())
    assert " '+custom={a: b c}' algo=grpo " in text
