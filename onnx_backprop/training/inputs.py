"""What a step is fed, checked before anything runs: names, element types, shapes, classes."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, TensorShapeProto, helper, numpy_helper

from onnx_backprop.converters.training.names import CLASSES_FIRST, CLASSES_LAST, failed_shape_check
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.distributed.shards import Shard
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError, warn
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.shapes import Dims, describe
from onnx_backprop.training.data.loaders import flattened
from onnx_backprop.training.divergence import BadBatchError, bad_batch

OrtValue = onnxruntime.OrtValue
_WHOLE = (
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.INT16,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.BOOL,
)


class Inputs:
    """The inputs of a training graph that every step must be fed, and what fits them.

    labels: those that hold classes: how many there are, the label that counts nowhere, and the shape of the labels if
    the classes of the prediction are on its last axis after all.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        declared = {value.name: value.type.tensor_type for value in graph.model.graph.input}
        self.required = graph.inputs
        tensors = {tensor.name: tensor for tensor in graph.model.graph.initializer}
        self._defaults = {name: numpy_helper.to_array(tensors[name]) for name in graph.optional}
        self.names = (*graph.inputs, *self._defaults)
        self._types = {name: declared[name].elem_type for name in self.names}
        if strings := [name for name, kind in self._types.items() if kind == TensorProto.STRING]:
            raise InvalidArgumentError(
                f"{strings[0]!r} holds strings, which no step is fed. Cut the model behind what makes them numbers"
            )
        self._shapes = {
            name: declared_dims(declared[name].shape) if declared[name].HasField("shape") else None
            for name in self.names
        }
        self._targets = graph.options.loss_inputs
        self._free = [name for name in self.names if name not in self._targets]
        self._warned: set[str] = set()  # inputs of which a warning has been given
        self.labels = {name: known for name, known in graph.options.labels.items() if name in self.names}

    def named(self, batch: Any) -> dict[str, Any]:
        """A batch of a loader by names: a mapping, or a sequence in the order of the inputs, perhaps nested."""
        if isinstance(batch, Mapping):
            return batch if isinstance(batch, Shard) else dict(batch)
        arrays = flattened(batch, self.required) if isinstance(batch, tuple | list) else None
        if arrays is None:
            count = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise InvalidArgumentError(
                f"a batch must be a mapping or a sequence of {len(self.required)} arrays "
                f"({', '.join(self.required)}), got {type(batch).__name__}{count}"
            )
        return arrays

    def together(self, given: Sequence[Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """A batch that is given as a mapping, by keywords, or both; or as arrays in the order of the inputs.

        The latter as arguments of their own or as one tuple or list, which is never an array itself; those that are
        left may come by keywords. Errors: InvalidArgumentError for too many arrays, or one that is given twice.
        """
        if len(given) == 1 and (given[0] is None or isinstance(given[0], Mapping)):
            batch = {} if given[0] is None else given[0]  # an empty shard stays one
            return type(batch)({**batch, **more}) if isinstance(batch, Shard) else {**batch, **more}
        arrays = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if len(arrays) > len(self.names):
            raise InvalidArgumentError(f"expected {', '.join(self.names)}, got {len(arrays)} arrays. Leave some out")
        named = dict(zip(self.names, arrays, strict=False))
        if twice := [name for name in named if name in more]:
            raise InvalidArgumentError(f"{twice[0]!r} is given twice: by its place and by its name. Leave one out")
        return {**named, **more}

    def check_loader(self, loader: Any) -> None:
        """What can be told of a loader before it is gone through: all of `Batches`, the first batch of a sequence."""
        from onnx_backprop.training.data.batches import Batches  # which a module of PyTorch has no use for

        if isinstance(loader, Batches):
            for batch in loader.samples():
                self.checked(batch)
            for name in self.labels:
                if isinstance(
                    labels := loader.arrays[name], np.ndarray
                ):  # those in files are checked when they are read
                    self._check_classes(name, labels)
        elif isinstance(loader, Sequence) and len(loader):
            first = self.named(loader[0])
            if not isinstance(first, Shard) or first.rows:
                self.checked(first)
        elif not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise InvalidArgumentError(
                f"loader: expected batches to go through, anew in every epoch, got {type(loader).__name__}: as a list, "
                "a DataLoader, or onnx_backprop.Batches"
            )

    def ort_values(self, given: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, OrtValue]:
        """A batch as onnxruntime takes it; errors as `checked`."""
        return {name: self._ort_value(name, value) for name, value in self.checked(given, without).items()}

    def _ort_value(self, name: str, value: np.ndarray | OrtValue) -> OrtValue:
        if isinstance(value, OrtValue):
            return value
        array = np.ascontiguousarray(value).reshape(value.shape)
        if self._types[name] == TensorProto.BFLOAT16:
            return OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
        return OrtValue.ortvalue_from_numpy(array)

    def checked(self, given: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, np.ndarray | OrtValue]:
        """A batch in the types of the inputs. without: inputs that it need not have.

        Errors: InvalidArgumentError for names that are missing or unknown, arrays of another kind, other shapes than
        the graph declares, in which equal symbols are equal lengths, no rows, and labels of classes that there are not.
        """
        self.check_names(given, without)
        fed = {name: self._typed(name, given[name]) for name in self.names if name in given}
        self.check_shapes({name: _shape(value) for name, value in fed.items()})
        fed = {name: fed[name] if name in fed else self._defaults[name] for name in self.names if name not in without}
        if fed and not rows(fed[first := next(iter(fed))]):
            raise InvalidArgumentError(f"{first!r}: expected a batch of 1 row or more, got none. Leave it out")
        for name in self.labels:
            if isinstance(labels := fed.get(name), np.ndarray):
                self._check_classes(name, labels)
        return fed

    def fault(self, what: str, given: Mapping[str, Any], *, nan_alone: bool = False) -> BadBatchError | None:
        """The error about a loss that is no finite number, where a batch explains it; see `bad_batch`."""
        return bad_batch(what, self.checked(given), self.labels, nan_alone=nan_alone)

    def check_names(self, given: Mapping[str, Any], without: Collection[str] = ()) -> None:
        """InvalidArgumentError for names that are missing or unknown."""
        unknown = [name for name in given if name not in self.names]
        missing = [name for name in self.required if name not in given and name not in without]
        expected = f"expected {', '.join(self.required)}"
        expected += f" and perhaps {', '.join(self._defaults)}" if self._defaults else ""
        if unknown:
            instead = f". Did you mean {', '.join(map(repr, missing))}?" if len(unknown) == len(missing) else ""
            advice = near(unknown[0], missing) or instead or ". Leave it out"
            raise InvalidArgumentError(f"{expected}, got {unknown[0]!r}{advice}")
        if missing:
            raise InvalidArgumentError(f"{expected}; {', '.join(map(repr, missing))} missing")

    def _typed(self, name: str, value: Any) -> np.ndarray | OrtValue:
        if isinstance(value, OrtValue):
            return value
        dtype = helper.tensor_dtype_to_np_dtype(self._types[name])
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as e:  # rows of different lengths, a tensor on another device
            raise InvalidArgumentError(f"{name!r}: expected an array, got {type(value).__name__}: {e}") from e
        if array.dtype == dtype:
            return array
        if array.dtype == np.uint8 and dtype.kind == "f" and array.ndim > 2 and name not in self._warned:
            self._warn_of_bytes(name, array)
        numbers = array.dtype.kind in "biu" and dtype.kind in "iuf"
        if dtype.kind in "iu" and numbers and array.size and not np.can_cast(array.dtype, dtype):
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            if array.min() < low or array.max() > high:
                raise InvalidArgumentError(
                    f"{name!r} has type {dtype}, got a number outside {low} … {high}, "
                    f"{array.min() if array.min() < low else array.max()}. Convert the model for another type"
                )
        if array.dtype.kind != dtype.kind and not numbers:
            raise InvalidArgumentError(
                f"{name!r} has type {dtype}, got an array of {array.dtype}. Convert it: array.astype({dtype.name!r})"
            )
        return cast(name, array, dtype)

    def _warn_of_bytes(self, name: str, array: np.ndarray) -> None:
        """Say once of a float input that images come as bytes."""
        self._warned.add(name)
        if name not in self._targets and array.size and array.max() > 1:
            warn(
                f"{name!r} gets bytes of 0 … {array.max()} as they are, and most networks expect scaled images. If so, "
                f"give Batches(…, scale={{{name!r}: 1/255}}) or 'imagenet', or --scale; else convert them to float32"
            )

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """InvalidArgumentError for other shapes than declared, in which equal symbols are equal lengths."""
        check_shapes(self._shapes, shapes, free=self._free, hint=self._hint)

    def _hint(self, name: str, got: tuple[int, ...]) -> str:
        """What is said of labels that are shaped for classes on another axis."""
        hints = (("last", CLASSES_LAST), ("first", CLASSES_FIRST))
        return next((f". {text}" for where, text in hints if self._fits_classes(where, name, got)), "")

    def _fits_classes(self, where: str, name: str, got: tuple[int, ...]) -> bool:
        """Whether labels have the shape of a prediction with its classes elsewhere than the loss expects them."""
        shape = self.labels.get(name, {}).get(where)
        return (
            bool(shape)
            and len(shape) == len(got)
            and all(d in (length, None) for d, length in zip(shape, got, strict=True))
        )

    def _check_classes(self, name: str, labels: np.ndarray) -> None:
        classes, ignored = (self.labels[name].get(key) for key in ("classes", "ignored"))
        if (
            classes is None
            or labels.dtype.kind not in "iu"
            or not labels.size
            or (labels.min() >= 0 and labels.max() < classes)
        ):
            return
        bad = (labels < 0) | (labels >= classes)
        if ignored is not None:
            bad &= labels != ignored
        if bad.any():
            raise InvalidArgumentError(
                f"{name!r}: expected classes 0 … {classes - 1}, got {labels[bad][0]} "
                f"at {tuple(map(int, np.argwhere(bad)[0]))}. Number the classes from 0"
            )


def check_shapes(
    declared: Mapping[str, Dims | None],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    free: Collection[str] = (),
    hint: Callable[[str, tuple[int, ...]], str] | None = None,
) -> None:
    """InvalidArgumentError for other shapes than declared, in which equal symbols are equal lengths.

    free: inputs whose axis 0 a conversion can make symbolic. hint: what takes the place of the advice about a length.
    """
    lengths: dict[str, tuple[int, str]] = {}

    def misfit(name: str, wanted: Dims, advice: str, why: str = "") -> InvalidArgumentError:
        got = shapes[name]
        return InvalidArgumentError(
            f"{name!r}: expected the shape {describe(wanted)}, got {describe(got)}{why}{advice}"
        )

    for name, got in shapes.items():
        wanted = declared[name]
        if wanted is None:
            continue
        if len(got) != len(wanted):
            raise misfit(name, wanted, f". Give it {len(wanted)} dimensions, not {len(got)}")
        for axis, (dim, length) in enumerate(zip(wanted, got, strict=True)):
            known, where = lengths.setdefault(dim, (length, name)) if isinstance(dim, str) else (dim, "")
            if known is None or length == known:
                continue
            instead = hint(name, got) if hint else ""
            if where:
                raise misfit(name, wanted, instead or ". Make them equal", f", but {dim} is {known} in {where!r}")
            advice = f". Give axis {axis} the length {dim}, not {length}"
            if axis == 0 and name in free:
                advice += f", or convert the model with free={{{name!r}: {{0: 'batch'}}}}"
            raise misfit(name, wanted, instead or advice)


def cast(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """An array in the type of an input; InvalidArgumentError for a finite number beyond the numbers of that type."""
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype, copy=False)
    except FloatingPointError:
        with np.errstate(over="ignore"):
            beyond = np.isfinite(array) & ~np.isfinite(array.astype(dtype))
        where = tuple(map(int, np.argwhere(beyond)[0]))
        raise InvalidArgumentError(
            f"{name!r} has type {dtype}, got {array[beyond][0]:g} at {where}, which is beyond it. Scale the data"
        ) from None


def rows(value: Any) -> int:
    """The length of axis 0 of an array; 1 for a number."""
    return (*_shape(value), 1)[0]


def size(value: Any) -> int:
    """The number of elements of an array; 1 for a number."""
    return math.prod(_shape(value))


@contextmanager
def refusals(fed: Mapping[str, Any], what: str = "this batch") -> Iterator[None]:
    """What only onnxruntime finds to be wrong with arrays is an InvalidArgumentError with its words."""
    try:
        yield
    except OnnxBackpropError:
        raise
    except Exception as e:
        if not (isinstance(e, RuntimeError) or type(e).__module__.startswith("onnxruntime.")):
            raise
        shapes = ", ".join(f"{name!r} {describe(_shape(value))}" for name, value in fed.items())
        reason = str(e)
        name, prediction = failed_shape_check(reason) or ("", "")
        if isinstance(target := fed.get(name), OrtValue):
            less = ", without the axis of its classes" if target.element_type() in _WHOLE else ""
            reason = f"{name!r} must have the shape of {prediction!r}{less}"
        raise InvalidArgumentError(f"onnxruntime cannot run {what}, {shapes}: {reason}") from e


def declared_dims(shape: TensorShapeProto) -> Dims:
    """Lengths and symbols; None for what has neither."""
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in shape.dim)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape()) if isinstance(value, OrtValue) else np.shape(value)
