"""What a model says about the training graph that it is, read from its metadata and believed only as far as it fits."""

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from reprlib import Repr
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from onnx import ModelProto, TypeProto, helper

from onnx_backprop.converters.training.slots import MEAN, MOMENT, ROLES, SUM, Slot, of_format_1
from onnx_backprop.opset.core.errors import InvalidModelError

METADATA = "onnx_backprop.training"  # key of the model's metadata that holds what a TrainingGraph says about it
FORMAT = 2
_STATE_OF_FORMAT_1 = {"updates": dict[str, str], "fill": dict[str, float], "copies": dict[str, str]}
OPTIONAL: Mapping[str, Any] = {
    "input_gradients": {},
    "optional": [],
}  # left out where they are empty, and by earlier versions
_SETTINGS = (
    ("loss_inputs", tuple[str, ...], "names"),
    ("labels", dict[str, dict[str, int | tuple[int | None, ...] | None]], "numbers by name"),
    ("compared", tuple[dict[str, str | int | bool | None], ...], "records of a prediction and a target"),
    ("blocks", dict[str, int], "numbers by name"),
    ("doubtful", dict[str, str], "reasons by name"),
    ("memory", dict[str, int | float], "numbers by name"),
    ("frozen_statistics", tuple[str, ...], "names"),
)
_short = Repr()
_short.maxlist = _short.maxdict = 3
_shown = _short.repr
_LARGEST = 65504  # that a state may be full of, which every type of float has
_SMALL = 16  # elements of a state that may be larger than every tensor of the model


