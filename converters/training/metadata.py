"""What a model says about the training graph that it is, read from its metadata and believed only as far as it fits."""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from types import NoneType
from typing import Any, get_args, get_origin

from onnx import ModelProto, TypeProto, helper

from onnx_backprop.opset.core.errors import InvalidModelError

METADATA = "onnx_backprop.training"  # key of the model's metadata that holds what a TrainingGraph says about it
FORMAT = 1
OPTIONAL: Mapping[str, Any] = {"input_gradients": {}}  # left out where they are empty, and by earlier versions
_LARGEST = 65504  # that a state may be full of, which every type of float has
_SMALL = 16  # elements of a state that may be larger than every tensor of the model


def described(text: str, model: ModelProto, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TrainingGraph, of the types that `hints` gives them; InvalidModelError for anything else."""
    said = fields(text, {"format": int, **hints}, _wrong, OPTIONAL)
    if said.pop("format") != FORMAT:
        raise InvalidModelError("the training graph was written by a later version. Install that one")
    _check_settings(said["settings"])
    _check_names(said, model)
    _check_shapes(said, model)
    return said


def fields(
    text: str, hints: Mapping[str, Any], wrong: Callable[[str], Exception], optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An object of JSON with exactly these entries, of these types; what `wrong` makes of anything else is raised.

    optional: what stands for entries that are not there.
    """
    try:
        said = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as e:
        raise wrong(f"it is no JSON: {e}") from e
    said = {**(optional or {}), **said} if isinstance(said, dict) else said
    if not isinstance(said, dict) or said.keys() != hints.keys():
        got = sorted(said) if isinstance(said, dict) else said
        raise wrong(f"expected {', '.join(hints)}, got {reprlib.repr(got)}")
    for name, hint in hints.items():
        if not _fits(said[name], hint):
            raise wrong(f"{name}: expected {getattr(hint, '__name__', hint)}, got {reprlib.repr(said[name])}")
        if get_origin(hint) is tuple:
            said[name] = tuple(said[name])
    return said


def no_number(text: str) -> None:
    """Refuse NaN and Infinity, which JSON does not have and Python's reader takes."""
    raise ValueError(f"{text} is no number of JSON")


def _wrong(what: str) -> InvalidModelError:
    return InvalidModelError(f"the model's metadata entry {METADATA!r} describes no training graph: {what}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is one of a type; lists are tuples there, and keys strings anyway."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is tuple:
        return isinstance(value, list) and all(_fits(entry, arguments[0]) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(entry, arguments[1]) for entry in value.values())
    if arguments:  # of a union
        return any(_fits(value, choice) for choice in arguments)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= _LARGEST
    return type(value) in {str: (str,), int: (int,), NoneType: (NoneType,)}[hint]


def _check_settings(settings: Mapping[str, Any]) -> None:
    """What is read of them: the steps of an update, the inputs of the loss, its labels, and the one that it ignores."""
    optimizer = settings.get("optimizer") or {}
    steps = optimizer.get("accumulate", 1) if isinstance(optimizer, dict) else None
    if type(steps) is not int or steps < 1:
        raise _wrong(f"settings: optimizer: expected accumulate of 1 or more, got {reprlib.repr(optimizer)}")
    if not _fits(settings.get("loss_inputs", []), tuple[str, ...]):
        raise _wrong(f"settings: loss_inputs: expected names, got {reprlib.repr(settings['loss_inputs'])}")
    loss = settings.get("loss")
    if isinstance(loss, dict) and not _fits(loss.get("ignore_index"), int | None):
        raise _wrong(f"settings: loss: expected ignore_index of a label or null, got {reprlib.repr(loss)}")
    if not _fits(settings.get("labels", {}), dict[str, dict[str, int | tuple[int | None, ...] | None]]):
        raise _wrong(f"settings: labels: expected numbers by name, got {reprlib.repr(settings['labels'])}")


def _check_names(said: Mapping[str, Any], model: ModelProto) -> None:
    """Every name is that of an input, an output or an initializer, as it is said to be."""
    inputs = {value.name for value in model.graph.input}
    outputs = {value.name for value in model.graph.output}
    tensors = {tensor.name for tensor in model.graph.initializer}
    updates, copies, fill = said["updates"], said["copies"], said["fill"]

    def check(field: str, names: Iterable[str | None], known: Iterable[str], what: str) -> None:
        unknown = sorted({name for name in names if name is not None}.difference(known))
        if unknown:
            raise _wrong(f"{field}: expected names of {what}, got {reprlib.repr(unknown[0])}")

    check("loss, gradient_norms", (said["loss"], said["gradient_norms"]), outputs, "outputs")
    check("inputs, learning_rate", (*said["inputs"], said["learning_rate"]), inputs, "inputs")
    check("target", [said["target"]], said["inputs"], "inputs")
    check("parameters", said["parameters"], tensors, "initializers")
    if not updates:
        check("parameters", said["parameters"].values(), outputs, "outputs")
    check("input_gradients", said["input_gradients"], said["inputs"], "inputs")
    check("input_gradients", said["input_gradients"].values(), outputs, "outputs")
    check("updates", updates, inputs, "inputs")
    check("updates", updates.values(), outputs, "outputs")
    check("updates", updates.keys() - copies.keys() - fill.keys(), tensors, "initializers")
    check("copies, fill", (*copies, *fill), updates, "the state")
    check("copies", copies.values(), tensors, "initializers")


def _check_shapes(said: Mapping[str, Any], model: ModelProto) -> None:
    """The loss is one number, and the state no larger than what the file itself has to hold."""
    declared = {value.name: value.type for value in (*model.graph.input, *model.graph.output)}
    norms, largest = said["gradient_norms"], max((prod(t.dims) for t in model.graph.initializer), default=0)
    if set(_lengths(declared[said["loss"]])) - {1}:
        raise _wrong(f"loss: expected an output of one number, got one of shape {_lengths(declared[said['loss']])}")
    if norms is not None and _lengths(declared[norms]) != [len(said["parameters"])]:
        raise _wrong(f"gradient_norms: expected a number for each parameter, got {_lengths(declared[norms])}")
    rate = said["learning_rate"]
    for name in (*said["updates"], *said["inputs"], *filter(None, [rate])):
        if declared[name].tensor_type.elem_type not in helper.get_all_tensor_dtypes():
            raise _wrong(f"updates, inputs, learning_rate: expected tensors, {name!r} is none")
    if rate is not None and _lengths(declared[rate]) not in ([], [1]):
        raise _wrong(f"learning_rate: expected an input of one number, got one of shape {_lengths(declared[rate])}")
    for name in said["updates"]:
        lengths = _lengths(declared[name])
        if (name in said["fill"] and min(lengths, default=0) < 0) or prod(lengths) > max(largest, _SMALL):
            raise _wrong(
                f"updates: expected known lengths, and no more of them than of a parameter, {name!r} has {lengths}"
            )


def _lengths(declared: TypeProto) -> list[int]:
    """The lengths of a tensor, -1 where one is unknown."""
    return [dim.dim_value if dim.HasField("dim_value") else -1 for dim in declared.tensor_type.shape.dim]
