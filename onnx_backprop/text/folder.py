"""`ModelFolder`: a language model with the files around it, as onnxruntime-genai reads and writes them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.adapters import save_adapter
from onnx_backprop.converters.finetune.linear import Layers
from onnx_backprop.converters.prepare.load import unfolded
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import external_files
from onnx_backprop.text.templates import TEMPLATES
from onnx_backprop.text.tokenizer import CONFIG, Tokenizer, read_json

_BESIDE = {"chat_template.jinja", "config.json", "generation_config.json", "special_tokens_map.json"}
_BESIDE |= {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}


class ModelFolder:
    """A folder of onnxruntime-genai's model builder, or an ONNX file with a tokenizer.json beside it.

    path: the folder. model: the ONNX file of the decoder.
    """

    def __init__(self, path: str | Path) -> None:
        """Errors: InvalidArgumentError for a folder without one model, or with a decoder in several files."""
        given = Path(path)
        self.path = given if given.is_dir() else given.parent
        decoder = read_json(self.path / CONFIG).get("model", {}).get("decoder", {})
        if not given.is_dir():
            self.model = given
            return
        if "pipeline" in decoder:
            raise InvalidArgumentError(f"{given}: the decoder is a pipeline of several files. Name one of them")
        named = [given / decoder["filename"]] if "filename" in decoder else sorted(given.glob("*.onnx"))
        if len(named) != 1 or not named[0].is_file():
            names = ", ".join(file.name for file in named) or "no .onnx file"
            raise InvalidArgumentError(f"{given}: expected {CONFIG} or one .onnx file, got {names}. Name the file")
        (self.model,) = named

    def tokenizer(self, file: str | Path | None = None, *, begins: bool | None = None) -> Tokenizer:
        """That of the folder, or of a file, for this model; InvalidArgumentError where there is none."""
        return Tokenizer(file or self.path, config=self.path / CONFIG, begins=begins)

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads, as the configuration says."""
        length = read_json(self.path / CONFIG).get("model", {}).get("context_length")
        return length if isinstance(length, int) else None

    def write(
        self,
        target: str | Path,
        model: ModelProto,
        adapters: Mapping[str, Mapping[str, np.ndarray]] | None = None,
        *,
        template: str | None = None,
    ) -> None:
        """Write a folder like this one, with another model and with adapters by name, as <name>.onnx_adapter.

        model: `lora(…).model`, whose adapters are inputs with defaults that change nothing, or a merged one. Other
        files of the folder are copied. template: the name of the one that was trained, which becomes the chat template;
        default: that of the folder stays. onnxruntime-genai loads the folder by `og.Model`, an adapter by
        `og.Adapters(model).load(file, name)`. Errors: InvalidArgumentError for this folder itself, or one that cannot
        be written.
        """
        target = Path(target)
        if template is not None and template not in TEMPLATES:
            raise InvalidArgumentError(f"expected one of {', '.join(TEMPLATES)}, got {template!r}", "template")
        if target.resolve() == self.path.resolve():
            raise InvalidArgumentError(f"{target} is the folder of the model. Name another one")
        model_files = {self.model.resolve(), *(Path(file).resolve() for file in external_files(str(self.model)))}
        whole = (self.path / CONFIG).is_file()  # else anything may be beside the model
        around = [file for file in self.path.iterdir() if file.is_file() and file.resolve() not in model_files]
        around = [file for file in around if whole or file.name in _BESIDE]
        try:
            target.mkdir(parents=True, exist_ok=True)
            for file in around:
                shutil.copyfile(file, target / file.name)
            if template is not None:
                _write_template(target, TEMPLATES[template].jinja())
        except OSError as e:
            raise InvalidArgumentError(f"cannot write {target}: {e.strerror or e}") from e
        save_model(model, target / self.model.name)
        for name, values in (adapters or {}).items():
            save_adapter(values, target / f"{name}.onnx_adapter")


def _write_template(folder: Path, source: str) -> None:
    """Where transformers and onnxruntime-genai look for it: in a file of its own, and in an older configuration."""
    (folder / "chat_template.jinja").write_text(source, "utf-8")
    file = folder / "tokenizer_config.json"
    if "chat_template" in (about := read_json(file)):
        file.write_text(json.dumps(about | {"chat_template": source}, indent=2, ensure_ascii=False), "utf-8")


def projections(model: ModelProto | ir.Model | str | Path) -> list[str]:
    """The matrices that a language model multiplies by, except that of the logits, as `targets` of `lora`.

    These are the weights of Gemm, MatMul and MatMulNBits in the main graph. That of the logits is the one with as many
    columns as there are logits, if the file says how many, else the last.
    Errors: InvalidArgumentError for a model without any.
    """
    layers = Layers(unfolded(model))
    linears = [layer for node in layers.graph.node if (layer := layers.linear(node)) is not None]
    shapes = [value.type.tensor_type.shape.dim for value in layers.graph.output]
    classes = {shape[-1].dim_value for shape in shapes[:1] if shape and shape[-1].dim_value}
    last = [layer for layer in linears if layer.dims[layer.output_axis] in classes] or linears[-1:]
    heads = {layer.weight.tensor for layer in last}
    names = dict.fromkeys(layer.weight.tensor for layer in linears if layer.weight.tensor not in heads)
    if not names:
        raise InvalidArgumentError("model: expected one that multiplies by matrices. Name weights as targets")
    return list(names)
