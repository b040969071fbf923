"""Importing this module registers every gradient rule; one line a family."""

from __future__ import annotations

from . import (
    rules_activation,
    rules_conv,
    rules_elementwise,
    rules_indexing,
    rules_loss,
    rules_matmul,
    rules_none,
    rules_norm,
    rules_pool,
    rules_reduce,
    rules_resize,
    rules_shape,
)

__all__ = [
    "rules_activation",
    "rules_conv",
    "rules_elementwise",
    "rules_indexing",
    "rules_loss",
    "rules_matmul",
    "rules_none",
    "rules_norm",
    "rules_pool",
    "rules_reduce",
    "rules_resize",
    "rules_shape",
]