def described(text: str, model: ModelProto, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TrainingGraph, of the types that `hints` gives them; InvalidModelError for anything else."""
    hints = {"format": int, **hints, "state": tuple[dict[str, Any], ...]}
    fields = _object(text, hints, _wrong)
    version = fields.get("format")
    if type(version) is int and version not in (1, FORMAT):
        raise InvalidModelError("the training graph was written by a later version. Install that one")
    if version == 1:
        del hints["state"]
        hints |= _STATE_OF_FORMAT_1
    fields = _typed(fields, hints, _wrong, OPTIONAL)
    if fields.pop("format") == 1:
        updates, fill, copies = (fields.pop(name) for name in _STATE_OF_FORMAT_1)
        fields["state"] = of_format_1(updates, fill, copies, fields["parameters"])
    else:
        fields["state"] = tuple(slot(entry, _wrong) for entry in fields["state"])
    _check_settings(fields["settings"])
    _check_names(fields, model)
    _check_shapes(fields, model)
    return fields


def slot(entry: Mapping[str, Any], make_error: Callable[[str], Exception]) -> Slot:
    """A record of the state, from its values in JSON."""
    fields = _typed(dict(entry), get_type_hints(Slot), make_error, {"start": None, "of": ""})
    if fields["role"] not in ROLES:
        raise make_error(f"state: role: expected one of {', '.join(ROLES)}, got {_shown(fields['role'])}")
    return Slot(**fields)


def optimizer_state(text: str, make_error: Callable[[str], Exception]) -> tuple[str, tuple[Slot, ...]]:
    """What an optimizer model says: the name of its learning rate, and the records of its state.

    What `make_error` makes of anything else is raised.
    """
    hints: dict[str, Any] = {"learning_rate": str, "state": tuple[dict[str, Any], ...]}
    fields = _object(text, hints, make_error)
    if "state" in fields:
        fields = _typed(fields, hints, make_error)
        return fields["learning_rate"], tuple(slot(entry, make_error) for entry in fields["state"])
    fields = _typed(fields, {"learning_rate": str, **_STATE_OF_FORMAT_1}, make_error)  # by an earlier version
    updates, fill, copies = (fields[name] for name in _STATE_OF_FORMAT_1)
    parameters = [name for name in updates if name not in fill and name not in copies]
    return fields["learning_rate"], of_format_1(updates, fill, copies, parameters)


def _object(text: str, names: Iterable[str], make_error: Callable[[str], Exception]) -> dict[str, Any]:
    try:
        fields = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as e:
        raise make_error(f"it is no JSON: {e}") from e
    if not isinstance(fields, dict):
        raise make_error(f"expected {', '.join(names)}, got {_shown(fields)}")
    return fields


def _typed(
    fields: dict[str, Any],
    hints: Mapping[str, Any],
    make_error: Callable[[str], Exception],
    optional: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """optional: what stands for entries that are not there."""
    fields = {**(optional or {}), **fields}
    if fields.keys() != hints.keys():
        raise make_error(f"expected {', '.join(hints)}, got {_shown(sorted(fields))}")
    for name, hint in hints.items():
        if not _fits(fields[name], hint):
            raise make_error(f"{name}: expected {getattr(hint, '__name__', hint)}, got {_shown(fields[name])}")
        if get_origin(hint) is tuple:
            fields[name] = tuple(fields[name])
    return fields


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
    return type(value) in {str: (str,), int: (int,), bool: (bool,), NoneType: (NoneType,)}[hint]


def _check_settings(settings: Mapping[str, Any]) -> None:
    """What is read of them: the steps of an update, the inputs of the loss, its labels, the one it ignores."""
    optimizer = settings.get("optimizer") or {}
    steps = optimizer.get("accumulate", 1) if isinstance(optimizer, dict) else None
    if type(steps) is not int or steps < 1:
        raise _wrong(f"settings: optimizer: expected accumulate of 1 or more, got {_shown(optimizer)}")
    loss = settings.get("loss")
    if isinstance(loss, dict) and not _fits(loss.get("ignore_index"), int | None):
        raise _wrong(f"settings: loss: expected ignore_index of a label or null, got {_shown(loss)}")
    if isinstance(loss, dict) and not _fits(loss.get("weights"), str | None):
        raise _wrong(f"settings: loss: expected weights of a name or null, got {_shown(loss)}")
    for name, hint, expected in _SETTINGS:
        if not _fits(settings.get(name), hint | None):
            raise _wrong(f"settings: {name}: expected {expected}, got {_shown(settings[name])}")


def _check_names(fields: Mapping[str, Any], model: ModelProto) -> None:
    """Every name is that of an input, an output or an initializer, as it is said to be."""
    inputs = {value.name for value in model.graph.input}
    outputs = {value.name for value in model.graph.output}
    tensors = {tensor.name for tensor in model.graph.initializer}
    state: tuple[Slot, ...] = fields["state"]
    renewed, stored = [slot.name for slot in state], [slot for slot in state if slot.start is None]

    def check(field: str, names: Iterable[str | None], known: Iterable[str], what: str) -> None:
        unknown = sorted({name for name in names if name is not None}.difference(known))
        if unknown:
            raise _wrong(f"{field}: expected names of {what}, got {_shown(unknown[0])}")

    check("loss, gradient_norms", (fields["loss"], fields["gradient_norms"]), outputs, "outputs")
    check("inputs, learning_rate", (*fields["inputs"], fields["learning_rate"]), inputs, "inputs")
    check("optional", fields["optional"], inputs & tensors, "inputs with defaults")
    check("target", [fields["target"]], fields["inputs"], "inputs")
    check("parameters", fields["parameters"], tensors, "initializers")
    if not state:
        check("parameters", fields["parameters"].values(), outputs, "outputs")
    check("input_gradients", fields["input_gradients"], fields["inputs"], "inputs")
    check("input_gradients", fields["input_gradients"].values(), outputs, "outputs")
    check("state", renewed, inputs, "inputs")
    check("state", (slot.output for slot in state), outputs, "outputs")
    check("state", (slot.of if slot.role == MEAN else slot.name for slot in stored), tensors, "initializers")
    check("state", (slot.of for slot in state if slot.role in (MOMENT, SUM)), {*fields["parameters"], ""}, "parameters")
    if len({*renewed}) < len(renewed):
        raise _wrong("state: expected each name once")


def _check_shapes(fields: Mapping[str, Any], model: ModelProto) -> None:
    """The loss is one number, and the state no larger than what the file itself has to hold."""
    declared = {value.name: value.type for value in (*model.graph.input, *model.graph.output)}
    norms, largest = fields["gradient_norms"], max((prod(t.dims) for t in model.graph.initializer), default=0)
    if set(_lengths(declared[fields["loss"]])) - {1}:
        raise _wrong(f"loss: expected an output of one number, got one of shape {_lengths(declared[fields['loss']])}")
    if norms is not None and _lengths(declared[norms]) != [len(fields["parameters"])]:
        raise _wrong(f"gradient_norms: expected a number for each parameter, got {_lengths(declared[norms])}")
    rate = fields["learning_rate"]
    state = {slot.name: slot for slot in fields["state"]}
    for name in (*state, *fields["inputs"], *filter(None, [rate])):
        if declared[name].tensor_type.elem_type not in helper.get_all_tensor_dtypes():
            raise _wrong(f"state, inputs, learning_rate: expected tensors, {name!r} is none")
    if rate is not None and _lengths(declared[rate]) not in ([], [1]):
        raise _wrong(f"learning_rate: expected an input of one number, got one of shape {_lengths(declared[rate])}")
    for name, slot in state.items():
        lengths = _lengths(declared[name])
        if (slot.start is not None and min(lengths, default=0) < 0) or prod(lengths) > max(largest, _SMALL):
            raise _wrong(
                f"state: expected known lengths, and no more of them than of a parameter, {name!r} has {lengths}"
            )


def _lengths(declared: TypeProto) -> list[int]:
    """The lengths of a tensor, -1 where one is unknown."""
    return [dim.dim_value if dim.HasField("dim_value") else -1 for dim in declared.tensor_type.shape.dim]
