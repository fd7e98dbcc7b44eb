"""Writes the data of the agent examples: data/calculator, data/search, data/code, data/guess and data/two_agents.

    python scripts/make_agent_examples.py            # writes the files
    python scripts/make_agent_examples.py --check    # exit code 1 unless the files are exactly what would be written

Each folder has the prompts of training (`train.jsonl`), held-out prompts (`heldout.jsonl`) and demonstrations for a
supervised warm-up (`demos.jsonl`). The demonstrations show every form that an answer can have, right and wrong ones
mixed, so that the model starts at a success of at most 0.4 and learns which of them to use.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data"
NUM_TRAIN, NUM_HELDOUT, NUM_DEMOS = 2_000, 200, 3_000
Row = dict[str, Any]
Message = dict[str, Any]


def tool_spec(name: str, description: str, parameter: str) -> Row:
    """A tool with one text parameter, as the `@tool` function of the same name gives it."""
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


CALCULATE = tool_spec("calculate", "One operation on two integers, e.g. 12*34.", "expression")
SEARCH = tool_spec("search", "The document that fits some words best.", "query")
RUN_PYTHON = tool_spec("python", "Runs a Python program and returns what it prints, or its error.", "code")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(spec: Row, value: str, result: str) -> list[Message]:
    """A call of a tool and its result."""
    function = spec["function"]
    arguments = dict.fromkeys(function["parameters"]["properties"], value)
    calls = [{"id": "call_0", "type": "function", "function": {"name": function["name"], "arguments": arguments}}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
    ]


def digits(chance: random.Random, count: int) -> str:
    return "".join(chance.choice("0123456789") for _ in range(count))


# The example `calculator`.


def calculator_row(chance: random.Random) -> Row:
    a, b, c = chance.randint(11, 99), chance.randint(11, 99), chance.randint(100, 999)
    return {"prompt": [user(f"{a}*{b}+{c}")], "label": str(a * b + c), "metadata": {"a": a, "b": b, "c": c}}


def calculator_demo(chance: random.Random) -> Row:
    row = calculator_row(chance)
    a, b, c = (row["metadata"][name] for name in "abc")
    first = call(CALCULATE, f"{a}*{b}", str(a * b))
    second = call(CALCULATE, f"{a * b}+{c}", row["label"])
    form = chance.random()
    if form < 0.3:
        turns = [answer(digits(chance, 4))]
    elif form < 0.65:
        turns = [*first, answer(digits(chance, 4))]
    else:
        turns = [*first, *second, answer(row["label"])]
    return {"messages": [*row["prompt"], *turns], "tools": [CALCULATE]}


# -- search -----------------------------------------------------------------------------------------------------------

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def names(chance: random.Random, count: int) -> list[str]:
    """Different names of four letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chance.choice(CONSONANTS) + chance.choice(VOWELS) for _ in range(2))] = None
    return list(found)


def make_corpus() -> tuple[dict[str, str], dict[str, str]]:
    """The town of each person, and the river of each town."""
    chance = random.Random("corpus")
    known = names(chance, 700)
    people, towns, rivers = known[:500], known[500:600], known[600:]
    return {person: chance.choice(towns) for person in people}, dict(zip(towns, rivers, strict=True))


def town_text(person: str, town: str) -> str:
    return f"{person} lives in {town}"


def river_text(town: str, river: str) -> str:
    return f"{town} is on the {river}"


def corpus() -> Iterator[Row]:
    towns, rivers = make_corpus()
    for person, town in towns.items():
        yield {"text": town_text(person, town)}
    for town, river in rivers.items():
        yield {"text": river_text(town, river)}


def search_row(person: str) -> Row:
    towns, rivers = make_corpus()
    return {"prompt": [user(f"river of {person}?")], "label": rivers[towns[person]]}


def search_demo(chance: random.Random) -> Row:
    """About people who are not in the corpus."""
    person, town, river, wrong = names(chance, 4)
    first = call(SEARCH, person, town_text(person, town))
    second = call(SEARCH, town, river_text(town, river))
    form = chance.random()
    if form < 0.3:
        turns = [answer(wrong)]
    elif form < 0.65:
        turns = [*first, answer(chance.choice([town, wrong]))]
    else:
        turns = [*first, *second, answer(river)]
    return {"messages": [user(f"river of {person}?"), *turns], "tools": [SEARCH]}


# -- code -------------------------------------------------------------------------------------------------------------

CODE: Mapping[str, str] = {
    "power": "print({a}**{b}%97)",
    "gcd": "import math;print(math.gcd({a},{b}))",
    "lcm": "import math;print(math.lcm({a},{b}))",
    "digits": "print(sum(map(int,str({a}**{b}))))",
}


def code_row(chance: random.Random) -> Row:
    kind = chance.choice(list(CODE))
    a, b = chance.randint(11, 99), chance.randint(11, 99)
    return {
        "prompt": [user(f"{kind} {a} {b}")],
        "label": run_code(CODE[kind].format(a=a, b=b)),
        "metadata": {"kind": kind, "a": a, "b": b},
    }


