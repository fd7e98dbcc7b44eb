"""Makes torchvision importable with a torch without CUDA.

Its wheel on PyPI is built for CUDA: without CUDA its operators do not load, and its import fails where it refers to two
of them. Declaring the two is enough, since no text model calls them. This module imports nothing heavy, since every
interpreter of the environment loads it.
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

# The declarations of a torch.library.Library end with the object.
_libraries: list[Any] = []


class TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Declares the operators at the first import of torchvision; other finders do the import itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def declare_operators() -> None:
    """Declares the operators that torchvision's import refers to, unless this torch is one its wheel was built for."""
    import torch  # imported here: loading the hook must stay cheap

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in OPERATORS:
        library.define(schema)
    _libraries.append(library)


def install() -> None:
    """Inserts the finder before all others, once."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
