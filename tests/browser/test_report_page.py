"""Page of `rlscale-report` in a real browser: charts, filters, token details, content security policy."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlscale.cli.report import main
from rlscale.errors import EngineError
from rlscale.observe.run_end import recorded_end
from tests.browser.chromium import Page, chromium
from tests.unit.observe.report.made_evaluation import write_evaluations
from tests.unit.observe.report.made_run import ATTACK, make_run

pytestmark = pytest.mark.slow


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with chromium(tmp_path / "profile") as page:
        yield page
        assert page.errors == []
        assert not [url for url in page.requests if url.startswith(("http", "ws"))]


def report(folder: Path, **kind: Any) -> str:
    """Writes the report of a synthetic run and returns its URL."""
    make_run(folder / "run", **kind)
    assert main([str(folder / "run")]) == 0
    return (folder / "run" / "report.html").as_uri()


async def num_painted(page: Page, selector: str) -> list[int]:
    """Number of colours on each canvas. A blank canvas has one."""
    counts: list[int] = await page.evaluate(
        f"""[...document.querySelectorAll({selector!r})].map((canvas) => {{
          const pixels = new Uint32Array(
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
          return new Set(pixels).size; }})"""
    )
    return counts


async def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = await page.evaluate(f"[...document.querySelectorAll({selector!r})].map((e) => e.innerText)")
    return found


async def test_every_chart_is_drawn(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path))
    titles = await texts(page, "#curves-grid .card h3")
    for title in ("Reward", "Loss", "Gradient norm", "Learning rate", "KL divergence", "Entropy, nats"):
        assert title in titles
    curves = await num_painted(page, "#curves-grid canvas")
    assert len(curves) == len(titles)
    assert min(curves + await num_painted(page, "#time canvas") + await num_painted(page, "#distributions canvas")) > 5
    assert await page.evaluate("document.querySelectorAll('#time .totals span').length") == 4
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_other_metrics_are_drawn_on_demand(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path))
    await page.evaluate("document.querySelector('#more summary').click()")
    await page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert "weights/version" in await texts(page, "#more-grid h3")
    assert min(await num_painted(page, "#more-grid canvas")) > 5


async def test_filters_choose_samples(page: Page, tmp_path: Path) -> None:
    url = report(tmp_path)
    await page.open(url)
    assert await texts(page, "#samples-count") == ["48 of 48 samples"]

    async def fill(**values: str) -> str:
        for name, value in values.items():
            await page.evaluate(
                f"(() => {{ const e = document.forms.filters.elements[{name!r}]; e.value = {value!r};"
                " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
        (count,) = await texts(page, "#samples-count")
        return count

    assert await fill(**{"from": "3", "to": "4"}) == "8 of 48 samples"
    assert {text.split("\n")[0] for text in await texts(page, "#list .entry")} == {"rollout 3", "rollout 4"}
    assert await fill(status="truncated") == "2 of 48 samples"
    assert await fill(status="", low="1") == "3 of 48 samples"
    assert await fill(low="", text="no such text") == "0 of 48 samples"
    assert await texts(page, "#detail") == ["No sample matches."]
    assert await fill(text="WHAT IS 6") == "8 of 48 samples"
    await page.evaluate("document.querySelector('#filters button').click()")
    await page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert await texts(page, "#samples-count") == ["48 of 48 samples"]


async def test_the_url_stores_the_view(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path) + "#from=5&to=5&status=truncated&colour=version&theme=dark")
    assert await texts(page, "#samples-count") == ["1 of 48 samples"]
    assert await page.evaluate("document.documentElement.classList.contains('dark')")
    colours = await page.evaluate("[...document.querySelectorAll('#tokens .token')].map((t) => t.style.background)")
    assert len(set(colours)) == 2  # one for each weight version


async def test_tokens_show_version_mask_and_difference(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path) + "#from=5&to=5")
    tokens = await texts(page, "#tokens .token")
    assert tokens[0] == "The" and tokens[-1] == "<end>"
    assert await texts(page, "#tokens .version") == ["v5", "v6"]
    assert await texts(page, "#tokens .token.outside") == ["tool: 6*7=42"]
    colours = await page.evaluate("[...document.querySelectorAll('#tokens .token')].map((t) => t.style.background)")
    assert len(set(colours)) > 3
    await page.hover("#tokens .token")
    (tip,) = await texts(page, "#tip")
    assert tip.startswith('"The"')
    assert "token\t1, position 0 in the answer" in tip
    assert "engine logprob\t-0.10000 (p = 0.905)" in tip
    assert "weight version\t5" in tip and "loss mask\t1, trained on" in tip
    await page.hover("#tokens .token.outside")
    (tip,) = await texts(page, "#tip")
    assert "loss mask\t0, not trained on" in tip and "trainer logprob\tnot recorded" in tip


async def test_no_text_of_a_sample_is_executed(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path))
    assert await page.evaluate("document.title") == "run - rlscale"
    assert await page.evaluate("document.querySelectorAll('img').length") == 0
    assert any(ATTACK in text for text in await texts(page, "#detail .text"))
    # The policy blocks a script that is inserted into the page.
    await page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))"
    )
    assert await page.evaluate("document.title") == "run - rlscale"
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()


@pytest.mark.parametrize(
    "kind",
    [{"finished": False}, {"evaluates": False}, {"sft": True, "evaluates": False}, {"num_rollouts": 1}],
    ids=["unfinished", "without evaluation", "sft", "one rollout"],
)
async def test_runs_of_every_kind_are_drawn(page: Page, tmp_path: Path, kind: dict[str, Any]) -> None:
    await page.open(report(tmp_path, **kind))
    assert min(await num_painted(page, "#curves-grid canvas")) > 1
    assert len(await texts(page, "#list .entry")) > 0


async def test_a_run_without_metrics_shows_notes(page: Page, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {name: a}\n")
    assert main([str(tmp_path / "run")]) == 0
    await page.open((tmp_path / "run" / "report.html").as_uri())
    notes = " ".join(await texts(page, ".note"))
    for part in (
        "No rollout has been recorded yet",
        "No step has timings yet",
        "No distribution",
        "No samples are",
        "No outcome has been recorded",
        "No timeline has been recorded",
        "No group has been recorded",
        "No provenance.json",
    ):
        assert part in notes


async def test_a_run_without_samples_has_no_filters(page: Page, tmp_path: Path) -> None:
    shown = "['#filters', '#list', '#detail'].map((name) => document.querySelector(name).offsetHeight > 0)"
    address = report(tmp_path)
    await page.open(address)
    assert await page.evaluate(shown) == [True, True, True]
    (tmp_path / "run" / "samples.jsonl").unlink()
    assert main([str(tmp_path / "run")]) == 0
    await page.open(address)
    assert await page.evaluate(shown) == [False, False, True]
    assert (await texts(page, "#detail"))[0].startswith("No samples are stored")


async def test_curves_that_are_zero_are_named_and_not_drawn(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "time": 0, "train/loss": 1, "truncated/ratio": 0.0, "train/pg_clipfrac": 1e-17}\n')
    assert main([str(tmp_path / "run")]) == 0
    await page.open((tmp_path / "run" / "report.html").as_uri())
    assert "Shares" not in await texts(page, "#curves-grid h3")
    assert await texts(page, "#curves-zero") == [
        "Not drawn, because they are 0 in every rollout: train/pg_clipfrac, truncated/ratio."
    ]


async def test_the_reason_for_the_end_is_shown(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path / "run", finished=False)
    with pytest.raises(EngineError), recorded_end(tmp_path / "run"):
        raise EngineError(ATTACK)
    assert main([str(tmp_path / "run")]) == 0
    await page.open((tmp_path / "run" / "report.html").as_uri())
    assert await texts(page, "#ends li.failed pre") == [f"EngineError: {ATTACK}"]
    (line,) = await texts(page, "#ends li")
    assert line.startswith("Failed") and "rollouts 0 to 11" in line


async def test_every_outcome_is_counted_and_found(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path))
    assert await texts(page, "#outcomes .keys li") == [
        "trained 192 (51.6%)",
        "dropped by equal_rewards 144 (38.7%)",
        "failed by grader 36 (9.7%)",
        "not decided yet 1",
    ]
    assert min(await num_painted(page, "#outcomes canvas")) > 3
    search = "document.querySelector('#outcomes label input')"
    for number, answer in ((29, "failed by grader, rollout 0"), (100, "trained, rollout 3"), (9999, "there is none")):
        await page.evaluate(f"{search}.value = {number}; {search}.dispatchEvent(new Event('input'))")
        assert await texts(page, "#outcomes output") == [answer]
    await page.hover("#outcomes .outcome-map canvas")
    assert await page.evaluate("document.querySelectorAll('#outcomes .stepper button')[0].disabled") is False


async def test_lanes_show_what_each_trajectory_did(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path))
    assert await texts(page, "#lanes .stepper b") == ["rollout 11"]
    assert await texts(page, "#lanes .lane-keys li") == ["waits", "generates", "tool", "is graded"]
    kinds = "[...document.querySelectorAll('#lanes .lane-track')].map((e) => e.querySelectorAll('.tool').length)"
    assert await page.evaluate(kinds) == [0, 1, 0, 1] * 2
    assert (await texts(page, "#lanes .lane-reward"))[1:5] == ["0", "1", "0.5", "failed"]
    wide = await page.evaluate("document.querySelector('#lanes .lane-track .generate').offsetWidth")
    track = await page.evaluate("document.querySelector('#lanes .lane-track').offsetWidth")
    assert wide == pytest.approx(track * 1000 / 5000, abs=2)
    await page.hover("#lanes .lane-track .generate")
    assert (await texts(page, "#tip"))[0].startswith("generates 1 s")
    await page.evaluate("document.querySelectorAll('#lanes .stepper button')[0].click()")
    assert await texts(page, "#lanes .stepper b") == ["rollout 10"]
    assert "rollout=10" in await page.evaluate("location.hash")


async def test_a_group_is_compared_around_its_mean(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path) + "#rollout=3")
    assert (await texts(page, "#groups .facts dd"))[:5] == ["3", "24", "trained", "25", "0.5"]
    # Sorted by reward; a failed trajectory has none.
    assert await texts(page, "#groups tbody th") == ["97", "98", "96", "99"]
    bars = "[...document.querySelectorAll('#groups .meter.signed')].map((e) => e.firstChild?.className ?? 'none')"
    assert await page.evaluate(bars) == ["above", "above", "below", "none"]
    assert any(ATTACK in text for text in await texts(page, "#groups .clamp"))
    assert (await texts(page, "#groups small.lost"))[0].startswith("grader: ")
    await page.evaluate("document.querySelectorAll('#lanes .lane-group')[1].click()")
    assert (await texts(page, "#groups .facts dd"))[1:3] == ["25", "dropped by equal_rewards"]
    pressed = "[...document.querySelectorAll('#lanes .lane-group')].map((e) => e.ariaPressed)"
    assert await page.evaluate(pressed) == ["false", "true"]


async def test_the_page_fits_a_narrow_window(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path), width=420, height=900)
    assert await page.evaluate("document.documentElement.scrollWidth") <= 420
    assert min(await num_painted(page, "#curves-grid canvas")) > 5


async def test_the_theme_button_redraws(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path) + "#theme=light")
    before = await page.evaluate("document.querySelector('#curves-grid canvas').toDataURL()")
    await page.evaluate("document.getElementById('theme').click()")
    assert await page.evaluate("document.querySelector('#curves-grid canvas').toDataURL()") != before
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"


async def test_samples_of_an_evaluation_unfold(page: Page, tmp_path: Path) -> None:
    write_evaluations(tmp_path / "run", 0, 7, num_prompts=3)
    await page.open(report(tmp_path))
    assert await texts(page, "#evaluations > h3") == ["Samples of version 7"]
    assert (await texts(page, "#evaluations .eval-set > summary"))[0] == "a: 3 of 3 prompts"
    assert not await page.evaluate("document.querySelector('#evaluations pre').checkVisibility()")
    await page.evaluate("document.querySelectorAll('#evaluations summary').forEach((each) => each.click())")
    assert await page.evaluate("document.querySelector('#evaluations pre').checkVisibility()")
    assert (await texts(page, "#evaluations pre"))[1] == ATTACK
    assert await page.evaluate("document.title") != "taken"
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_a_trajectory_is_a_conversation(page: Page, tmp_path: Path) -> None:
    await page.open(report(tmp_path) + "#theme=light")
    (count,) = await texts(page, "#conversations .viewer ~ .note, #conversations-body > .note")
    assert count == "51 of 51 trajectories"

    async def order(value: str) -> None:
        await page.evaluate(
            f"(() => {{ const e = document.querySelector('#conversations select'); e.value = {value!r};"
            " e.dispatchEvent(new Event('input', {bubbles: true}));"
            " document.querySelector('#conversations .entry').click(); })()"
        )

    await order("calls")
    roles = await texts(page, ".turns .bubble header b")
    assert roles == [
        "system",
        "user",
        "assistant",
        "tool multiply",
        "tool search",
        "assistant",
        "tool add",
        "assistant",
    ]
    assert await texts(page, ".turns .call b") == ["multiply", "search", "add"]
    assert (await texts(page, ".turns .call code"))[2] == '{"a": 391, "b": '
    heads = await texts(page, ".turns .bubble.sampled header")
    assert heads[0].split("\n") == ["assistant", "12 tokens", "trained", "v3", "0.0 to 1.0 s"]
    assert await texts(page, ".turns .wait") == ["0.40 s between the answers"] * 2
    assert await page.evaluate("document.querySelectorAll('#conversations img').length") == 0
    facts = (await texts(page, ".talk .facts"))[0]
    named = ("reward score", "reward acc\ntrue", "reward pred\n395", "reward aux\n\u2013")
    for part in ("trained, completed", "36", "3, 4", "3.8 s", *named):
        assert part in facts

    await order("failed")
    assert (await texts(page, ".talk .warning"))[0].startswith("sandbox: a sandbox ended <img")
    assert (await texts(page, "#conversations .entry small"))[:2] == ["failed", "4 answers, 3 paths, budget"]
    assert "failed" in (await texts(page, ".talk .facts"))[0]

    await page.evaluate(
        "(() => { const e = document.querySelector('#conversations input'); e.value = 'You add numbers';"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    assert await texts(page, ".path .name") == ["1 path", "2 branch", "3 own prompt"]
    # A used up budget is no failure: the trajectory is graded and trained.
    assert "trained, truncated" in (await texts(page, ".talk .facts"))[0]
    assert await texts(page, ".talk .warning") == ["budget: agent.max_turns=4 is used up"]
    assert (await texts(page, ".turns .bubble .body"))[-1] == "It is 395."
    await page.evaluate("document.querySelectorAll('.path')[1].click()")
    assert (await texts(page, ".turns .bubble .body"))[-1] == "It is 396."
    await page.evaluate("document.querySelectorAll('.path')[2].click()")
    assert await texts(page, ".turns .bubble header b") == ["system", "user", "assistant"]
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_conversations_fit_a_phone(page: Page, tmp_path: Path) -> None:
    url = report(tmp_path)
    await page.open(url, width=400, height=800)
    for value in ("calls", "turns", "failed"):
        await page.evaluate(
            f"(() => {{ const e = document.querySelector('#conversations select'); e.value = {value!r};"
            " e.dispatchEvent(new Event('input', {bubbles: true}));"
            " document.querySelector('#conversations .entry').click(); })()"
        )
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), value
