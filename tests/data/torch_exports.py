"""Small exports of BERT, a ViT and a ResNet by both exporters of PyTorch: python -m tests.data.torch_exports

Writes tests/data/exports/: the files, without what says where in the source a node comes from, and `parameters.json`, the
names and the sums of the parameters of each module. Needs torch, torchvision and transformers.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

from onnx_backprop.opset.graphs.edit import assign
from tests.field.torch_sources import torchvision

FOLDER = Path(__file__).parent / "exports"
KEPT = ("pkg.torch.onnx.name_scopes", "pkg.onnxscript.optimizer.folded_from")
KEPT += ("pkg.torch.export.graph_signature.InputSpec.kind", "pkg.torch.export.ExportedProgram.graph_signature")


def modules() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each module and its inputs, with every parameter away from its first value."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torchvision()
    resnet = import_module("torchvision.models.resnet")
    torch.manual_seed(0)
    bert = transformers.BertConfig(
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=5,
        num_labels=3,
    )
    vit = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=4,
        patch_size=2,
        num_labels=3,
    )
    result = {
        "bert": (transformers.BertForSequenceClassification(bert), {"input_ids": torch.randint(0, 17, (2, 5))}),
        "vit": (transformers.ViTForImageClassification(vit), {"pixel_values": torch.randn(2, 3, 4, 4)}),
        "resnet": (_resnet(resnet), {"x": torch.randn(2, 3, 16, 16)}),
    }
    for module, _ in result.values():
        for parameter in module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return result


def _resnet(library: Any) -> Any:
    """A ResNet of two stages of a block each, with width 4."""
    torch = import_module("torch")
    net = library.ResNet(library.BasicBlock, [1, 1, 1, 1], num_classes=3)
    net.conv1, net.bn1 = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4)
    net.layer1 = torch.nn.Sequential(library.BasicBlock(4, 4))
    down = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 1, stride=2, bias=False), torch.nn.BatchNorm2d(6))
    net.layer2 = torch.nn.Sequential(library.BasicBlock(4, 6, stride=2, downsample=down))
    net.layer3 = net.layer4 = torch.nn.Identity()
    net.fc = torch.nn.Linear(6, 3)
    return net


class _Logits(import_module("torch").nn.Module):
    """Gives the logits of a model of transformers, with the names of its parameters."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        for name, child in module.named_children():
            setattr(self, name, child)
        self._forward = type(module).forward
        self._whole = [module]  # no child of this one

    def forward(self, *inputs: Any) -> Any:
        result = self._whole[0](*inputs)
        return getattr(result, "logits", result)


def write() -> None:
    torch = import_module("torch")
    FOLDER.mkdir(exist_ok=True)
    sums: dict[str, dict[str, float]] = {}
    for name, (module, feeds) in modules().items():
        module.eval()
        sums[name] = {key: float(p.detach().double().sum()) for key, p in module.named_parameters()}
        wrapped = module if name == "resnet" else _Logits(module)
        for exporter in ("dynamo", "torchscript"):
            path = FOLDER / f"{name}_{exporter}.onnx"
            settings: dict[str, Any] = {"input_names": list(feeds), "output_names": ["logits"]}
            if exporter == "dynamo":
                axes = tuple({0: torch.export.Dim.DYNAMIC} for _ in feeds)
                shapes = (axes,) if name != "resnet" else axes  # of *inputs
                settings |= {"dynamo": True, "verbose": False, "optimize": name != "resnet", "dynamic_shapes": shapes}
            else:
                settings |= {"dynamic_axes": {key: {0: "batch"} for key in (*feeds, "logits")}}
                settings |= {"dynamo": False, "opset_version": 17, "do_constant_folding": name != "resnet"}
                if name == "resnet":
                    settings["training"] = torch.onnx.TrainingMode.TRAINING
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(wrapped, tuple(feeds.values()), str(path), **settings)
            model = onnx.load(path)
            for holder in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input):
                assign(holder.metadata_props, [entry for entry in holder.metadata_props if entry.key in KEPT])
            for node in model.graph.node:
                node.ClearField("doc_string")
            stored = {tensor.name for tensor in model.graph.initializer}
            assign(model.graph.value_info, [value for value in model.graph.value_info if value.name in stored])
            path.with_name(path.name + ".data").unlink(missing_ok=True)
            onnx.save(model, path)
    (FOLDER / "parameters.json").write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    write()
