"""Tables of graded answers: what a reward must be follows from its definition, not from its code.

The rows of `deepscaler`, `math` and `dapo` have answers that are right and wrong for a label. Those of `f1` have the
numbers of common words and of words in both texts. A template of `gpqa` chooses the letter X, and Y stands for another
one. The first row of `ifbench` has instructions by letter, and each of the next the letters of those that a response
follows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import RewardConfig, RewardType
from rlscale.rewards import load_reward
from rlscale.types import Prompt, Sample

TABLES = Path(__file__).parents[2] / "data/graded"
MIN_ANSWERS = 200


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TABLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def graded(name: str) -> list[tuple[str, str, bool]]:
    """Answer, label, and whether it is right."""
    return [
        (answer, row["label"], is_right)
        for row in rows(name)
        for is_right in (True, False)
        for answer in row["right" if is_right else "wrong"]
    ]


def reward_of(kind: str, response: str, label: str | None, metadata: dict[str, Any] | None = None) -> Any:
    prompt = Prompt(index=0, text="?", token_ids=(1,), label=label, metadata=metadata or {})
    sample = Sample(index=0, group_index=0, prompt=prompt, seed=0, response=response)
    value: Any = load_reward(RewardConfig(type=RewardType(kind)))(sample)
    return value


def differing(cases: list[tuple[str, Any, Any]], grade: Callable[[str, Any], Any]) -> list[tuple[str, Any, Any, Any]]:
    """The cases whose reward is another one: answer, label, reward found, reward expected."""
    assert len(cases) >= MIN_ANSWERS
    return [(a, b, found, value) for a, b, value in cases if (found := grade(a, b)) != pytest.approx(value)]


@pytest.mark.slow
def test_deepscaler() -> None:
    cases = [(answer, label, float(is_right)) for answer, label, is_right in graded("deepscaler")]
    assert not differing(
        cases, lambda a, b: reward_of("deepscaler", rf"<think>\boxed{{13}}</think>It is \boxed{{{a}}}.", b)
    )


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"<think>x</think>\boxed{7}", 1.0),
        (r"###Response \boxed{7}", 1.0),
        (r"\boxed{7}", 0.0),  # no end of the chain of thought
        (r"<think>\boxed{7}", 0.0),
        (r"<think>\boxed{7}</think> 7", 0.0),  # no box after it
        (r"a</think>\boxed{8}</think>\boxed{7}", 1.0),
        (r"###Response \boxed{8} ###Response \boxed{7}", 0.0),
        (r"</think>\boxed{7", 0.0),
    ],
)
def test_deepscaler_reads_the_box_after_the_chain_of_thought(response: str, value: float) -> None:
    assert reward_of("deepscaler", response, "7") == value
    assert reward_of("boxed_deepscaler", response, "7") == float(r"\boxed{7}" in response)


@pytest.mark.slow
def test_math() -> None:
    cases = [(answer, label, float(is_right)) for answer, label, is_right in graded("math")]
    assert not differing(cases, lambda a, b: reward_of("math", rf"So it is \boxed{{{a}}}.", b))


def test_dapo() -> None:
    cases = [(answer, label, 1.0 if is_right else -1.0) for answer, label, is_right in graded("dapo")]
    assert not differing(cases, lambda a, b: reward_of("dapo", f"{'thinking ' * 50}\n{a}", b)["score"])


def test_dapo_returns_its_values_by_name() -> None:
    assert reward_of("dapo", "Answer: 3 cm", "3") == {"score": 1.0, "acc": True, "pred": "3"}
    assert reward_of("dapo", "three", "3") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert reward_of("dapo", "Answer: 3\n" + "x" * 300, "3")["score"] == -1.0
    assert reward_of("boxed_dapo", r"\boxed{4} no \boxed{3}", "3")["score"] == 1.0
    assert reward_of("boxed_dapo", "Answer: 3", "3")["score"] == -1.0


def test_f1() -> None:
    table = [(r["response"], r["label"], r["common"], sum(r["words"])) for r in rows("f1")]
    cases = [(response, label, 2 * common / total) for response, label, common, total in table]
    assert not differing(cases, lambda a, b: reward_of("f1", a, b))
    assert reward_of("boxed_f1", r"not this \boxed{red house}", "the red house") == 1.0


def test_gpqa() -> None:
    cases: list[tuple[str, Any, Any]] = []
    for row in rows("gpqa"):
        if "template" not in row:
            cases.append((row["response"], row["label"], float(row["reward"])))
            continue
        for letter, other in zip("ABCD", "CDAB", strict=True):
            lower = row["template"].replace("x", letter.lower()) if row["template"] in ("x", "answer: x") else None
            text = lower or row["template"].replace("X", letter).replace("Y", other)
            cases += [(text, label, float(label == letter)) for label in "ABCD"]
    assert not differing(cases, lambda a, b: reward_of("gpqa", a, b))


@pytest.mark.slow
def test_ifbench() -> None:
    (head, *table) = rows("ifbench")
    names = dict(zip(head["names"], zip(head["instructions"], head["kwargs"], strict=True), strict=True))
    cases: list[tuple[str, Any, Any]] = []
    for row in table:
        if "follows" in row:
            cases += [(row["response"], ([i], [k]), float(name in row["follows"])) for name, (i, k) in names.items()]
        else:
            instructions = (row["instructions"], row["kwargs"])
            cases += [(answer, instructions, 1.0) for answer in row["right"]]
            cases += [(answer, instructions, 0.0) for answer in row["wrong"]]
    assert not differing(
        cases, lambda a, b: reward_of("ifbench", a, None, {"instruction_id_list": b[0], "kwargs": b[1]})
    )


CHOICES = ["red light", "blue light", "no light"]


@pytest.mark.parametrize(
    ("response", "label", "metadata", "value"),
    [
        ("Answer: B", "blue light", {"choices": CHOICES}, 1.0),
        ("Answer: A", "blue light", {"choices": CHOICES}, 0.0),
        ("Answer: B", "Blue light.", {"choices": dict(enumerate(CHOICES))}, 1.0),
        ("it is blue light", "B", {"choices": CHOICES}, 1.0),
        ("blue light or no light", "B", {"choices": CHOICES}, 0.0),
        ("Answer: C", "anything", {"correct_letter": "c"}, 1.0),
        ("Answer: N", "N", {"valid_letters": ["M", "N"]}, 1.0),
        ("the mitochondrion, I think", "mitochondrion", {}, 1.0),
        ("the nucleus, I think", "mitochondrion", {}, 0.0),
    ],
)
def test_gpqa_with_the_choices_of_a_row(response: str, label: str, metadata: dict[str, Any], value: float) -> None:
    assert reward_of("gpqa", response, label, metadata) == value


@pytest.mark.parametrize(
    ("kind", "label", "metadata", "message"),
    [
        ("deepscaler", None, {}, "must have a label"),
        ("deepscaler", " ", {}, "the label must be an answer"),
        ("dapo", "1/2", {}, "the label must be an integer, got '1/2'"),
        ("dapo", None, {}, "must have a label"),
        ("f1", None, {}, "must have a label"),
        ("f1", "A", {}, "the label must have a word that is no article, got 'A'; use reward=exact_match"),
        ("gpqa", "A", {"valid_letters": 4}, "valid_letters must be a list of letters, got 4"),
        (
            "ifbench",
            None,
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": "x"},
            "the row must have kwargs that are objects, got 'x'",
        ),
        ("gpqa", "Z", {}, "the label must be one of A, B, C"),
        ("gpqa", " ", {}, "the label must be a letter or a text, got ''"),
        ("gpqa", "green", {"choices": CHOICES}, "must be a letter or one of the row's choices, got 'green'"),
        ("ifbench", None, {}, "the row must have instruction_id_list"),
        ("ifbench", None, {"instruction_id_list": ["no:such"]}, "must be one of IFEval or IFBench, got 'no:such'"),
        (
            "ifbench",
            None,
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keyword": "x"}]},
            "keywords:existence must have kwargs keywords",
        ),
        ("ifbench", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "for each of its 1"),
    ],
)
def test_wrong_data_is_a_failure_and_no_zero(
    kind: str, label: str | None, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reward_of(kind, r"</think>\boxed{1} Answer: 1", label, metadata)


@pytest.mark.parametrize("kind", ["math", "deepscaler", "dapo", "f1", "gpqa"])
def test_no_response_gets_a_zero_for_an_empty_label(kind: str) -> None:
    # Else those without an answer would stay in the group, and the others would leave it.
    with pytest.raises(ValueError, match="the label must"):
        reward_of(kind, "I do not know", "")


def test_answers_that_repeat_without_end_are_wrong() -> None:
    # Of a policy that repeats a token up to its limit: a response that is graded, not a failure of the grader.
    digits, boxes = "7" * 5000, r"\boxed{" * 30_000
    assert reward_of("boxed_deepscaler", rf"\boxed{{{digits}}}", "7") == 0.0
    assert reward_of("boxed_deepscaler", rf"\boxed{{{digits}}}", digits) == 1.0
    assert reward_of("deepscaler", f"</think>{boxes}", "7") == 0.0
    assert reward_of("boxed_deepscaler", rf"\boxed{{7}}{boxes}", "7") == 1.0
