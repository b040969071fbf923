"""`generate_artifacts`: onnxruntime-training's way from a model to the graphs of a training."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from onnx import ModelProto, TensorProto, helper

from onnx_backprop.artifacts.module import LAZY_RESET, accumulation_names
from onnx_backprop.artifacts.state import ArtifactError, CheckpointState
from onnx_backprop.converters.prepare.load import infer
from onnx_backprop.converters.prepare.writing.files import check_writable, same_file, save_model, sidecars
from onnx_backprop.converters.prepare.writing.inline import inlined
from onnx_backprop.converters.training.losses import L1, MSE, BCEWithLogits, SoftmaxCrossEntropy
from onnx_backprop.converters.training.losses.compose import AnyLoss
from onnx_backprop.converters.training.optimizers import SGD, AdamW
from onnx_backprop.converters.training.optimizers import Optimizer as UpdateRule
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.converters.training.update.step import optimizer_graph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import PROTO_LIMIT
from onnx_backprop.opset.core.reading import external_files, load
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.lazy import ir

_log = logging.getLogger("onnx_backprop.artifacts")


class LossType(Enum):
    """A loss to put behind the model."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """An optimizer: AdamW (ε = 10⁻⁶, no weight decay) or plain SGD, both without clipping."""

    AdamW = 1
    SGD = 2


_LOSSES: dict[LossType, AnyLoss] = {
    LossType.MSELoss: MSE(),
    LossType.CrossEntropyLoss: SoftmaxCrossEntropy(),
    LossType.BCEWithLogitsLoss: BCEWithLogits(),
    LossType.L1Loss: L1(),
}
_OPTIMIZERS: dict[OptimType, UpdateRule] = {
    OptimType.AdamW: AdamW(epsilon=1e-6, weight_decay=0.0),
    OptimType.SGD: SGD(),
}


def generate_artifacts(
    model: ModelProto | str,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | AnyLoss = None,
    optimizer: OptimType | UpdateRule | None = None,
    artifact_directory: str | bytes | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    training_mode: bool = False,
    inline: bool = False,
    precision: str | None = None,
) -> None:
    """Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint, each behind `prefix`.

    Args:
        model: the forward model or its path.
        requires_grad: parameters to train: names, globs, regular expressions. Default: all that influence the loss.
        frozen_params: parameters to leave as they are.
        loss: a LossType, a loss of `ob.losses`, or a callable as in `training_graph`; None for a model whose output
            is its loss.
        optimizer: an OptimType or an optimizer of `ob.optimizers`; None writes no optimizer_model.onnx.
        artifact_directory: where to. Default: the current folder. Files that are there are replaced, with a warning.
        ort_format, custom_op_library: not served; refused where given.
        additional_output_names: tensors of the model to give behind the loss.
        nominal_checkpoint: write nominal_checkpoint as well, which holds names, types and shapes but no values.
        loss_input_names: the output that the loss reads, where the model has several; one name.
        training_mode: put Dropout and BatchNormalization into training mode, see `training_graph`.
        inline: leave no functions in the graphs, for runtimes before onnxruntime 1.27, see `backward`.
        precision: "bf16" for mixed precision, see `training_graph`. "fp16" is refused: between two graphs nobody would
            skip a step.

    The training model: inputs are the model's own, `target` or `labels`, the parameters, `<p>_grad.accumulation.buffer`
    and `lazy_reset_grad`; outputs the loss, the additional ones, `<p>_grad`, `<p>_grad.accumulation.out`.

    Raises: ArtifactError, a RuntimeError, for a name that is both trained and frozen, unknown names (with near
    misses), an unknown loss or optimizer, a prefix with a folder in it, files that are the model's own, or a model
    above 2 GB; what `training_graph` raises.
    """
    if ort_format or custom_op_library is not None:
        raise ArtifactError("ort_format, custom_op_library: not served. Leave them out; the artifacts are plain ONNX")
    if Path(f"{prefix}x").name != f"{prefix}x":
        raise ArtifactError(
            f"prefix: expected what the names of files begin with, got {prefix!r}. Name a folder in artifact_directory"
        )
    if isinstance(model, ModelProto) and model.ByteSize() > PROTO_LIMIT:
        raise ArtifactError("model: a ModelProto above 2 GB cannot be held in one piece. Give its path")
    if isinstance(optimizer, str) or (isinstance(optimizer, OptimType) and optimizer not in _OPTIMIZERS):
        raise ArtifactError(f"optimizer: expected an OptimType or an optimizer of onnx_backprop, got {optimizer!r}")
    if loss_input_names is not None and len(loss_input_names) != 1:
        raise ArtifactError(
            f"loss_input_names: expected one name, got {list(loss_input_names)}. A loss of several outputs is a "
            "sum, 0.7 * losses.Dice('mask') + losses.MSE('depth'), or a callable"
        )
    if precision == "fp16":
        raise ArtifactError(
            'precision: "fp16" needs a loss scale and steps that are skipped, which training_graph has. Take "bf16"'
        )
    forward = load(model)
    reads = loss_input_names[0] if loss_input_names else _only_output(forward, additional_output_names)
    try:
        graph = training_graph(
            _with_outputs(forward, additional_output_names or ()),
            loss=_LOSSES[loss] if isinstance(loss, LossType) else loss,
            trainable=requires_grad or None,
            frozen=frozen_params,
            prediction=reads,
            training_mode=training_mode,
            carry_state=True,
            precision=precision,
        )
    except InvalidArgumentError as e:
        raise ArtifactError(str(e)) from e
    folder = Path(os.fsdecode(artifact_directory) if artifact_directory is not None else Path.cwd())
    files: dict[str, ModelProto] = {
        "training_model.onnx": _accumulating(graph, additional_output_names or ()),
        "eval_model.onnx": graph.eval_model(outputs=additional_output_names or ()),
    }
    if optimizer is not None:
        rule = _OPTIMIZERS[optimizer] if isinstance(optimizer, OptimType) else optimizer
        types = {t.name: (ir.DataType(t.data_type), list(t.dims)) for t in graph.model.graph.initializer}
        files["optimizer_model.onnx"] = optimizer_graph(rule, {name: types[name] for name in graph.parameters})
    if inline:
        files = {name: inlined(proto) for name, proto in files.items()}
    state = CheckpointState.of(graph)
    checkpoints = ["checkpoint", *(["nominal_checkpoint"] if nominal_checkpoint else [])]
    paths = [folder / f"{prefix}{name}" for name in (*files, *checkpoints)]
    read = () if isinstance(model, ModelProto) else (model, *external_files(model))
    for path in paths:
        check_writable(path)
        for file in (path, *sidecars(path)):
            if any(same_file(file, one) for one in read):
                raise ArtifactError(f"{file} is a file of the model. Choose another prefix or artifact_directory")
    present = [path.name for path in paths if path.exists()]
    if present:
        _log.warning("replacing %s in %s", ", ".join(present), folder)
    for name, proto in files.items():
        save_model(proto, folder / f"{prefix}{name}")
    CheckpointState.save_checkpoint(state, folder / f"{prefix}checkpoint")
    if nominal_checkpoint:
        state.save_nominal(folder / f"{prefix}nominal_checkpoint")


def _only_output(model: ModelProto, additional: Sequence[str] | None) -> str | None:
    """The model's only output, where tensors that are made outputs would leave a choice."""
    outputs = [value.name for value in model.graph.output]
    return outputs[0] if additional and len(outputs) == 1 else None


