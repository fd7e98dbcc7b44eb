from pathlib import Path

import pytest

from rlscale.rewards.code_place import describe_exception, find_place, place_in_dump
from rlscale.rewards.message_frames import MAX_MESSAGE_BYTES, pack_frame

OWN = str(Path(describe_exception.__code__.co_filename))
DUMP = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/deep.py", line 9 in load
  File "/home/user/my_reward.py", line 8 in score
  File "{own}", line 99 in _call
"""


def test_the_place_is_the_innermost_line_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    json_file = str(Path(__import__("json").__file__))
    frames = [(OWN, 1, "_call"), (f"{tmp_path}/mine.py", 3, "score"), (f"{tmp_path}/mine.py", 7, "parse")]
    assert find_place(frames) == "mine.py:7 in parse"
    assert find_place([*frames, (json_file, 300, "loads")]) == "mine.py:7 in parse"
    assert find_place([(OWN, 1, "_call"), (json_file, 300, "loads")]) == f"{json_file}:300 in loads"
    assert find_place([(OWN, 1, "_call")]) == ""


def test_the_place_of_a_crash_is_read_from_the_dump() -> None:
    assert place_in_dump(DUMP.format(own=OWN)).endswith(":9 in load")
    assert place_in_dump(DUMP.format(own=OWN).replace("/usr/lib/deep.py", OWN)) == "/home/user/my_reward.py:8 in score"
    assert place_in_dump("") == ""


def test_an_exception_whose_text_fails_is_described() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    try:
        raise Broken
    except Broken as error:
        cause, place, text = describe_exception(error)
    assert "Broken" in cause and place.startswith("") and "raise Broken" in text


def test_a_long_cause_is_cut() -> None:
    cause = describe_exception(ValueError("\ud83d" + "x" * 3000))[0]
    assert cause == "ValueError: \\ud83d" + "x" * 1987 + " [1013 more characters are cut off]"


def test_a_frame_has_its_length_first() -> None:
    assert pack_frame(b"abc") == b"\0\0\0\3abc"
    assert MAX_MESSAGE_BYTES < 2**32
