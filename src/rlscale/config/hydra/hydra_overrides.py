"""Words for Hydra itself, e.g. `hydra.sweeper.n_trials=20`: which of them it refused, and what it would have taken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hydra.conf import HydraConf
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from rlscale.config.errors import COMMAND_LINE, nearest, show
from rlscale.errors import Problem


def wrong_word(error: Exception, words: Sequence[str]) -> tuple[str, Problem] | None:
    """The word for Hydra that caused `error`, and what is wrong with it; None when it was none of them."""
    if isinstance(error, MissingConfigException):
        group, _, _ = str(error.missing_cfg_file).rpartition("/")
        if not group.startswith("hydra/"):
            return None
        options = list(map(str, error.options or ()))
        return _told(group, words, rule="be one of its options", candidates=options, listed=True)
    cause = error.__cause__ or error
    name = re.search(r"Key '(hydra/[^']*)'", str(cause))
    path = name.group(1) if name else str(getattr(cause, "full_key", None) or "")
    if not path.startswith("hydra"):
        return None
    is_key = "Key '" in str(cause)
    rule = "be a key of Hydra" if is_key else "have a value that Hydra takes"
    return _told(path, words, rule=rule, candidates=list(_hydra_keys()) if is_key else [])


def _told(
    path: str, words: Sequence[str], *, rule: str, candidates: Sequence[str], listed: bool = False
) -> tuple[str, Problem] | None:
    for word in words:
        name, _, value = word.partition("=")
        if name.lstrip("+~") != path:
            continue
        wrong = value if listed else path
        found = nearest(wrong, candidates, limit=2)
        fix = (
            f"did you mean {found}?"
            if found
            else ""
            if listed
            else "leave it out; Hydra's documentation lists its keys"
        )
        fix += f"{' ' if fix else ''}options: {', '.join(candidates)}" if listed and candidates else ""
        return word, Problem(path=path, rule=rule, value=show(value), fix=fix, origin=COMMAND_LINE)
    return None


def _hydra_keys() -> Iterator[str]:
    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        for name in node:
            child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
            path = f"{prefix}.{name!s}"
            if isinstance(child, DictConfig) and not child._is_none():
                yield from walk(child, path)
            else:
                yield path

    yield from walk(OmegaConf.structured(HydraConf), "hydra")
