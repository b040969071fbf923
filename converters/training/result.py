"""`TrainingGraph`: a training graph, what a training loop needs to know about it, and the models inside it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from onnx import ModelProto, StringStringEntryProto, TensorProto, helper

from onnx_backprop.converters import pages
from onnx_backprop.converters.parameters import table
from onnx_backprop.converters.parameters.table import FROZEN, STATISTIC, TRAINED, Row, counted
from onnx_backprop.converters.prepare.exporters.origins import origin_of
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.tables import wrapped
from onnx_backprop.converters.training.metadata import FORMAT, METADATA, OPTIONAL, described
from onnx_backprop.converters.training.settings import Settings
from onnx_backprop.converters.training.slots import MEAN, Slot
from onnx_backprop.converters.training.whole_decoder import stored_decoder
from onnx_backprop.opset.core.errors import InvalidArgumentError, printable, warn
from onnx_backprop.opset.core.mapped import to_array, whole
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import assign, copied, replace_values, without_tensors
from onnx_backprop.opset.graphs.lazy import ir

_SHOWN = 4  # nodes that the summary lists
_ELSEWHERE = "trainer"  # where the values of a graph without them lie


@dataclass(frozen=True, repr=False)
class TrainingGraph:
    """A training graph and what a training loop needs to know about it.

    model: if the file has 64 MiB or more of weights beside it, this refers to them, see `save_model`. Without an
        optimizer, its outputs are the loss, the model's own outputs, then the gradients in the order of
        `input_gradients` and `parameters`; its inputs are the data, the target, then the parameters, with the model's
        values as defaults. With an optimizer, the new values of everything in `updates` replace the parameters'
        gradients, and the learning rate and the state are further inputs.
    loss: the name of the loss output, a one-element tensor.
    inputs: what every step must feed: the data inputs, then the targets.
    target: the name of the first input of the loss, None for a model that computes its own loss.
    parameters: each trainable initializer and the name of its gradient; an output if there is no optimizer.
    outputs: the outputs of the forward model, in its order.
    learning_rate: the name of the 0-D input, None without an optimizer.
    state: a record of each input that a step updates: the parameters, the state of the optimizer, running statistics of
        BatchNormalization, and the state of Dropout's random numbers.
    updates: each of these inputs and the output with its new value.
    gradient_norms: the name of the output with ‖gradient‖₂ of every parameter; None if it was not requested.
    input_gradients: each input of `wrt_inputs` and the output with its gradient of the loss.
    frozen: the float initializers that could be trained and are not.
    optional: inputs that a step may be fed and that the graph computes otherwise: masks, positions and lengths of a
        decoder.
    left_out: the float initializers that are no parameters, and what each is, as `exponent of Pow`.
    settings: the requested options, as plain values.
    """

    model: ModelProto
    loss: str
    inputs: tuple[str, ...]
    target: str | None
    parameters: dict[str, str]
    outputs: tuple[str, ...] = ()
    learning_rate: str | None = None
    state: tuple[Slot, ...] = ()
    gradient_norms: str | None = None
    input_gradients: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def updates(self) -> dict[str, str]:
        """Each input that a step renews and the output that holds its new value."""
        return {slot.name: slot.output for slot in self.state}

    @cached_property
    def fill(self) -> dict[str, float]:
        """Each input of the state that starts full of a number, and the number."""
        return {slot.name: slot.start for slot in self.state if slot.start is not None}

    @cached_property
    def copies(self) -> dict[str, str]:
        """Each running mean of a parameter, and the parameter, as which it starts."""
        return {slot.name: slot.of for slot in self.state if slot.role == MEAN}

    def slot(self, role: str, of: str = "") -> str | None:
        """The name of the state of a role, where there is one of it; None where the graph keeps none."""
        return next((slot.name for slot in self.state if slot.role == role and slot.of == of), None)

    @cached_property
    def options(self) -> Settings:
        """`settings` as a record."""
        return Settings.of(self.settings)

    @property
    def _tensors(self) -> dict[str, TensorProto]:
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    def without_values(self) -> TrainingGraph:
        """The graph without the first values of its state, for a trainer that has them in memory of its own.

        `initial_values`, `initial_state` and `save` are refused of it; `inference_model` takes what `values` holds.
        """
        model = without_tensors(self.model, self.updates)
        for tensor in self.model.graph.initializer:
            if tensor.name in self.updates:
                model.graph.initializer.add(
                    name=tensor.name,
                    dims=tensor.dims,
                    data_type=tensor.data_type,
                    data_location=TensorProto.EXTERNAL,
                    metadata_props=tensor.metadata_props,
                    external_data=[StringStringEntryProto(key="location", value=_ELSEWHERE)],
                )
        return replace(self, model=model)

    def with_values(self, values: Mapping[str, np.ndarray]) -> TrainingGraph:
        """A graph that refers to no file and no trainer, for another process; values: of what a trainer has.

        Errors: UnsupportedError above 2 GB.
        """
        model = copied(self.model)
        for tensor in model.graph.initializer:
            if _is_elsewhere(tensor):
                replace_values(tensor, values[tensor.name])
        return replace(self, model=whole(model))

    def _require_values(self, given: Collection[str] = ()) -> None:
        if not {tensor.name for tensor in self.model.graph.initializer if _is_elsewhere(tensor)}.issubset(given):
            raise InvalidArgumentError(
                "the trainer has read this graph from a file and keeps the values that it trains, not those that it "
                "began with. TrainingGraph.load(path) has them, and a Trainer that is given one keeps it as it is"
            )

    def initial_values(self) -> dict[str, np.ndarray]:
        """The values of the parameters in the model, as arrays of one's own, in the order of `parameters`."""
        self._require_values()
        tensors = self._tensors
        return {name: np.array(to_array(tensors[name])) for name in self.parameters}

    def frozen_values(self) -> dict[str, np.ndarray]:
        """The values of the parameters that are not trained."""
        tensors = self._tensors
        return {name: np.array(to_array(tensors[name])) for name in self.frozen if name in tensors}

    def initial_state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """The first value of everything in `updates`: the parameters and statistics of the model, zeros, copies.

        copy: arrays of one's own; else those of the model cannot be written to.
        """
        self._require_values()
        tensors = self._tensors
        declared = {value.name: value.type.tensor_type for value in self.model.graph.input}
        result: dict[str, np.ndarray] = {}
        for name in self.updates:
            kind = helper.tensor_dtype_to_np_dtype(declared[name].elem_type)
            if name in self.fill:
                shape = [d.dim_value for d in declared[name].shape.dim]
                # zeros take no memory before somebody writes into them
                result[name] = np.full(shape, self.fill[name], kind) if self.fill[name] else np.zeros(shape, kind)
            else:
                first = to_array(tensors[self.copies.get(name, name)])
                result[name] = np.array(first, kind) if copy else np.asarray(first, kind)
        return result

    @property
    def forward_state(self) -> tuple[str, ...]:
        """What of the state the forward model reads: the parameters and the running statistics."""
        stored = self._tensors
        return tuple(name for name in dict.fromkeys((*self.parameters, *self.updates)) if name in stored)

    def eval_model(
        self, *, outputs: Sequence[str] | None = None, loss: bool = True, mapped: bool = False
    ) -> ModelProto:
        """The model with its loss in inference mode: Dropout passes, BatchNormalization uses its running statistics.

        Outputs: the loss, then `outputs`; default: the model's own. loss=False: only these, without the inputs of the
        loss. The parameters and statistics are inputs, with their values as defaults if the graph has them. mapped:
        weights in files stay there, as in `model`.
        """
        others = [name for name in (self.outputs if outputs is None else outputs) if name != self.loss]
        asked = [self.loss, *others] if loss else others
        model = _part(self, asked, "evaluation", keep_inputs=True)
        assign(model.graph.initializer, [tensor for tensor in model.graph.initializer if not _is_elsewhere(tensor)])
        return model if mapped else whole(model)

    def inference_model(
        self,
        values: Mapping[str, np.ndarray] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        mapped: bool = False,
    ) -> ModelProto:
        """The plain model in inference mode, with its original inputs, outputs and metadata and the weights `values`.

        A decoder has its original nodes too, with pasts and presents, unless tensors were tied.

        values: of parameters, trained or frozen, and statistics; those left out are as in the original model.
        outputs: names of tensors to return instead of the model's outputs.
        mapped: weights in files stay there, as in `model`.
        Errors: InvalidArgumentError for an unknown name, or another shape than the model's.
        """
        self._require_values(values or ())
        model = None if outputs else stored_decoder(self.model)
        if model is None:
            model = _part(self, list(outputs or self.outputs), None, keep_inputs=False)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        known = {*self.forward_state, *self.frozen, *self.parameters}
        for name, value in (values or {}).items():
            if name not in known:
                raise InvalidArgumentError(f"values: expected names of parameters or statistics, got {name!r}")
            if name not in tensors:
                continue
            tensor = tensors[name]
            if tuple(tensor.dims) != np.shape(value):
                raise InvalidArgumentError(
                    f"values: {name!r} has shape {tuple(tensor.dims)}, got an array of {np.shape(value)}"
                )
            kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            replace_values(tensor, np.asarray(value).astype(kind, copy=False))
        return model if mapped else whole(model)

    def summary(self, *, most: int | None = None) -> str:
        """A table of the tensors: names, shapes, numbers, and whether each is trained or why not.

        most: rows to show, None for all.
        """
        return "\n".join((*table.lines(self.rows(), most=most), *self.totals()))

    def rows(self) -> list[Row]:
        """What is trained, frozen, renewed by a step and left out, in this order."""
        from onnx_backprop.converters.parameters.structure import NEVER_TRAINED  # for which onnx_ir is imported

        tensors, doubtful = self._tensors, self.options.doubtful
        states = dict.fromkeys(self.parameters, TRAINED) | dict.fromkeys(self.frozen, FROZEN)
        states |= {name: STATISTIC for name in self.updates if name not in states}
        statistic, ratio = NEVER_TRAINED
        rest = {name: STATISTIC if what == statistic else what for name, what in self.left_out.items() if what != ratio}
        result: list[Row] = []
        for name, state in (states | {name: what for name, what in rest.items() if name not in states}).items():
            if name in tensors:
                module = origin_of(tensors[name]).name
                shape = tuple(tensors[name].dims)
                result.append(Row(name, "" if module == name else module, shape, state, doubtful.get(name, "")))
        return result

    def totals(self) -> list[str]:
        """The lines of the summary below its table."""
        from onnx_backprop.converters.parameters.structure import NEVER_TRAINED  # for which onnx_ir is imported

        numbers = counted(self.rows())
        lines = [f"{len(self.parameters)} parameters trained, {len(self.frozen)} frozen; numbers: {numbers}"]
        if kept := self.options.frozen_statistics:
            shown = ", ".join(kept[:_SHOWN]) + (f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else "")
            lines.append(printable(f"BatchNormalization in inference mode, being frozen: {shown}"))
        if privacy := self.options.privacy:
            divisor = privacy["expected"] or "the rows of the batch"
            noise = f"noise of {privacy['noise']:g} times that on their sum, divided by {divisor}"
            lines.append(f"rows: gradients clipped to {privacy['clip']:g}, {noise}")
        if memory := self.memory_summary():
            lines.append(f"activations: {memory}")
        if blocks := self.options.blocks:
            parts = ", ".join(f"{name} in blocks of {rows} rows at most" for name, rows in blocks.items())
            lines.append(printable(f"last product and loss: {parts}; logits are whole only where they are asked for"))
        if any(what not in NEVER_TRAINED for what in self.left_out.values()):
            lines.append("A name that is written out in `trainable` is trained all the same.")
        return [wrapped(line) for line in lines]

    def memory_summary(self) -> str:
        """What is expected of a budget of memory, in one sentence; nothing where there is none."""
        from onnx_backprop.converters.recompute.memory import describe  # for which onnx_ir is imported

        return describe(self.options.memory)

    def memory_told(self) -> str:
        """The former name of `memory_summary`, which 1.2 no longer knows."""
        warn("memory_told is called memory_summary, and 1.2 no longer knows this name. Write memory_summary")
        return self.memory_summary()

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def __repr__(self) -> str:
        """What it is, in one line."""
        numbers, given = counted(self.rows()), self.options.optimizer or {}
        optimizer = f", {given['name']}" if "name" in given else ""
        return (
            f"<TrainingGraph {printable(self.model.graph.name)!r}: ({', '.join(map(printable, self.inputs))}) -> "
            f"{printable(self.loss)}, {len(self.parameters)} parameters (numbers: {numbers}){optimizer}, "
            f"{len(self.model.graph.node)} nodes>"
        )

    def html(self) -> str:
        """The summary as a part of a page."""
        totals = "".join(f"<p>{pages.text(line)}</p>" for line in self.totals())
        return totals + table.page(self.rows())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return pages.fragment(f"<p><b>{pages.text(repr(self)[1:-1])}</b></p>", self.html())

    def save(self, path: str | Path) -> None:
        """Write the model; the file appears complete or not at all. InvalidArgumentError where it cannot be.

        `TrainingGraph.load` reads everything back from this one file.
        """
        self._require_values()
        save_model(self.model, path)

    @staticmethod
    def load(model: ModelProto | ir.Model | str | Path) -> TrainingGraph:
        """The training graph that a file, or a model, holds, as its graph or its training_info.

        Errors: InvalidArgumentError when it holds none, InvalidModelError when what it says about it cannot be true.
        """
        proto = load(model, mapped=True)
        if proto.training_info:
            from onnx_backprop.converters.training.standard.training_info import (
                from_training_info,  # which builds on this module
            )

            return from_training_info(proto)
        text = next((entry.value for entry in proto.metadata_props if entry.key == METADATA), None)
        if text is None:
            raise InvalidArgumentError(
                "the model is no training graph. Make one with training_graph(model, loss=…, optimizer=…) and save it"
            )
        hints = {name: hint for name, hint in get_type_hints(TrainingGraph).items() if name != "model"}
        return TrainingGraph(model=proto, **described(text, proto, hints))

    def describe(self) -> None:
        """Write what is known about the model into its metadata."""
        entries = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        entries = {name: value for name, value in entries.items() if value or name not in OPTIONAL}
        entries["state"] = [slot.described() for slot in self.state]
        assign(self.model.metadata_props, [entry for entry in self.model.metadata_props if entry.key != METADATA])
        text = json.dumps({"format": FORMAT, **entries}, ensure_ascii=False, allow_nan=False)
        self.model.metadata_props.add(key=METADATA, value=text)


def _is_elsewhere(tensor: TensorProto) -> bool:
    return any(entry.key == "location" and entry.value == _ELSEWHERE for entry in tensor.external_data)


def _part(graph: TrainingGraph, outputs: list[str], graph_name: str | None, *, keep_inputs: bool) -> ModelProto:
    from onnx_backprop.converters.training.parts import part  # for which onnx_ir is imported

    return part(graph, outputs, graph_name, keep_inputs=keep_inputs)