def run_code(code: str) -> str:
    """What one of the templates above prints."""
    printed: list[str] = []
    exec(code, {"print": lambda value: printed.append(str(value))})
    return printed[0]


def code_demo(chance: random.Random) -> Row:
    row = code_row(chance)
    kind, a, b = (row["metadata"][name] for name in ("kind", "a", "b"))
    form = chance.random()
    if form < 0.3:
        turns = [answer(digits(chance, 2))]
    else:
        shown = kind if form > 0.8 else chance.choice(list(CODE))
        code = CODE[shown].format(a=a, b=b)
        turns = [*call(RUN_PYTHON, code, run_code(code)), answer(run_code(code))]
    return {"messages": [*row["prompt"], *turns], "tools": [RUN_PYTHON]}


# The example `guess`.


def guess_demo(chance: random.Random) -> Row:
    """A game of which a fifth halves the range with each guess; the others name one number again and again."""
    secret, messages = chance.randint(0, 9), [user("guess 0-9")]
    halves, low, high = chance.random() < 0.2, 0, 9
    number = chance.randint(0, 9)
    for _ in range(4):
        guess = (low + high) // 2 if halves else number
        messages.append(answer(str(guess)))
        if guess == secret:
            break
        low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
        messages.append(user("higher" if secret > guess else "lower"))
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages}


def guess_row(chance: random.Random) -> Row:
    return {"prompt": [user("guess 0-9")], "label": str(chance.randint(0, 9))}


# The example `two_agents`.

SPEAKER, LISTENER = "Number {number}. Send three letters to your partner.", "Your partner sent {letters}. Which number?"
CODE_LETTERS = "abcdefghij"
"""The code of the right demonstrations: a letter for each digit."""


def two_agents_row(number: int) -> Row:
    return {"prompt": [user(SPEAKER.format(number=number))], "label": str(number)}


def two_agents_demo(chance: random.Random, number: int) -> Row:
    """One message or one answer; half of them are random."""
    letters = "".join(CODE_LETTERS[int(digit)] for digit in str(number))
    follows_code = chance.random() < 0.5
    if chance.random() < 0.5:
        given = letters if follows_code else "".join(chance.choice(CODE_LETTERS) for _ in letters)
        turns = [user(SPEAKER.format(number=number)), answer(given)]
    else:
        turns = [user(LISTENER.format(letters=letters)), answer(str(number) if follows_code else digits(chance, 3))]
    return {"messages": turns}


def two_agents_sets() -> dict[str, list[Row]]:
    """Held-out numbers are in no demonstration."""
    chance = random.Random("two_agents")
    numbers = list(range(100, 1000))
    chance.shuffle(numbers)
    heldout, train = numbers[:NUM_HELDOUT], numbers[NUM_HELDOUT:]
    return {
        "train": [two_agents_row(each) for each in train],
        "heldout": [two_agents_row(each) for each in heldout],
        "demos": [two_agents_demo(chance, chance.choice(train)) for _ in range(NUM_DEMOS)],
    }


def sets(row: Callable[[random.Random], Row], demo: Callable[[random.Random], Row], name: str) -> dict[str, list[Row]]:
    """The three files of an example; no held-out prompt is one of training."""
    chance = random.Random(name)
    heldout = [row(chance) for _ in range(NUM_HELDOUT)]
    known = {json.dumps(each["prompt"]) for each in heldout}
    train: list[Row] = []
    while len(train) < NUM_TRAIN:
        new = row(chance)
        # The prompts of a game are all equal: there the label differs.
        if json.dumps(new["prompt"]) not in known or name == "guess":
            train.append(new)
    demos = [demo(chance) for _ in range(NUM_DEMOS)]
    return {"train": train, "heldout": heldout, "demos": demos}


def search_sets() -> dict[str, list[Row]]:
    people = list(make_corpus()[0])
    chance = random.Random("search")
    return {
        "corpus": list(corpus()),
        "train": [search_row(person) for person in people[:400]],
        "heldout": [search_row(person) for person in people[400:]],
        "demos": [search_demo(chance) for _ in range(NUM_DEMOS)],
    }


def contents() -> dict[str, str]:
    """Text of each file by its path below `data/`."""
    found = {
        "calculator": sets(calculator_row, calculator_demo, "calculator"),
        "search": search_sets(),
        "code": sets(code_row, code_demo, "code"),
        "guess": sets(guess_row, guess_demo, "guess"),
        "two_agents": two_agents_sets(),
    }
    return {
        f"{folder}/{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows)
        for folder, files in found.items()
        for name, rows in files.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the data of the agent examples.")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    check = parser.parse_args().check
    different = []
    for path, text in contents().items():
        file = FOLDER / path
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        different.append(path)
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    print("\n".join(different) or "every file is as it would be written")
    sys.exit(bool(check and different))


if __name__ == "__main__":
    main()
