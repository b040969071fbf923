"""The contract every operator of the domain fulfils: what it is called, what shape it makes, what it computes.

An operator module states an `Op`: attributes, inputs, outputs, a `shape` function on (partly) known
dimensions and a float64 `reference`. Everything else is derived here, once: the ONNX schema, its type and
shape inference, validation, the reference evaluator's class and the single rounding at the end.
`shape` runs at model checking with what is known then and again at run time with everything known, so a
contradiction is reported by the same sentence in both places, before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx.defs import OpSchema

from onnx_backprop.opset.core.errors import InvalidModelError, ShapeError
from onnx_backprop.opset.core.shapes import Dims

DOMAIN = "onnx_backprop"
UPDATE_DOMAIN = "onnx_backprop.training"  # of the functions that update parameters
OPSET_VERSION = 1

Array = NDArray[Any]
Float64Array = NDArray[np.float64]
AttributeKind = Literal["int", "float", "ints", "floats", "string"]

_SCHEMA_KIND = {
    "int": OpSchema.AttrType.INT,
    "float": OpSchema.AttrType.FLOAT,
    "ints": OpSchema.AttrType.INTS,
    "floats": OpSchema.AttrType.FLOATS,
    "string": OpSchema.AttrType.STRING,
}
FLOAT_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")


class NumberType(NamedTuple):
    """A type constraint: the ONNX types, what it is for, and the type its values have in a kernel."""

    types: tuple[str, ...]
    doc: str
    dtype: type[np.generic]


TypeName = Literal["T1", "T2", "T3", "T4", "T5", "T6", "T7"]
# the others carry numbers that are read before the arithmetic
TENSORS: tuple[TypeName, ...] = ("T1", "T5", "T6", "T7")
NUMBER_TYPES: dict[TypeName, NumberType] = {
    "T1": NumberType(
        FLOAT_TYPES, "f32, f16 or bf16, the same for all floating-point inputs and the output.", np.float32
    ),
    "T2": NumberType(("tensor(int32)",), "s32.", np.int32),
    "T3": NumberType(("tensor(float)",), "f32, whatever T1 is.", np.float32),
    "T4": NumberType(("tensor(int64)",), "s64.", np.int64),
    "T5": NumberType(("tensor(float)",), "f32, whatever T1 is: statistics and parameters.", np.float32),
    "T6": NumberType(("tensor(uint8)",), "u8: bytes that hold numbers of a few bits.", np.uint8),
    "T7": NumberType(("tensor(int64)",), "s64: counts that are read when the kernel runs.", np.int64),
}
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Attribute:
    """One attribute: its name in the spec, kind, meaning, and default (None: absent unless given)."""

    name: str
    kind: AttributeKind
    doc: str
    required: bool = False
    default: int | float | str | None = None
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] | None = None  # other spellings, lower case -> the one in `choices`

    def normalise(self, value: object, op: str) -> object:
        """Return `value` as int, str or tuple; raise InvalidModelError when kind or choice is wrong."""
        try:
            result = self._convert(value)
        except (TypeError, ValueError) as e:
            raise InvalidModelError(f"attribute {self.name}: expected {self.kind}, got {value!r}", op_type=op) from e
        if self.choices and self.aliases and isinstance(result, str):
            result = self.aliases.get(result.lower(), result)
        if self.choices and result not in self.choices:
            allowed = ", ".join(self.choices)
            raise InvalidModelError(f"attribute {self.name}: expected one of {allowed}, got {result!r}", op_type=op)
        return result

    def _convert(self, value: Any) -> int | float | str | tuple[int | float, ...]:
        if self.kind == "string":
            value = value.decode() if isinstance(value, bytes) else value
            return _of_type(value, str, str)
        convert, *accepted = (int,) if self.kind.startswith("int") else (float, int, np.floating)
        if not self.kind.endswith("s"):
            return _of_type(value, convert, convert, np.integer, *accepted)
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(_of_type(v, convert, convert, np.integer, *accepted) for v in value)


def _of_type(value: Any, convert: Callable[[Any], Any], *accepted: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError
    return convert(value)


@dataclass(frozen=True)
class Input:
    """One input. `type_name` is T1, T5, T6 or T7 for a tensor; T2, T3, T4 carry a shape or constants in 1-D.

    The values of a shape-only input are never read.
    """

    name: str
    type_name: TypeName
    doc: str
    optional: bool = False
    shape_only: bool = False

    @property
    def tensor(self) -> bool:
        return self.type_name in TENSORS

    @property
    def floats(self) -> bool:
        """Whether it is a tensor that arithmetic reads as floats; one of bytes or counts stays as it is."""
        return self.tensor and self.type_name not in ("T6", "T7")


@dataclass(frozen=True)
class Output:
    """An output, a tensor of type T1 or T5."""

    name: str
    doc: str
    type_name: TypeName = "T1"


class Attributes(Mapping[str, Any]):
    """The attributes of one node, validated and completed with their defaults.

    An optional list given as [] counts as absent, so that a model-local function can forward it.
    """

    def __init__(self, op: Op, given: Mapping[str, object]) -> None:
        known = {a.name: a for a in op.attributes}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InvalidModelError(
                f"unknown attribute {', '.join(unknown)}; it takes {', '.join(known)}", op_type=op.name
            )
        self.op = op.name
        self._values: dict[str, Any] = {}
        for name, attribute in known.items():
            value = given.get(name)
            if value is None and attribute.required:
                raise InvalidModelError(f"required attribute {name} is missing", op_type=op.name)
            if value is None:
                self._values[name] = attribute.default
                continue
            value = attribute.normalise(value, op.name)
            self._values[name] = None if value == () and not attribute.required else value

    def having(self, **values: object) -> Attributes:
        """A copy in which these have other values."""
        result = copy(self)
        result._values = self._values | values
        return result

    def require_flags(self, *names: str) -> None:
        """Raise ShapeError unless these attributes are 0 or 1."""
        for name in names:
            if self[name] not in (0, 1):
                raise ShapeError(f"attribute {name}: expected 0 or 1, got {self[name]}", op_type=self.op)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class Arg:
    """What is known about one input: its dimensions and, for an input that carries numbers, its value.

    `dims` is None when not even the rank is known; a dimension is an int, a symbol's name or None. The value has floats
    for an input of type T3, dimensions for one of T2 or T4.
    """

    dims: Dims | None = None
    value: tuple[Any, ...] | None = None

    @classmethod
    def of_array(cls, spec: Input, dims: Dims | None, array: Array | None) -> Arg:
        """An input whose value is known where there is an array of it."""
        if array is None or spec.tensor:
            return cls(dims)
        return cls(dims, tuple(array.reshape(-1).astype(NUMBER_TYPES[spec.type_name].dtype).tolist()))


Given = Array | tuple[int, ...] | None
ShapeFunction = Callable[[Attributes, Sequence["Arg | None"]], "Dims | Sequence[Dims | None] | None"]
ReferenceFunction = Callable[..., "Array | Sequence[Array]"]
BodyFunction = Callable[..., "str | Sequence[str]"]


@dataclass(frozen=True)
class Op:
    """One operator. `reference(attributes, output_shape, *inputs)` gets validated float64 arrays.

    An input marked shape-only arrives in `reference` as its shape tuple; an absent optional one as None; one that
    carries numbers as a tuple. `body(b, attributes, *tensors)` writes the same in standard ONNX operators, float32
    inside, with a `Body` and one `Tensor` per input. Bytes (T6) and counts (T7) arrive in both as they are.

    The functions of an operator with several outputs answer one shape, array or tensor for each, and `reference` is
    told the shapes of all.

    domain, version: of an operator that `register_kernel` is given, which need not have a body.
    """

    name: str
    doc: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    shape: ShapeFunction
    reference: ReferenceFunction
    attributes: tuple[Attribute, ...] = ()
    body: BodyFunction | None = None
    source: str = ""
    domain: str = DOMAIN
    version: int = OPSET_VERSION

    @property
    def key(self) -> str:
        """A name that no operator of another domain has."""
        return self.name if self.domain == DOMAIN else f"{self.domain}.{self.name}"

    def shapes(self, attributes: Attributes, args: Sequence[Arg | None]) -> tuple[Dims | None, ...]:
        """What `shape` says, one entry per output."""
        return self._each(self.shape(attributes, args))

    def _each(self, result: Any) -> tuple[Any, ...]:
        """What a function of the operator answers, one entry per output."""
        return (result,) if len(self.outputs) == 1 else tuple(result)

    def attribute(self, name: str) -> Attribute:
        return next(a for a in self.attributes if a.name == name)

    def evaluate(self, inputs: Sequence[Given], attributes: Mapping[str, object]) -> Array:
        """The first output, see `evaluate_all`."""
        return self.evaluate_all(inputs, attributes)[0]

    def evaluate_all(self, inputs: Sequence[Given], attributes: Mapping[str, object]) -> tuple[Array, ...]:
        """Validate, compute in float64, round to float32 and on to the inputs' common type, as sessions do.

        `inputs` may end early; a missing optional input is None; a shape-only input may be given as its shape
        alone. Raises InvalidModelError or ShapeError.
        """
        bound = Attributes(self, attributes)
        self.require_inputs([i is not None for i in inputs])
        args = [*inputs, *[None] * (len(self.inputs) - len(inputs))]
        dtype = self._common_dtype(args)
        read = [self._read(spec, given) for spec, given in zip(self.inputs, args, strict=True)]
        values, known = [value for value, _ in read], [arg for _, arg in read]
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN travel silently, as in any kernel
            results = self._compute(bound, known, values)
            return tuple(
                result.astype(np.float32).astype(dtype if output.type_name == "T1" else np.float32)
                for output, result in zip(self.outputs, results, strict=True)
            )

    def _read(self, spec: Input, arg: Given) -> tuple[object, Arg | None]:
        """An input as `reference` gets it, and what `shape` is told of it."""
        if arg is None:
            return None, None
        if isinstance(arg, tuple):
            return arg, Arg(arg)
        if not spec.tensor:
            value = self._number_tuple(spec, arg)
            return value, Arg(arg.shape, value)
        dtype = np.dtype(NUMBER_TYPES[spec.type_name].dtype)
        if spec.type_name != "T1" and arg.dtype != dtype:
            raise InvalidModelError(f"input {spec.name}: expected {dtype}, got {arg.dtype}", op_type=self.name)
        if spec.shape_only:
            return arg.shape, Arg(arg.shape)
        return arg.astype(np.float64) if spec.floats else arg, Arg(arg.shape)

    def run_shapes(self, bound: Attributes, known: Sequence[Arg | None]) -> tuple[tuple[int, ...], ...]:
        """The shapes of all outputs at run time, when everything is known."""
        result: list[tuple[int, ...]] = []
        for output, dims in zip(self.outputs, self.shapes(bound, known), strict=True):
            if dims is None or not all(isinstance(d, int) for d in dims):
                raise ShapeError(f"cannot tell the shape of {output.name}", op_type=self.name)
            shape = tuple(int(d) for d in dims if isinstance(d, int))
            # int64 element counts: a request beyond that cannot be allocated, say so before anybody tries
            if np.prod([float(d) for d in shape]) >= 2.0**47:
                raise ShapeError(f"{output.name} of shape {shape} does not fit in memory", op_type=self.name)
            result.append(shape)
        return tuple(result)

    def _compute(self, bound: Attributes, known: Sequence[Arg | None], values: Sequence[object]) -> Sequence[Array]:
        shapes = self.run_shapes(bound, known)
        if all(0 in shape for shape in shapes):
            return [np.zeros(shape) for shape in shapes]
        results = self._each(self.reference(bound, shapes if len(self.outputs) > 1 else shapes[0], *values))
        for result, shape in zip(results, shapes, strict=True):
            assert result.shape == shape, f"{self.name}: reference made {result.shape}, shape function said {shape}"
        return results

    def require_inputs(self, present: Sequence[bool], got: object = None) -> None:
        """Raise InvalidModelError unless every required input is there and none is too many; `got`: for the message."""
        required = sum(not i.optional for i in self.inputs)
        if not required <= len(present) <= len(self.inputs) or not all(present[:required]):
            names = ", ".join(i.name + ("?" if i.optional else "") for i in self.inputs)
            raise InvalidModelError(f"expected inputs {names}, got {got or sum(present)}", op_type=self.name)

    def _common_dtype(self, args: Sequence[Given]) -> np.dtype[Any]:
        floats = {
            spec.name: given.dtype
            for spec, given in zip(self.inputs, args, strict=True)
            if isinstance(given, np.ndarray) and spec.type_name == "T1"
        }
        dtype = next(iter(floats.values()), None)
        if dtype is None or dtype not in FLOAT_DTYPES or any(d != dtype for d in floats.values()):
            got = ", ".join(f"{name} {d}" for name, d in floats.items())
            raise InvalidModelError(
                f"expected one type of float32, float16, bfloat16 for all, got {got}", op_type=self.name
            )
        return dtype

    def _number_tuple(self, spec: Input, array: Array) -> tuple[Any, ...]:
        dtype = NUMBER_TYPES[spec.type_name].dtype
        if array.dtype != dtype or array.ndim != 1:
            raise InvalidModelError(
                f"input {spec.name}: expected a 1-D {np.dtype(dtype)} tensor, got {array.ndim}-D {array.dtype}",
                op_type=self.name,
            )
        return tuple(array.tolist())
