"""Converters: a forward ONNX model in, a training graph out."""

from __future__ import annotations

from .backward import backward

__all__ = ["backward"]
