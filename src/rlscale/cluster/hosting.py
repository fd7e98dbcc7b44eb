"""What every actor process needs: logs in the run folder, and failures stamped with a name and a time."""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlscale.errors import WorkerError

P = ParamSpec("P")
R = TypeVar("R")


def stamped(method: Callable[Concatenate[Any, P], R]) -> Any:
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
