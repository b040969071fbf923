"""Quantised files with other weights: `requantize`, and `merge_adapter` for weights that adapters change."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, helper

from onnx_backprop.converters.finetune.lora import LoraModel
from onnx_backprop.converters.quantized.dequantize import walked
from onnx_backprop.converters.quantized.requantize import put_floats, requantized
from onnx_backprop.converters.quantized.walk import Walk, is_quantized
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.mapped import whole_if_possible
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.walk import all_nodes


def requantize(
    trained: ModelProto | ir.Model | str | Path,
    original: ModelProto | ir.Model | str | Path,
    *,
    calibration: Iterable[Any] | None = None,
) -> ModelProto:
    """The quantised model `original` with the weights of `trained`, each rounded to the same kind of integers.

        trainer.export("trained.onnx")  # trained from ob.dequantize("model.int8.onnx")
        onnx.save(ob.requantize("trained.onnx", "model.int8.onnx", calibration=batches), "trained.int8.onnx")

    Args:
        trained: the float model from `dequantize` of the original, with other weights.
        original: the quantised model. Neither is changed.
        calibration: batches of the model's inputs, as mappings by name or sequences in their order; further entries,
            such as targets, are ignored. The scales and zero points of computed values are set anew, from the least and
            the largest number in the trained float model. Without calibration they stay, with a warning that names
            some. Files whose runs compute these scales need none.

    Weights: s = max |w| / levels for each scale if zero is the middle of the range, with the original's levels (127, or
    64 if it has 7 bits), else s = (max - min) / levels, z rounded, with 0 in between. Tensors with a common scale keep
    one: it fits the largest. A bias of int32 gets the product of its input's and its weight's scale; a weight's scale
    grows if the bias would not fit. Floats of the original, including running statistics, come from `trained`.

    Errors: InvalidArgumentError for weights that are missing or of another shape, calibration without a batch or with
    other inputs, or a model that is not quantised.
    """
    return whole_if_possible(_rounded(load(trained, mapped=True), original, calibration))


def merge_adapter(
    adapted: LoraModel,
    values: Mapping[str, np.ndarray],
    *,
    floats: bool = False,
    calibration: Iterable[Any] | None = None,
) -> ModelProto:
    """The base of `adapted` with W + (alpha / rank)·A·B for each W, without extra nodes or inputs.

        adapted = ob.lora("model.int8.onnx", ["w_quantized"], rank=2)
        options = {"trainable": adapted.trainable, "optimizer": "adamw", "straight_through": True}
        trainer = ob.Trainer(ob.training_graph(adapted.model, loss="mse", **options))
        trainer.fit(batches, epochs=3)
        onnx.save(ob.merge_adapter(adapted, trainer.parameters(), calibration=batches), "tuned.int8.onnx")

    A base of integers gets integers again: the sum is computed in floats and rounded with scales that fit it, as by
    `requantize`. With floats=True the result is the float model that `dequantize` makes of it.

    Args:
        adapted: a result of `lora`. It is not changed.
        values: of its adapters and other initializers, as `Trainer.parameters()` gives them.
        floats: whether a base of integers becomes one of floats.
        calibration: as `requantize` takes it.

    Errors: as `LoraModel.merge`, `dequantize` and `requantize`; InvalidArgumentError for integers that nodes read in
    several ways of which an adapter changes one, such as an embedding that is also the head.
    """
    return whole_if_possible(merged_by_reference(adapted, values, floats=floats, calibration=calibration))


def merged_by_reference(
    adapted: LoraModel,
    values: Mapping[str, np.ndarray],
    *,
    floats: bool = False,
    calibration: Iterable[Any] | None = None,
) -> ModelProto:
    """`merge_adapter`, but floats of what lies in files are computed when somebody reads them, as `save_model` does."""
    if not isinstance(adapted, LoraModel):
        raise InvalidArgumentError(f"adapted: expected what lora has made, got {type(adapted).__name__}")
    if not any(map(is_quantized, all_nodes(adapted.base))):
        return adapted.by_reference(values)
    walk = walked(adapted.base)
    names = {weight.stored.name: weight.name for weight in walk.weights.values() if weight.stored is not None}
    other, moved = adapted.onto(walk.floats, names, values)
    merged = other.by_reference(moved)
    if floats:
        return merged
    kept = {tensor.name for tensor in merged.graph.initializer}
    if parted := [stored for stored, name in names.items() if name not in kept]:
        raise InvalidArgumentError(
            f"the integers {parted[0]!r} are read in several ways, of which an adapter changes one; they would have to "
            "become two tensors. floats=True writes these, or leave the weight out of `targets`"
        )
    return _rounded(merged, adapted.base, calibration)


def _rounded(
    trained: ModelProto, original: ModelProto | ir.Model | str | Path, calibration: Iterable[Any] | None
) -> ModelProto:
    walk = walked(original)
    ranges = {} if calibration is None else _measured(walk, trained, calibration)
    _warn(walk, ranges, calibrated=calibration is not None)
    return requantized(walk, trained, ranges)


def _warn(walk: Walk, ranges: Mapping[str, tuple[float, float]], *, calibrated: bool) -> None:
    """Say which scales of activations stay."""
    fixed = [one for one in walk.activations.values() if one.values and ranges.keys().isdisjoint(one.values)]
    if fixed:
        shown = ", ".join(repr(one.values[0]) for one in fixed[:3])
        inside = "They are inside branches or loops, which calibration does not measure"
        warn(
            f"the scales of values that runs compute stay those of the original ({len(fixed)}): {shown}"
            f"{', …' if len(fixed) > 3 else ''}. What training has moved beyond them is cut. "
            f"{inside if calibrated else 'calibration=[…] takes them anew from batches of data'}"
        )


def _measured(walk: Walk, trained: ModelProto, calibration: Iterable[Any]) -> dict[str, tuple[float, float]]:
    """The least and the largest number of each value that the file has a scale for."""
    from onnx_backprop.ort_ops import session  # not before: it needs a runtime

    model = copied(walk.floats)
    put_floats(model, trained)
    wanted = list(dict.fromkeys(name for one in walk.activations.values() for name in one.values))
    if not wanted:
        return {}
    outputs = {value.name for value in model.graph.output}
    inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    produced = {name for node in model.graph.node for name in node.output}  # those of branches no run gives out
    computed = [name for name in wanted if name in produced]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in computed if name not in outputs)
    runs = session(model, kernels=None)
    fed = [value.name for value in runs.get_inputs()]
    ranges: dict[str, tuple[float, float]] = {}
    if isinstance(calibration, str | bytes) or not isinstance(calibration, Iterable):
        raise InvalidArgumentError(f"calibration: expected batches of arrays, got {calibration!r}")
    batches = [calibration] if isinstance(calibration, Mapping) else calibration
    count = 0
    for count, batch in enumerate(batches, 1):
        feeds = _feeds(batch, fed)
        dtypes = {name: helper.tensor_dtype_to_np_dtype(inputs[name]) for name in fed}
        feeds = {name: np.asarray(feeds[name]).astype(dtypes[name], copy=False) for name in fed}
        results = dict(zip(computed, runs.run(computed, feeds), strict=True)) if computed else {}
        for name in wanted:
            array = np.asarray(results[name] if name in results else feeds.get(name, np.zeros(0)))
            if not np.isfinite(array).all():
                raise InvalidArgumentError(
                    f"calibration: {name!r} is not finite on it, in batch {count - 1}. Take other data or an earlier "
                    "model"
                )
            if array.size:
                low, high = ranges.get(name, (0.0, 0.0))
                ranges[name] = (min(low, float(array.min())), max(high, float(array.max())))
    if not count:
        raise InvalidArgumentError("calibration: expected at least one batch, got none")
    return ranges


def _feeds(batch: Any, names: list[str]) -> dict[str, Any]:
    """A batch by the names of the model's inputs."""
    if not isinstance(batch, Mapping | list | tuple):
        raise InvalidArgumentError(
            f"calibration: expected batches as mappings by name or sequences of arrays, got {type(batch).__name__}"
        )
    feeds = dict(batch) if isinstance(batch, Mapping) else dict(zip(names, batch, strict=False))
    missing = [name for name in names if name not in feeds]
    if missing:
        raise InvalidArgumentError(f"calibration: expected arrays {', '.join(names)}; {missing[0]!r} is missing")
    return feeds
