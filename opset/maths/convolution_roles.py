"""The convolution operators as one: a correlation of which two tensors are given and the third is the result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnx_backprop.opset.core.layout import (
    Order,
    conv_transpose_weights_to_canonical,
    conv_weights_to_canonical,
    data_to_ncx,
    inverse,
)
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array
from onnx_backprop.opset.core.shapes import Dims, permute
from onnx_backprop.opset.maths import convolution
from onnx_backprop.opset.maths.convolution_attributes import dims_of, wanted_shape

Role = Literal["source", "destination", "weights"]
Products = Mapping[Role, Callable[[Float64Array, Float64Array, Sequence[int], convolution.Geometry], Float64Array]]
PRODUCTS: Products = {
    "source": convolution.backward_data,
    "destination": convolution.forward,
    "weights": convolution.backward_weights,
}
"""What computes each of the three tensors from the other two."""


@dataclass(frozen=True)
class Roles:
    """Which tensors of an operator are the source, the destination and the weights of a correlation.

    `names`: how the operator calls them, its inputs in their order, then the result. The name of a destination that is
    the result is that of the output, and its shape follows; that of another result is the name of the attribute and
    the input that state its shape. `transposed`: it is a gradient of a transposed convolution.
    """

    names: Mapping[Role, str]
    transposed: bool = False
    weights_format: str = "weights_format"

    @property
    def result(self) -> Role:
        return list(self.names)[-1]

    @property
    def in_messages(self) -> tuple[str, str, str]:
        """The names of source, destination and weights."""
        return self.names["source"], self.names["destination"], self.names["weights"]

    def order(self, attrs: Attributes, role: Role, rank: int) -> Order:
        """Permutation from the operator's axis order to NCX, or of weights to (D, S/g, k…)."""
        if role != "weights":
            return data_to_ncx(attrs["data_format"], rank)
        canonical = conv_transpose_weights_to_canonical if self.transposed else conv_weights_to_canonical
        return canonical(attrs[self.weights_format], rank)

    def resolve(self, attrs: Attributes, dims: Mapping[Role, Dims | None]) -> convolution.Resolved | None:
        """What the dimensions in the operator's axis orders lead to; None while the rank is unknown."""
        canonical: dict[str, Dims | None] = {
            role: None if d is None else permute(d, self.order(attrs, role, len(d))) for role, d in dims.items()
        }
        resolved = convolution.resolve(
            attrs,
            source=canonical["source"],
            destination=canonical["destination"],
            weights=canonical["weights"],
            names=self.in_messages,
            transposed=self.transposed,
            infers_destination=self.result == "destination",
        )
        padding = attrs.get("output_padding")
        if resolved is not None and padding is not None and (self.transposed or any(padding)):
            convolution.require_output_padding(attrs, resolved, self.names["source"])
        return resolved

    def shape(self, attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
        result, names = self.result, self.names
        stated = None if result == "destination" else wanted_shape(attrs, names[result], args[2])
        given: dict[Role, Dims | None] = {
            role: dims_of(arg, attrs, names[role]) for role, arg in zip(list(names)[:2], args, strict=False)
        }
        resolved = self.resolve(attrs, {**given, result: stated})
        if resolved is None:
            return None
        dims: Dims = getattr(resolved, result)
        return permute(dims, inverse(self.order(attrs, result, len(dims))))

    def reference(
        self,
        attrs: Attributes,
        out: tuple[int, ...],
        first: Float64Array,
        second: Float64Array,
        _stated: tuple[int, ...] | None = None,
        *,
        products: Products = PRODUCTS,
    ) -> Float64Array:
        result, arrays = self.result, dict(zip(self.names, (first, second), strict=False))
        resolved = self.resolve(attrs, {**{role: x.shape for role, x in arrays.items()}, result: out})
        assert resolved is not None
        geo = convolution.geometry(attrs, resolved)
        ordered = {role: x.transpose(self.order(attrs, role, x.ndim)) for role, x in arrays.items()}
        # contiguous, so that the products run at full speed
        a, b = (np.ascontiguousarray(ordered[role]) for role in ("source", "destination", "weights") if role in ordered)
        order = self.order(attrs, result, len(out))
        lengths = [out[axis] for axis in order[2:]]
        return products[result](a, b, lengths, geo).transpose(inverse(order))
