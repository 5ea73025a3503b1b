"""What launches kernels, registered as custom operators of PyTorch: torch.compile traces past them, knowing shapes and what is mutated.

Eager code calls the plain function, since PyTorch's dispatcher would cost microseconds a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

NAMESPACE = "inference_service"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def custom_op(fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function under its own name. Its annotations give the schema; no result may share memory with an argument.

    `fake` takes the same arguments and gives results of the right shape, dtype and strides without computing them; `mutates` names the
    arguments that are written to.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        traced: Any = getattr(getattr(torch.ops, NAMESPACE), name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = (traced if torch.compiler.is_compiling() else function)(*args, **kwargs)
            return result

        return call

    return register


def nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an operator that only writes to its arguments."""
