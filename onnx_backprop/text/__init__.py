"""Language models: texts as batches, the files around a model, adapters that onnxruntime-genai loads.

May import `training`, `adapters` and what lies below them. Needs the extra `text`: pip install "onnx-backprop[text]".
"""

from onnx_backprop.text.batches import TextBatches, windows
from onnx_backprop.text.examples import read_examples
from onnx_backprop.text.folder import ModelFolder, projections
from onnx_backprop.text.templates import TEMPLATES
from onnx_backprop.text.tokenizer import IGNORED, Tokenizer, Tokens

__all__ = [
    "IGNORED",
    "TEMPLATES",
    "ModelFolder",
    "TextBatches",
    "Tokenizer",
    "Tokens",
    "projections",
    "read_examples",
    "windows",
]


def __dir__() -> list[str]:
    return list(__all__)
