"""A model and its derivatives as files that another program finds by their names: CasADi's `GraphBuilder`."""

import re
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Unpack

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.products import tangents
from onnx_backprop.converters.derivatives.seeds import at_once
from onnx_backprop.converters.derivatives.work import Model, Names, Options, Work
from onnx_backprop.converters.derivatives.written_out import written_out
from onnx_backprop.converters.prepare.writing.unsaid import without_inferred
from onnx_backprop.converters.reverse.batching.batch import batch
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import drop_dead
from onnx_backprop.converters.reverse.known import dims, element_type, is_float, known_lengths
from onnx_backprop.converters.reverse.models.named import values_by_name
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import replacing
from onnx_backprop.opset.core.mapped import serialized, whole
from onnx_backprop.opset.core.reading import external_files, load
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.graphs.names import used_names

LAYOUTS = ("casadi",)
KINDS = ("fwd", "adj", "fwd_adj")


def family(
    model: Model,
    path: str | Path | None = None,
    *,
    layout: str = "casadi",
    wrt: Names = None,
    **options: Unpack[Options],
) -> list[Path]:
    """Write f, fwd_f: ∂f · ẋ, adj_f: ∂fᵀ · ȳ, and fwd_adj_f: the tangent of ∂fᵀ · ȳ along ẋ and of ȳ; the paths.

        ob.family("model.onnx")  # fwd_model.onnx, adj_model.onnx and fwd_adj_model.onnx beside it

    `casadi.GraphBuilder("model.onnx").create("f")` then has Jacobians and exact Hessians.

    Args:
        model, options: see `backward`; `inline` is True.
        path: of f, which is then written with its weights, and the others beside it. Default: the model's own file.
            Conv, GRU, LSTM and RNN of float64 become other operators in it, since onnxruntime has no kernels for them.
        layout: "casadi". Seeds and results of an r × c matrix are r × (n c), n matrices side by side, for any n; a
            vector is a column, and a tensor with more axes the vector of its elements in ONNX's order.
        wrt: inputs with a derivative. Default: all of a float type. CasADi takes the others as constants.

    Every output has a seed, also an integer one, whose derivative is 0.

    Errors: InvalidArgumentError for a model without a path, one whose weights lie in other files if f is not written,
    names that CasADi misreads; UnsupportedError above 2 GB; what `backward` raises.
    """
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"layout: expected {LAYOUTS[0]!r}, got {layout!r}")
    target = _target(model, path)
    source = load(model)
    options = {"inline": True, **options}
    steps = written_out(source, steps=True)
    models = [_Member(Work(steps, wrt, None, **options), kind, wrt).model() for kind in KINDS]
    paths = members(target)
    function = written_out(source, steps=False)
    if path is not None:
        models, paths = [function, *models], [target, *paths]
    elif function is not source:
        raise InvalidArgumentError(
            f"onnxruntime has no kernels of Conv, GRU, LSTM and RNN in float64, and {target} has such nodes. Name a "
            "file for f, in which they are other operators",
            "path",
        )
    files = {path: serialized(whole(model)) for path, model in zip(paths, models, strict=True)}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(*files) as opened:
        for file, content in zip(opened, files.values(), strict=True):
            file.write(content)
    return paths


def members(target: Path) -> list[Path]:
    """Where the derivatives of a file are, for CasADi to find."""
    return [target.with_name(f"{kind}_{target.name}") for kind in KINDS]


def _target(model: Model, path: str | Path | None) -> Path:
    """Where f is, or is to be."""
    if path is not None:
        return Path(path)
    if not isinstance(model, str | Path):
        raise InvalidArgumentError("expected the name of a file for a model that has none, as 'plant.onnx'", "path")
    if beside := external_files(model):
        raise InvalidArgumentError(
            f"CasADi reads one file, and weights of {model} lie in {beside[0].name}. Name a file, which gets them all",
            "path",
        )
    return Path(model)


def _prefix(kind: str, names: Iterable[str]) -> str:
    """fwd_, or fwd2_ if names begin with fwd_ already, and so on, as CasADi counts."""
    last = 0
    for name in names:
        if match := re.match(rf"{kind}([^_]*)_", name):
            if match[1] and not match[1].isdecimal():
                raise InvalidArgumentError(
                    f"CasADi misreads {name!r}, which begins as the name of a derivative does. Rename it in the model"
                )
            last = max(last, int(match[1] or 1))
    return f"{kind}{last + 1 if last else ''}_"


