"""Grader of instructions that a program can check, of IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833).

The checks are those of the library if-verifiable. Some of them split sentences and words with data of NLTK; the library
downloads what is missing when it is imported, which a grader must not do.
"""

from functools import cache
from typing import Any

from rlscale.types import Sample

NLTK_DATA = ("punkt_tab", "stopwords", "averaged_perceptron_tagger_eng")
"""Data of NLTK that some instructions need."""


def ifbench_reward(sample: Sample) -> float:
    """1 if the response follows all instructions of the row, else 0 (the strict score of a prompt).

    The row's metadata has `instruction_id_list`, and `kwargs`: one object for each instruction, or one for all. Keys
    that an instruction does not use are ignored. The chain of thought before `</think>` is no part of the response.

    Raises:
        ValueError: the row has no instructions, or one that the library does not know.
        LookupError: an instruction needs data of NLTK that are not installed.
    """
    row = sample.prompt.metadata
    names = row.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        rule = "have instruction_id_list, a list of names, in its metadata"
        raise ValueError(f"the row must {rule}, got {names!r}; set data.metadata_key, or correct the data")
    answer = sample.answer.rsplit("</think>", 1)[-1].strip()
    arguments = _arguments(row.get("kwargs"), len(names))
    checks = [_follows(str(name), given, answer) for name, given in zip(names, arguments, strict=True)]
    return float(bool(answer) and all(checks))


def _follows(name: str, given: dict[str, Any], answer: str) -> bool:
    checks = _load_checks()
    if name not in checks:
        raise ValueError(f"the instruction must be one of IFEval or IFBench, got {name!r}; correct the data")
    check = checks[name](name)
    keys = check.get_instruction_args_keys()
    # The library chooses missing arguments at random.
    missing = [key for key in keys if key not in given]
    if missing:
        raise ValueError(f"the instruction {name} must have kwargs {', '.join(missing)}, got none; correct the data")
    check.build_description(**{key: given[key] for key in keys})
    try:
        return bool(answer and check.check_following(answer))
    except LookupError as error:
        if type(error) is not LookupError:  # a KeyError, for example
            raise
        command = f"python -m nltk.downloader {' '.join(NLTK_DATA)}"
        raise LookupError(f"the instruction {name} needs data of NLTK; run {command}") from None


def _arguments(given: Any, count: int) -> list[dict[str, Any]]:
    """Arguments of each instruction, without the null values that Parquet files add."""
    entries = given if isinstance(given, list) else [given] * count
    if len(entries) != count:
        raise ValueError(f"the row must have kwargs for each of its {count} instructions, got {len(entries)}")
    wrong = next((entry for entry in entries if not isinstance(entry, dict | None)), None)
    if wrong is not None:
        raise ValueError(f"the row must have kwargs that are objects, got {wrong!r}; correct the data")
    return [{k: v for k, v in (entry or {}).items() if v is not None} for entry in entries]


@cache
def _load_checks() -> dict[str, Any]:
    # Imported here: the libraries are optional, and take two seconds.
    import langdetect  # type: ignore[import-untyped]
    import nltk  # type: ignore[import-untyped]

    langdetect.DetectorFactory.seed = 0  # else the language of a short text is random
    download, nltk.download = nltk.download, lambda *args, **kwargs: False
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL
    finally:
        nltk.download = download
    # Each name is of one of the two.
    return {**IFEVAL, **IFBENCH}
