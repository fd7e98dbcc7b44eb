"""Checks of engines that run once for prefill and once for decode servers, each with its size and arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

from rlscale.config.rules.conditions import server_groups
from rlscale.config.rules.rule import Check
from rlscale.config.run_config import RunConfig
from rlscale.config.server_groups import SIZE, ServerGroup, view_group
from rlscale.errors import Problem

FILE_KEY = "sglang.config"
SIZE_KEY = "cluster.rollout_num_gpus_per_engine"


def for_each_group(check: Check) -> Check:
    """A check of the engines of each server group, or of all engines of a run without groups.

    A problem of both groups is reported once.
    """

    @wraps(check)
    def check_groups(config: RunConfig) -> list[Problem]:
        groups = server_groups(config)
        if not groups:
            return check(config)
        file = config.sglang.config
        found = [(group, problem) for group in groups for problem in check(view_group(config, group))]
        texts = [str(problem) for _, problem in found]
        has_sizes = len({group.num_gpus_per_engine for group in groups}) > 1
        own = [
            _name_group(problem, group, file, has_sizes=has_sizes)
            for group, problem in found
            if texts.count(str(problem)) == 1
        ]
        return own + list({str(problem): problem for _, problem in found if texts.count(str(problem)) > 1}.values())

    return check_groups


def size_path(group: ServerGroup) -> str:
    """Key with the size of the engines of a group, if the groups have different sizes."""
    return f"sglang.server_groups.{group.role}.{SIZE}"


def _name_group(problem: Problem, group: ServerGroup, file: str | None, *, has_sizes: bool) -> Problem:
    named = replace(problem, value=f"{problem.value} for {group.role} servers in {file}")
    if not has_sizes:
        return named
    named = replace(named, rule=problem.rule.replace(SIZE_KEY, SIZE), fix=problem.fix.replace(SIZE_KEY, SIZE))
    return replace(named, path=size_path(group), origin=FILE_KEY) if problem.path == SIZE_KEY else named
