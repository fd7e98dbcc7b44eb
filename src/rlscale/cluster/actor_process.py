"""Set-up of an actor process: logs in the run folder, secrets, and errors with the actor's name and a time."""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlscale.errors import WorkerError
from rlscale.secrets import is_secret

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def named_failures(name: str, method: str) -> Iterator[None]:
    """Turns a failure inside into a WorkerError with the actor's name and the time, and logs its traceback."""
    try:
        yield
    except WorkerError:
        raise  # it already names its worker, which may be another rank
    except Exception as error:
        failed_at_s = time.time()
        logging.getLogger(__name__).exception("%s failed in %s", name, method)
        raise WorkerError(name, f"{type(error).__name__}: {error}", failed_at_s=failed_at_s) from error


def with_actor_name(method: Callable[Concatenate[Any, P], R]) -> Any:
    """Applies `named_failures` to a method of an actor with the attribute `name`."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with named_failures(self.name, method.__name__):
            return method(self, *args, **kwargs)

    return call


def log_to(folder: Path, name: str) -> None:
    """Writes this process's log records to `<folder>/<name>.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"{name.replace(' ', '_')}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # `force` replaces the handlers that Ray has already installed.
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def public_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that Ray may set before an actor's process starts: no secrets, as Ray writes them to its logs."""
    return {name: value for name, value in variables.items() if not is_secret(name)}


def set_secret_env(variables: Mapping[str, str]) -> None:
    """Sets the secret variables in the actor's own process."""
    os.environ.update({name: value for name, value in variables.items() if is_secret(name)})
