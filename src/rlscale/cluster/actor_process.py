"""Setup of every actor process: logs in the run folder, environment variables, and failures that name the actor."""

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlscale.errors import WorkerError
from rlscale.secrets import is_secret

P = ParamSpec("P")
R = TypeVar("R")


def with_actor_name(method: Callable[Concatenate[Any, P], R]) -> Any:
    """Turns any failure of a method into a WorkerError that names the actor and the moment."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except WorkerError:
            raise  # it names its worker, which may be another rank, already
        except Exception as error:
            failed_at_s = time.time()
            logging.getLogger(__name__).exception("%s failed in %s", self.name, method.__name__)
            raise WorkerError(self.name, f"{type(error).__name__}: {error}", failed_at_s=failed_at_s) from error

    return call


def log_to(folder: Path, name: str) -> None:
    """Sends this process's log records to `<folder>/<name>.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"{name.replace(' ', '_')}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def public_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of an actor's environment variables that Ray sets before the process starts. It writes them to its logs."""
    return {name: value for name, value in variables.items() if not is_secret(name)}


def set_secrets(variables: Mapping[str, str]) -> None:
    """Sets the others, in the actor itself."""
    os.environ.update({name: value for name, value in variables.items() if is_secret(name)})
