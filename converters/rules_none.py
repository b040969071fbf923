"""Operators through which no gradient flows, and why. A missing rule is something else: that is an error."""

from __future__ import annotations

from .registry import no_gradient

no_gradient(
    "it reads the shape, not the values",
    "Shape",
    "Size",
    "ConstantOfShape",
    "EyeLike",
    "RandomNormalLike",
    "RandomUniformLike",
)
no_gradient(
    "it answers true or false",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "IsInf",
    "IsNaN",
    "Not",
    "And",
    "Or",
    "Xor",
)
no_gradient("it answers with indices", "ArgMax", "ArgMin", "NonZero")
no_gradient("it is constant almost everywhere", "Ceil", "Floor", "Round", "Sign")
