"""What the bodies of batch normalisation and of its gradient share: sums over all axes but the channels'."""

from collections.abc import Iterable

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.elementwise import proof_of_shape, share
from onnx_backprop.opset.bodies.sums import sum_channels
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.core.shapes import Dim, Dims, merge, require_rank


def channels(attrs: Attributes, src: Dims | None, given: Iterable[tuple[str, Arg | None]]) -> tuple[Dims | None, Dim]:
    """What is known of src, and how many channels there are, with what parameters of one entry per channel tell."""
    axis = None if src is None else data_to_ncx(attrs["data_format"], len(src))[1]
    count: Dim = None if src is None or axis is None else src[axis]
    for name, arg in given:
        if arg is not None and arg.dims is not None:
            require_rank(arg.dims, 1, 1, op=attrs.op, subject=name)
            count = merge(count, arg.dims[0], op=attrs.op, subject=f"channels of src and {name}")
    if src is not None and axis is not None:
        src = (*src[:axis], count, *src[axis + 1 :])
    return src, count


class Axes:
    """The axes of src. x: src, or where its rank is unknown a view of it (N, C, all the rest)."""

    def __init__(self, b: Body, attrs: Attributes, src: Tensor) -> None:
        self._b, self._src, self._shape = b, src, ""
        self._last = last = attrs["data_format"] == "NXC"
        self._dims = src.dims
        self._lengths: Dims | None = None
        if src.dims is not None:
            channel = len(src.dims) - 1 if last else 1
            axes = [axis for axis in range(len(src.dims)) if axis != channel]
            self._lengths = tuple(src.dims[axis] for axis in axes)
            self._per = [-1] if last else [-1, *[1] * (len(src.dims) - 2)]
        elif last:
            self._per = [-1]
        else:
            rest = b.ReduceProd(b.Shape(src, start=2), keepdims=1)
            self._shape = b.Concat(b.Shape(src, start=0, end=2), rest, axis=0)
            self._per, self._dims = [-1, 1], (None, None, None)
        self.x = self.view(src.name)

    def view(self, value: str) -> str:
        """A tensor of the shape of src, as x."""
        return self._b.Reshape(value, self._shape, allowzero=1) if self._shape else value

    def back(self, value: str) -> str:
        """A tensor of the shape of x, as src."""
        return self._b.Reshape(value, self._b.Shape(self._src), allowzero=1) if self._shape else value

    def sum(self, value: str) -> str:
        """Σ over all axes but the channels', of a tensor of the shape of x: one number per channel."""
        return sum_channels(self._b, value, self._dims, last=self._last)

    def spread(self, values: str) -> str:
        """One number per channel, for arithmetic with x."""
        return values if self._per == [-1] else self._b.Reshape(values, self._b.ints(self._per))

    def part(self, sums: str) -> str:
        """1 / the number of elements of a channel; sums: one per channel."""
        b, src = self._b, self._src
        return share(b, self._lengths, lambda: b.Div(b.Size(src), b.Max(b.Size(sums), b.int_scalar(1))))


def per_channel(b: Body, value: Tensor | None, name: str, like: str) -> str:
    """A parameter, proven to have one entry per channel; '' where it is absent."""
    if value is None:
        return ""
    message = f"expected {name} of one entry per channel"
    shape = b.Shape(like)
    if value.dims is None:  # another rank may have as many entries
        shape = b.Add(shape, proof_of_shape(b, value, shape, None, message))
    return b.Reshape(value, shape, allowzero=1, name=f"{b.op}: {message}")
