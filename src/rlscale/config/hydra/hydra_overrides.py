"""Overrides of Hydra's own settings, e.g. `hydra.sweeper.n_trials=20`: finds the rejected one and suggests another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hydra.conf import HydraConf
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from rlscale.config.hydra.internals import inner_node
from rlscale.config.problems import COMMAND_LINE, nearest, show
from rlscale.errors import Problem


def failed_override(error: Exception, overrides: Sequence[str]) -> tuple[str, Problem] | None:
    """The override of a setting of Hydra that caused `error`, with its problem; None when none did."""
    if isinstance(error, MissingConfigException):
        group, _, _ = str(error.missing_cfg_file).rpartition("/")
        if not group.startswith("hydra/"):
            return None
        options = list(map(str, error.options or ()))
        return _problem_of(group, overrides, rule="be one of its options", candidates=options, listed=True)
    # The messages have no field for the key: Hydra wraps the error of OmegaConf, which names it in its text.
    cause = error.__cause__ or error
    name = re.search(r"Key '(hydra/[^']*)'", str(cause))
    path = name.group(1) if name else str(getattr(cause, "full_key", None) or "")
    if not path.startswith("hydra"):
        return None
    is_key = "Key '" in str(cause)
    rule = "be a key of Hydra" if is_key else "have a value that Hydra accepts"
    return _problem_of(path, overrides, rule=rule, candidates=list(_hydra_keys()) if is_key else [])


def _problem_of(
    path: str, overrides: Sequence[str], *, rule: str, candidates: Sequence[str], listed: bool = False
) -> tuple[str, Problem] | None:
    for override in overrides:
        name, _, value = override.partition("=")
        if name.lstrip("+~") != path:
            continue
        wrong = value if listed else path
        found = nearest(wrong, candidates, limit=2)
        fix = f"did you mean {found}?" if found else "" if listed else "remove it; Hydra's documentation lists its keys"
        fix += f"{' ' if fix else ''}options: {', '.join(candidates)}" if listed and candidates else ""
        return override, Problem(path=path, rule=rule, value=show(value), fix=fix, origin=COMMAND_LINE)
    return None


def _hydra_keys() -> Iterator[str]:
    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        for name in node:
            child = None if OmegaConf.is_missing(node, name) else inner_node(node, str(name))
            path = f"{prefix}.{name!s}"
            if child is not None:
                yield from walk(child, path)
            else:
                yield path

    yield from walk(OmegaConf.structured(HydraConf), "hydra")
