"""How an operator's schema relates the element types of its inputs and outputs."""

from collections.abc import Mapping, Sequence
from functools import cache

import onnx_ir as ir
from onnx import defs, helper

Bound = Mapping[str, ir.DataType | None]  # what a type variable of the schema, such as "T", stands for


class Signature:
    """The type variables of one operator; without a schema nothing is known of it."""

    def __init__(self, schema: defs.OpSchema | None) -> None:
        self.inputs = [] if schema is None else [_variable(p) for p in schema.inputs]
        self.outputs = [] if schema is None else [_variable(p) for p in schema.outputs]
        attributes = {} if schema is None else schema.attributes
        self._defaults = {
            name: helper.get_attribute_value(attribute.default_value)
            for name, attribute in attributes.items()
            if attribute.default_value.name
        }
        self._many = (False, False) if schema is None else (_repeats(schema.inputs), _repeats(schema.outputs))
        constraints = {} if schema is None else {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        self._allowed = {v: constraints.get(v, [v]) for v in (*self.inputs, *self.outputs)}

    def variable(self, index: int) -> str:
        """The type variable of an input, "" where it has none."""
        return _at(self.inputs, index, repeats=self._many[0])

    def bind(self, values: Sequence[object]) -> dict[str, ir.DataType | None]:
        """What each type variable stands for with these inputs; None: a value whose type is unknown decides it."""
        bound: dict[str, ir.DataType | None] = {}
        for index, value in enumerate(values):
            if isinstance(value, ir.Value) and (variable := self.variable(index)):
                bound[variable] = bound.get(variable) or value.dtype
        return bound

    def of_number(self, index: int, bound: Bound, *, whole: bool) -> ir.DataType | None:
        """The type of a plain number as an input: that of the inputs that share its type variable, else the usual.

        None where the type of those inputs is unknown.
        """
        variable = self.variable(index)
        if variable in bound:
            return bound[variable]
        return self._only(variable) or (ir.DataType.INT64 if whole else ir.DataType.FLOAT)

    def of_output(self, index: int, bound: Bound) -> ir.DataType | None:
        """The type of an output, None where the types of the inputs do not decide it."""
        variable = _at(self.outputs, index, repeats=self._many[1])
        return bound.get(variable) or self._only(variable)

    def is_default(self, name: str, value: object) -> bool:
        """Whether an attribute has this value where no node states it; from opset 18 on no default changes."""
        value = value.encode() if isinstance(value, str) else value
        return name in self._defaults and type(value) is type(self._defaults[name]) and value == self._defaults[name]

    def _only(self, variable: str) -> ir.DataType | None:
        allowed = self._allowed.get(variable, [])
        return _NAMES.get(next(iter(allowed))) if len(allowed) == 1 else None


_NAMES = {f"tensor({t.name.lower()})": t for t in ir.DataType} | {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
}


def _variable(parameter: defs.OpSchema.FormalParameter) -> str:
    """Its type variable; "" for one that stands for inputs of different types."""
    return parameter.type_str if parameter.is_homogeneous else ""


def _repeats(parameters: Sequence[defs.OpSchema.FormalParameter]) -> bool:
    """Whether the last one stands for any number of values."""
    return bool(parameters) and parameters[-1].option == defs.OpSchema.FormalParameterOption.Variadic


def _at(variables: list[str], index: int, *, repeats: bool) -> str:
    if index >= len(variables):
        return variables[-1] if repeats else ""
    return variables[index]


@cache
def signature(op_type: str, domain: str) -> Signature:
    """The signature of an operator in its newest version."""
    try:
        return Signature(defs.get_schema(op_type, domain=domain))
    except defs.SchemaError:
        return Signature(None)
