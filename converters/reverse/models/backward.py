"""`backward`: a forward model in, the same model with its gradients as further outputs out."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.ir_models import as_given, to_ir, to_proto
from onnx_backprop.converters.prepare.load import Edit, Free, infer_large
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.prepare.stops import prepared
from onnx_backprop.converters.prepare.writing.inline import check_inline, inlined
from onnx_backprop.converters.prepare.writing.short_names import shorten_names
from onnx_backprop.converters.prepare.writing.unsaid import without_inferred
from onnx_backprop.converters.reverse.differentiate import PerSample, Progress
from onnx_backprop.converters.reverse.models.derivatives import Derivative, record, shaped_like
from onnx_backprop.converters.reverse.models.differentiation import Differentiation
from onnx_backprop.converters.reverse.models.faults import avoid_faults
from onnx_backprop.opset.core.mapped import whole_if_possible
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.functions.half import note_optimisers
from onnx_backprop.opset.functions.use_kernels import DEFAULT_KERNELS, attach_kernels, check_kernels
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.types import type_dims

if TYPE_CHECKING:
    from onnx_backprop.converters.reverse.batching.add_axis import OneRow


@as_given
def backward(
    model: ModelProto | ir.Model | str | Path,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    stop: Patterns | None = None,
    free: Free | None = None,
    kernels: str = DEFAULT_KERNELS,
    inline: bool = False,
    straight_through: bool = False,
    strict: bool = False,
    checkpoint: int = 0,
    per_sample: PerSample = False,
    progress: Progress = shown,
) -> ModelProto:
    """d of / d wrt as extra outputs of the model: `<x>_grad` = Σ_y (∂y/∂x)ᵀ · `<y>_grad`.

        model = ob.backward("model.onnx", wrt=["x"], of=["y"])
        y, dx = ob.session(model).run(None, {"x": x, "y_grad": np.ones_like(x)})

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed. It may be a result of this
            function, to any order.
        wrt: graph inputs and initializers to differentiate with respect to. Default: every float initializer that
            influences `of` along a differentiable path and is a parameter; exponents, limits, scales, statistics and
            the like define the function and are none. A float value v inside the graph works too: `<v>_grad` = ∂y/∂v
            through everything that reads v, as if v were an input. For an x that v depends on, ∂y/∂x stays the whole
            derivative, including the part through v.
        of: graph outputs to differentiate, or float values inside the graph, which become outputs behind the model's
            own. Default: every float output that depends on `wrt`.
        stop: values inside the graph that no gradient passes: names, globs (`layer1.*`) or regular expressions
            (`re:…`) of values or of nodes, whose outputs are meant, in branches and loops too. y = stop(x) is x with
            dy/dx = 0, in derivatives of any order. An Identity with `onnx_backprop.stop` in its metadata is a stop too,
            and an exporter's `detach` node becomes one.
        free: fixed lengths of inputs that become symbolic, as {"x": {0: "batch"}}: the axis and the name of its symbol.
            Constants that hold the old length are rewritten: shapes of Reshape and Expand, sizes of Resize, equal rows
            that are joined to a batch or are the first state of an RNN. A node that keeps the old length is an
            UnsupportedError.
        kernels: how the operators of our domain run, see `use_kernels`.
        inline: write these operators into the graph itself, in the lowest opset and IR version, and leave no node of
            our domain. For runtimes before onnxruntime 1.27, which do not know overloads of functions; the kernels are
            "onnx" and can no longer be exchanged.
        straight_through: differentiate QuantizeLinear as if it did not round, within the range of its type, and
            DynamicQuantizeLinear with the integer products behind it. By default such a node on the way is refused,
            since the derivative of rounding is zero almost everywhere.
        strict: refuse a name in `wrt` or `of` if the derivative is zero, as through Sign, or if `of` does not depend on
            it. By default the gradient is zeros, and a warning names the nodes that stop it.
        checkpoint: store the states of a Loop or Scan only at every so many steps and compute the others again; √n
            needs the least memory for n steps. 0: store all.
        per_sample: the result for each row of a batch, as for a batch of that row alone: `<w>_grad` has the shape of w
            with the rows in front, `<x>_grad` of an x with rows its own shape. Rows are axis 0 of the named inputs, as
            ["x"], or with True of all inputs, which then have one symbol there. An output of one element per row is
            seeded with 1; one without rows, such as a mean over them, gets them in front.
        progress: wraps the list of nodes while they are walked. Default: a progress bar if a person is watching, on a
            terminal or in a notebook; `iter` for none.

    Returns: a model whose outputs are the model's own, other values of `of`, then `<x>_grad` in the order of `wrt`,
    each of the shape and type of x. A one-element output is seeded with 1; any other gets a graph input `<y>_grad` of
    its own shape. Initializers in `wrt` become graph inputs that keep their value as default. A name that is taken gets
    a number, as `x_grad_2`: `derivatives(result)` lists them. An onnx_ir.Model gives an onnx_ir.Model.

    Symbolic dimensions stay symbolic. Models below opset 18 are converted to it.

    Raises: InvalidArgumentError (names that are unknown, of integers, or reached only through nodes without a
    derivative, such as a random choice or the scales of a Resize), InvalidModelError, UnsupportedOpError (every missing
    rule at once, with node names), UnsupportedAttributeError.
    """
    draft = Draft(
        model,
        stop=stop,
        free=free,
        kernels=kernels,
        inline=inline,
        straight_through=straight_through,
        strict=strict,
        checkpoint=checkpoint,
        progress=progress,
        names={"wrt": wrt, "of": of},
    )
    draft.take_one_row(per_sample)
    stage, gradients = draft.differentiate(wrt=wrt, of=of)
    return draft.finish_derivative(Derivative("vjp", stage.seeds, gradients))


def finish(
    ir_model: ir.Model, original: ModelProto, kernels: str, *, inline: bool, carried: Collection[str] = ()
) -> ModelProto:
    """Serialise, keep what the graph library drops, attach kernels. carried: see `avoid_faults`."""
    avoid_faults(ir_model, carried)
    proto = infer_large(to_proto(ir_model))
    proto.training_info.extend(original.training_info)
    note_optimisers(proto)
    attach_kernels(proto, kernels)
    return inlined(proto) if inline else proto


class Draft:
    """A model under conversion: the message that came, and the graph that stages add to. Values go by their names."""

    def __init__(
        self,
        model: ModelProto | ir.Model | str | Path,
        *,
        stop: Patterns | None = None,
        free: Free | None = None,
        kernels: str = DEFAULT_KERNELS,
        inline: bool = False,
        straight_through: bool = False,
        strict: bool = False,
        checkpoint: int = 0,
        progress: Progress = shown,
        names: Mapping[str, Patterns | None] | None = None,
        edit: Edit | None = None,
        ready: bool = False,
    ) -> None:
        """The keywords of `backward`; edit: of `prepare`; names: the caller's other arguments that name values.

        ready: whether the model is what `prepare` has made.
        """
        check_kernels(kernels)
        check_inline(kernels, inline=inline)
        self.kernels, self._inline = kernels, inline
        self._how = {"straight_through": straight_through, "strict": strict, "checkpoint": checkpoint}
        self._progress: Progress = progress
        self._one_row: OneRow | None = None
        self.statistics: dict[str, str] = {}
        self._came = model
        if ready and isinstance(model, ModelProto):
            self.original, self.model = model, to_ir(model)
        else:
            self.original, self.model = prepared(model, stop=stop, free=free, edit=edit, **(names or {}))

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def differentiate(self, **arguments: Any) -> tuple[Differentiation, dict[str, str]]:
        """A stage of the reverse mode, and {x: its gradient}; arguments: of `Differentiation`."""
        stage = Differentiation(self.model, progress=self._progress, **(self._how | arguments))
        return stage, stage.emit()

    def take_one_row(self, per_sample: PerSample) -> None:
        """Let what follows be of one row of a batch, until `spread_rows`; nothing where `per_sample` is False."""
        if per_sample is not False:
            from onnx_backprop.converters.reverse.batching.add_axis import take_one_row  # and 11 modules of rules

            outputs = load(self._came, mapped=True).graph.output
            declared = {value.name: type_dims(value.type) or () for value in outputs}
            self._one_row = take_one_row(self.graph, per_sample, declared)
            self.infer_types()

    def spread_rows(self, derivative: Derivative, apart: Collection[str] = ()) -> None:
        """Give the rows back, if `take_one_row` has taken one. apart: inputs that get them and had none."""
        if self._one_row is not None:
            self.infer_types()
            self._one_row.spread(self.model, shaped_like(derivative) | dict.fromkeys(apart, ()))

    def infer_types(self) -> None:
        """Give what a stage has emitted its types and shapes, which the next one wants to know; values are new ones."""
        self.model = to_ir(infer_large(to_proto(self.model)))

    def finish(self) -> ModelProto:
        """The converted model."""
        return finish(self.model, self.original, self.kernels, inline=self._inline, carried=self.statistics)

    def finish_derivative(self, derivative: Derivative) -> ModelProto:
        """The model with a derivative, which it notes, see `finish_short`."""
        self.spread_rows(derivative)
        record(self.model, derivative)
        return self.finish_short()

    def finish_short(self) -> ModelProto:
        """The model without what nobody reads: inferred types, long names."""
        return whole_if_possible(without_inferred(shorten_names(self.finish(), used_names(self.original.graph))))
