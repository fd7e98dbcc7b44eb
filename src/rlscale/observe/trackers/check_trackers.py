"""Checks enabled trackers before the run starts."""

import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from rlscale.config import LoggingConfig, WandbConfig, WandbMode
from rlscale.config.installed import is_installed
from rlscale.errors import Problem

_LOGIN_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_trackers(config: LoggingConfig) -> list[Problem]:
    """Problems of enabled trackers whose package is missing or that cannot log in."""
    problems = []
    if config.tensorboard.enabled and not is_installed("tensorboard"):
        problems.append(_not_installed("tensorboard"))
    if config.wandb.enabled and (unknown := _check_mode(config.wandb)):
        problems += unknown
    elif config.wandb.enabled and wandb_mode(config.wandb) != WandbMode.disabled:
        problems += [_not_installed("wandb")] if not is_installed("wandb") else _check_login(config.wandb)
    return problems


def wandb_mode(config: WandbConfig) -> WandbMode:
    """`logging.wandb.mode`, else the environment variable WANDB_MODE, else online."""
    given = config.mode or os.environ.get("WANDB_MODE") or WandbMode.online
    # dryrun is wandb's old name of offline.
    return WandbMode.offline if given == "dryrun" else WandbMode(given)


def _check_mode(config: WandbConfig) -> list[Problem]:
    """Checks that WANDB_MODE has a mode of `logging.wandb.mode`, where it counts."""
    given = os.environ.get("WANDB_MODE")
    known: list[str] = [*WandbMode, "dryrun"]
    if config.mode is not None or not given or given in known:
        return []
    rule, fix = f"be one of {', '.join(known)}", "correct the environment variable, or set logging.wandb.mode=online"
    return [Problem(path="WANDB_MODE", rule=rule, value=repr(given), fix=fix)]


def _not_installed(package: str) -> Problem:
    return Problem(
        path=f"logging.{package}.enabled",
        rule=f"be false if {package} is not installed",
        value="true",
        fix=f"install it: pip install 'rlscale[{package}]'",
    )


def _check_login(config: WandbConfig) -> list[Problem]:
    """Checks for a key. Without one wandb would prompt on the terminal after the run has started."""
    known = config.key or any(os.environ.get(name) for name in _LOGIN_VARIABLES)
    if wandb_mode(config) != WandbMode.online or known or _has_netrc_login(config.host):
        return []
    fix = "set the environment variable WANDB_API_KEY, run `wandb login`, or set logging.wandb.mode=offline"
    return [Problem(path="logging.wandb.key", rule="be set with mode online", value="null", fix=fix)]


def _has_netrc_login(host: str | None) -> bool:
    """True if `wandb login` stored a key. Without a host any login counts, because wandb reads it from its settings."""
    name = os.environ.get("NETRC")
    for path in [Path(name)] if name else [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]:
        try:
            hosts = netrc(str(path)).hosts
        except (OSError, NetrcParseError):
            continue
        if (urlsplit(host).hostname in hosts) if host else hosts:
            return True
    return False
