"""Loading of the user's functions that training calls. Each worker imports them itself, by the path in the config.

A parameter `custom` of such a function gets the config's node of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar, cast

from rlscale.config.groups.custom import with_custom
from rlscale.config.user_functions import load_hook

NO_CUSTOM: Mapping[str, Any] = MappingProxyType({})

Hook = TypeVar("Hook")

_import = cache(load_hook)


def load_user_function(
    key: str, path: str, protocol: Callable[..., Hook], *, custom: Mapping[str, Any] = NO_CUSTOM
) -> Hook:
    """The function that a key of the config names, as a function of the protocol.

    Args:
        key: e.g. `algo.custom_loss_function_path`.
        path: `package.module:name`.
        protocol: type of the function, for the type checker; the signature is checked by the key.
        custom: the config's node `custom`.

    Raises:
        ConfigError: the function is missing or its signature is another.
    """
    return cast(Hook, with_custom(_import(key, path), custom))