def _with_outputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """A copy with further tensors among its outputs."""
    present = {value.name for value in model.graph.output}
    missing = [name for name in names if name not in present]
    if not missing:
        return model
    known = {value.name: value for value in infer(model).graph.value_info}
    unknown = [name for name in missing if name not in known]
    if unknown:
        raise ArtifactError(f"additional_output_names: the model has no tensor {unknown[0]!r}")
    result = copied(model)
    result.graph.output.extend(known[name] for name in missing)
    return result


def _accumulating(graph: TrainingGraph, additional: Sequence[str]) -> ModelProto:
    """The training model, with buffers that gradients are added to: out = lazy_reset_grad ? g : buffer + g."""
    model = copied(graph.model)
    types = {t.name: (t.data_type, list(t.dims)) for t in model.graph.initializer}
    listed = {value.name for value in model.graph.input}
    # frozen parameters can be exchanged between runs as well
    model.graph.input.extend(
        helper.make_tensor_value_info(name, *types[name]) for name in graph.frozen if name not in listed
    )
    model.graph.input.append(helper.make_tensor_value_info(LAZY_RESET, TensorProto.BOOL, [1]))
    kept = {graph.loss, *additional, *graph.parameters.values(), *graph.updates.values()}
    assign(model.graph.output, [value for value in model.graph.output if value.name in kept])
    for name, gradient in graph.parameters.items():
        buffer, out = accumulation_names(gradient)
        model.graph.input.append(helper.make_tensor_value_info(buffer, *types[name]))
        total = f"{gradient}.accumulation.sum"
        model.graph.node.append(helper.make_node("Add", [buffer, gradient], [total], name=total))
        flag = f"{gradient}.accumulation.reset"
        model.graph.node.append(helper.make_node("Squeeze", [LAZY_RESET], [flag], name=flag))
        model.graph.node.append(helper.make_node("Where", [flag, gradient, total], [out], name=out))
        model.graph.output.append(helper.make_tensor_value_info(out, *types[name]))
    return model