class _Member:
    """One derivative of a model under CasADi's names and in its layout.

    Level by level: what no tangent reaches is computed once for all tangents, and what no cotangent reaches for all.
    """

    def __init__(self, work: Work, kind: str, wrt: Names) -> None:
        self.work, self.kind = work, kind
        inputs = [value for value in work.graph.inputs if value.name not in work.graph.initializers]
        outputs = list(work.graph.outputs)
        for value in (*inputs, *outputs):
            if dims(value) is None:
                raise InvalidArgumentError(f"CasADi wants the number of axes of {value.name!r}. State it in the model")
            if taken := {"nfwd", "nadj"}.intersection(map(str, _dims(value))):
                raise InvalidArgumentError(
                    f"{value.name!r} has a length {taken.pop()!r}, which CasADi counts seeds by. Rename it in the model"
                )
        smooth = {value: str(value.name) for value in (*inputs, *outputs) if is_float(value) and 0 not in _dims(value)}
        self.xs = [smooth[x] for x in inputs if x in smooth] if wrt is None else list(wrt)
        if unknown := [x for x in self.xs if x not in [value.name for value in inputs]]:
            raise InvalidArgumentError(f"{unknown[0]!r} is no input of the model, and CasADi seeds nothing else", "wrt")
        self.ys = [smooth[y] for y in outputs if y in smooth]
        self.inputs, self.outputs = [str(x.name) for x in inputs], [str(y.name) for y in outputs]
        self.label: dict[str, str] = {}  # of seeds and results: what CasADi calls them
        self.like: dict[str, str] = {}  # and the value of the model that has their shape
        self.prefixes: list[str] = []
        self.leading: dict[str, list[str]] = {}  # and the symbols of the axes in front of it

    def model(self) -> ModelProto:
        """The model that goes into the file."""
        work, names = self.work, [*self.inputs, *self.outputs]
        cotangents: list[str] = []
        second: list[str] = []  # tangents of these
        ends = self.ys
        if self.kind != "fwd":
            stage, gradients = work.differentiate(wrt=self.xs, of=self.ys, seed_all=True, quiet=self.kind != "adj")
            cotangents, ends = list(stage.seeds.values()), list(gradients.values())
            self._name("adj", names, [(new, x) for x, new in [*stage.seeds.items(), *gradients.items()]])
            names = [*self.inputs, *self.label.values()]
            work.infer_types()
        if self.kind != "adj":
            first = ends
            derivative = tangents(work, [*self.xs, *cotangents], ends, quiet=True, strict=False)
            second, ends = [derivative.seeds[seed] for seed in cotangents], list(derivative.results.values())
            self._name("fwd", names, [(new, x) for x, new in [*derivative.seeds.items(), *derivative.results.items()]])
            self.label = {name: label for name, label in self.label.items() if name not in first}
            self._batch("nfwd", list(derivative.seeds.values()), ends)
        if self.kind != "fwd":
            self._batch("nadj", [*cotangents, *second], ends)
        self._arrange(ends)
        return without_inferred(work.finish())

    def _name(self, kind: str, names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> None:
        """Note (seed or result, value), a value being one of the model, or itself a seed or a result."""
        self.prefixes.append(prefix := _prefix(kind, names))
        for new, value in pairs:
            self.label[new] = prefix + self.label.get(value, value)
            self.like[new] = self.like.get(value, value)

    def _batch(self, symbol: str, seeds: Sequence[str], ends: Sequence[str]) -> None:
        """Give seeds and results a leading axis."""
        work = self.work
        by_rules = at_once(work, seeds)
        op = Builder(used_names(work.graph))
        op.prefix = symbol
        batch(work.graph, op, work.inputs(seeds), work.outputs(ends), work.model.opset_imports, by_rules=by_rules)
        work.append(op)
        for value in (*work.inputs(seeds), *work.outputs(ends)):
            name = str(value.name)
            self.leading[name] = [symbol, *self.leading.get(name, ())]
            value.shape = ir.Shape([*self.leading[name], *_dims(values_by_name(work.graph)[self.like[name]])])

    def _arrange(self, ends: Sequence[str]) -> None:
        """Put matrices side by side in the place of leading axes, and leave derivatives alone among the outputs."""
        graph = self.work.graph
        values, op = values_by_name(graph), Builder(used_names(graph))
        op.prefix = self.kind
        counts: dict[str, ir.Value] = {}  # by symbol
        inputs, outputs = [], []
        for name, label in self.label.items():
            value, like, symbols = values[name], values[self.like[name]], self.leading[name]
            rank = len(_dims(like))
            flat = rank not in (1, 2)
            several, swapped = rank == 2 or len(symbols) == 2, [*range(len(symbols), -1, -1)]
            swapped += [len(swapped)] if rank == 2 else []  # its own inverse
            rows, minus = _elements(op, like) if flat else op.length(like, 0), op.ints([-1])
            lead = [counts["nadj"], minus] if len(symbols) == 2 else [minus]
            if name in ends:
                new = op.Reshape(value, op.joined(*lead, rows)) if flat else value
                new = op.Transpose(new, perm=swapped)
                new = op.Reshape(new, op.joined(rows, minus)) if several else new
                outputs.append(self._declared(new, label, like, symbols, value))
                continue
            seed = self._declared(ir.Value(), label, like, symbols, value)
            inputs.append(seed)
            columns = [op.length(like, 1)] if rank == 2 else []
            new = op.Reshape(seed, op.joined(rows, *lead[::-1], *columns)) if several else seed
            new = op.Transpose(new, perm=swapped)
            new = op.Reshape(new, op.joined(*lead, op.shape(like))) if flat else new
            counts.setdefault(symbols[0], op.length(new, 0))
            value.replace_all_uses_with(new)
            graph.inputs.remove(value)
        for name in (y for y in self.outputs if y not in self.ys):  # their derivative is 0
            like, label = values[name], self.prefixes[0] + name
            if self.kind == "fwd":
                rows = _elements(op, like) if len(_dims(like)) not in (1, 2) else op.length(like, 0)
                columns = op.Mul(counts["nfwd"], op.length(like, 1)) if len(_dims(like)) == 2 else counts["nfwd"]
                zeros = op.filled(op.joined(rows, columns), 0, element_type(inputs[0]))
                outputs.append(self._declared(zeros, label, like, ["nfwd"], inputs[0]))
                continue
            inputs.append(self._declared(ir.Value(), label, like, ["nadj"], inputs[0]))
            if self.kind == "fwd_adj":
                label = self.prefixes[1] + label
                inputs.append(self._declared(ir.Value(), label, like, ["nadj", "nfwd"], inputs[0]))
        labels = {str(value.name) for value in (*inputs, *outputs)}
        for inner in (graph, *graph.subgraphs()):
            for value in [*inner.inputs, *inner.initializers.values(), *(y for node in inner for y in node.outputs)]:
                if value.name in labels:
                    value.name = op.unique(value.name)
        graph.inputs.extend(inputs)
        graph.outputs[:] = outputs
        self.work.append(op)
        graph.sort()
        drop_dead(graph)
        for value in [*graph.initializers.values()]:  # onnxruntime would warn of those that nothing reads
            if not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                del graph.initializers[str(value.name)]

    def _declared(
        self, value: ir.Value, label: str, like: ir.Value, symbols: Sequence[str], typed: ir.Value
    ) -> ir.Value:
        """A seed or a result with its name, type and shape; CasADi finds out lengths by their symbols."""
        lengths = [f"{like.name}_{n}" if d is None else d for n, d in enumerate(_dims(like))]
        if len(lengths) > 2 and any(isinstance(d, str) for d in lengths):
            lengths = [f"{like.name}_elements"]
        rows = lengths[0] if len(lengths) in (1, 2) else prod(lengths)
        columns = "_".join(symbols[::-1]) + (f"_x{lengths[1]}" if len(lengths) == 2 and lengths[1] != 1 else "")
        value.name, value.type, value.shape = label, typed.type, ir.Shape([rows, columns])
        return value


def _dims(value: ir.Value) -> Dims:
    """Lengths of a value of known rank."""
    return dims(value) or ()


def _elements(op: Builder, value: ir.Value) -> ir.Value:
    """How many elements a value has, of shape (1,)."""
    lengths = known_lengths(value)
    return op.ReduceProd(op.shape(value), keepdims=1) if lengths is None else op.ints([prod(lengths)])
