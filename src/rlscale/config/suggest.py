"""Finds what the user most likely meant."""

from __future__ import annotations

from collections.abc import Iterable

from rapidfuzz.distance import OSA

from rlscale.config.keys import keys


def nearest(word: str, candidates: Iterable[str], *, limit: int | None = None) -> str | None:
    """The candidate with the fewest edits from `word`, transpositions counting as one; None when all are far.

    Upper case, and the ending of a YAML file, are no edits.

    Args:
        limit: edits that are not too far. None: a third of the letters.
    """
    word = word.lower().removesuffix(".yaml")
    limit = limit or max(1, len(word) // 3)
    scored = [(OSA.distance(word, candidate, score_cutoff=limit), candidate) for candidate in candidates]
    best = min(scored, default=(limit + 1, ""), key=lambda pair: pair[0])
    return best[1] if best[0] <= limit else None


def nearest_key(path: str) -> str | None:
    """The known key that `path` most likely stands for.

    Takes misspelt paths (`algo.eps_clp`), keys without or with a wrong group (`eps_clip`, `optim.eps_clip`), and names
    in the style of command-line flags (`--rollout-batch-size`, `--rollout-temperature`).
    """
    wanted = path.lstrip("-").replace("-", "_").lower()
    if wanted in keys():
        return wanted
    inside = [path for path in keys() if "." in wanted and path.endswith(f".{wanted}")]
    if len(inside) == 1:
        return inside[0]
    group, _, name = wanted.rpartition(".")
    same_name = [key.path for key in keys().values() if name in (key.name, key.flag, key.path.replace(".", "_"))]
    if same_name:
        return min(same_name, key=lambda candidate: OSA.distance(group, candidate.rpartition(".")[0]))
    if not group:
        by_name = nearest(name, [form for key in keys().values() for form in (key.name, key.path.replace(".", "_"))])
        by_path = nearest(wanted, keys())
        return by_path or next(
            (key.path for key in keys().values() if by_name in (key.name, key.path.replace(".", "_"))), None
        )
    found = nearest(wanted, keys())
    if found:
        return found
    by_name = nearest(name, [key.name for key in keys().values()])
    return next((key.path for key in keys().values() if key.name == by_name), None)
