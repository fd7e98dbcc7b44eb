"""Lets torchvision be imported beside a torch without CUDA.

Its wheel on PyPI is built for CUDA: there its operators do not load, and its import then fails where it refers to two
of them. Declaring the two is enough, because no text model calls them. Imports nothing heavy: this module is loaded by
every interpreter of the environment.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_kept: list[Any] = []  # a torch.library.Library declares for as long as it lives


class TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Declares the operators at the first import of torchvision and leaves the import itself to the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def declare_operators() -> None:
    """Declares the operators that torchvision's import refers to, unless this torch is one its wheel was built for."""
    import torch  # only now: the hook itself must cost nothing

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in OPERATORS:
        library.define(schema)
    _kept.append(library)


def install() -> None:
    """Puts the finder before all others. May be called again."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
