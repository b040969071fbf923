"""`Trainer`: runs a training graph step by step in stock onnxruntime, with its state kept where the session has it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto

from onnx_backprop.converters import pages
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.training.names import GOOD_STEPS, LEAST_SCALE, LOSS_SCALE, SKIPPED_STEPS
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.slots import COUNTER, RANDOM, SCALE
from onnx_backprop.converters.training.split import step_alone
from onnx_backprop.distributed import connected
from onnx_backprop.opset.core.errors import CheckpointError, InvalidArgumentError, require_numbers, warn
from onnx_backprop.opset.core.hints import explaining, near
from onnx_backprop.opset.core.mapped import give_back, whole
from onnx_backprop.opset.functions.use_kernels import DEFAULT_KERNELS, PYTHON_KERNELS
from onnx_backprop.opset.graphs.edit import without_tensors
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.ort_ops import (
    Named,
    NativeGraph,
    SessionOptions,
    be_lean,
    default_options,
    kernels_on,
    lower,
    require_operators,
    session,
)
from onnx_backprop.providers.choose import chosen
from onnx_backprop.providers.memory import Copies, Memory
from onnx_backprop.providers.placed import Placed, check_kernels, options_for
from onnx_backprop.providers.placement import Placement
from onnx_backprop.providers.watch import watch
from onnx_backprop.training.buffers import Buffers
from onnx_backprop.training.callbacks.base import CallbackStates, without_callbacks
from onnx_backprop.training.checkpoint import (
    check_tensors,
    operators,
    read_checkpoint,
    read_progress,
    warn_of_another,
    write_checkpoint,
)
from onnx_backprop.training.copying import reduced
from onnx_backprop.training.divergence import AT_ONCE, accept, check_finite, diverged, not_finite
from onnx_backprop.training.evaluation import Evaluator, lengths_of
from onnx_backprop.training.fitting import fit
from onnx_backprop.training.inputs import Inputs, refusals
from onnx_backprop.training.measures import Metrics, chosen_metrics
from onnx_backprop.training.opening import check_arguments, declared_rate, first_seed, open_model, take_frozen
from onnx_backprop.training.rates import find_learning_rate
from onnx_backprop.training.reports.history import Losses, Measured
from onnx_backprop.training.reports.summary import summary
from onnx_backprop.training.schedules import Schedule, checked_rate, described

if TYPE_CHECKING:
    from onnx_backprop.training.ranks import Ranks

Feeds = Mapping[str, Any]
OrtValue = onnxruntime.OrtValue
LOOKED_AT = 100  # steps between two looks at the weights: losses may be finite where max(NaN, 0) is 0


class Trainer:
    """Trains a graph that `training_graph` has made with an optimizer.

        trainer = ob.Trainer(ob.training_graph("model.onnx", loss="mse", optimizer="adamw"))
        for x, target in batches:
            loss = trainer.step(x=x, target=target)
        trainer.export("trained.onnx")

    The state (parameters, optimizer, running statistics, random numbers) stays in buffers of onnxruntime. Native
    updates overwrite their tensors at the end of a step. The rest of the state has two sets of buffers: a step reads
    one and writes the other, and they swap when the step has succeeded. A step that fails, as for a target of another
    shape, leaves the state unchanged.

    A graph of precision="fp16" skips the update if a gradient is not finite, and halves the scale of its loss.

    learning_rate: of the next step. steps: how many have run. epoch, batch: where `fit` is. kept: the checkpoint that
    was saved or loaded last, and its step. losses: of the steps so far, thinned, for a curve. read: the losses that
    were read last, by the number of the step.
    """

    fit, find_learning_rate, summary = fit, find_learning_rate, summary

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: the graph, the arguments, and the state bit for bit; errors as `copying.reduced`."""
        return reduced(self)

    @explaining()
    def __init__(
        self,
        graph: TrainingGraph | ModelProto | ir.Model | str | Path,
        *,
        learning_rate: float = 1e-3,
        seed: int | None = None,
        kernels: str | None = "native",
        session_options: SessionOptions | None = None,
        communicator: Any = None,
        sync_batch_norm: bool = False,
        overlap: bool = True,
        shard_update: bool = False,
        verify_every: int = 100,
        device: str | None = None,
        providers: Sequence[Named] | None = None,
        read_every: int = 1,
    ) -> None:
        """graph: a TrainingGraph, or a file written by `TrainingGraph.save`. seed: of the masks of Dropout and of the
        noise of private steps. None: 0, or with noise a secret one.

        kernels: what the operators of our domain run on, see `use_kernels`; None for those in the graph. If the native
        ones cannot work, "onnx" replaces them, with a warning; the attribute `kernels` says which.

        session_options: yours. Memory patterns and reuse are turned off in them, and nodes run in the graph's order;
        otherwise onnxruntime would keep more memory than a step needs at a time.

        communicator: one of mpi4py, as MPI.COMM_WORLD, or a `distributed.Communicator`. All its ranks create this
        trainer and call the same methods. A step then takes the whole batch on every rank, which uses its share of the
        rows, or a `distributed.Shard`; docs/distributed.md says what is averaged how.
        sync_batch_norm: standardise by the statistics of the whole batch, not those of a rank's rows: two messages for
        each BatchNormalization forward and one backward.
        overlap: sum gradients during the backward pass if possible: for float32 gradients, the native kernels and an
        engine with `start`, such as MPI. False: one sum after it.
        shard_update: each rank updates a part of the parameters and keeps the optimizer's state of that part alone;
        then they exchange the parts. The result has the same bits. All ranks must then call `state` and whatever reads
        running means of the weights.
        verify_every: the number of steps after which ranks compare their states, 0 for never.

        device: what the steps run on, of `devices()`: "cpu", "webgpu", "cuda", …. The state stays in its memory, and
        operators of our domain run as standard ones. The log and `placement` name what runs on the CPU nevertheless.
        providers: a list as onnxruntime takes it, instead of device.
        read_every: the number of steps after which losses are read, since reading one waits for the device. `step` then
        returns the last one that was read, NaN before; a loss that is not finite is found as late.

        Errors: InvalidArgumentError for a graph without an optimizer; KernelError for a device that is missing;
        ReplicaError for ranks with another graph, another program or, after a step, other weights.
        """
        self.graph: TrainingGraph = graph if isinstance(graph, TrainingGraph) else TrainingGraph.load(graph)
        if not self.graph.updates:
            raise InvalidArgumentError(
                "the graph has no optimizer, its outputs are gradients. Make it with training_graph(…, optimizer=…)"
            )
        check_arguments(seed, session_options, read_every)
        self.communicator = connected(communicator)
        alone = self.communicator.size == 1
        for name, asked in {"sync_batch_norm": sync_batch_norm, "shard_update": shard_update}.items():
            if alone and asked:
                warn("does nothing on one rank. Start several, as with mpiexec -n 4", argument=name)
        target = chosen(device, providers)
        if target is not None:
            check_kernels(kernels)
        if not alone and (target is not None or read_every > 1):
            raise InvalidArgumentError("device, providers, read_every: go with one rank, not several. Leave them out")
        self.where = {"device": device, "providers": providers}
        self.arguments = {
            "kernels": kernels,
            "session_options": session_options,
            "read_every": read_every,
            **self.where,
        }
        state = self.graph.initial_state(copy=not alone)
        if isinstance(graph, str | Path):
            self.graph = self.graph.without_values()  # which nobody else holds
        self.inputs = Inputs(self.graph)
        self._no_rate = declared_rate(self.graph)
        self.schedule: Schedule | None = None
        self.learning_rate = learning_rate
        self.epoch = 0
        self.batch = 0
        threads = self.communicator.threads
        if target is not None:
            options = be_lean(session_options or options_for(target))
            self.kernels: str | None = DEFAULT_KERNELS
        else:
            options = session_options or default_options(
                python_operators=kernels in PYTHON_KERNELS, lean=True, threads=threads
            )
            options = be_lean(options)
            self.kernels = kernels_on(options, kernels)
        self.session_options = options
        model = without_tensors(self.graph.model, self.graph.updates)
        if target is not None and not target.limits.nan:
            watch(self.graph, model)
        self._ranks: Ranks | None = None
        if not alone:
            model = whole(model)
            require_operators("training on several ranks")
            from onnx_backprop.training.ranks import Ranks

            self._ranks = Ranks(
                self, model, verify_every, sync_batch_norm=sync_batch_norm, overlap=overlap, shard_update=shard_update
            )
            model = self._ranks.update
        elif self.graph.options.blocks:  # or else logits would be computed whole, which no step reads
            model = step_alone(self.graph, model)
        self._frozen: dict[str, OrtValue] = {}
        self._memory, self._placed, self._session = None, None, None
        native = NativeGraph(model)
        if target is not None:
            self._memory = Memory(target)
            take_frozen(model, self._frozen, self._memory)
            self._placed = Placed(model, target, options)
        else:
            in_order = options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
            native = lower(model, self.kernels, [self.graph.loss], self.graph.updates if in_order else None)
            if alone:
                take_frozen(native.model, self._frozen, self._memory)
            self._session = session(native.model, kernels=None, session_options=options)
        self._division = None if self._ranks is None else self._ranks.division
        self._buffers = Buffers(
            self.graph,
            self._session,
            native.in_place,
            native.guard,
            self._division,
            frozen=self._frozen,
            memory=self._memory,
            unread=int(read_every),
        )
        open_ = partial(open_model, frozen=self._frozen, memory=self._memory, target=target, options=options)
        self._evaluator = Evaluator(self.graph, self.inputs, open_, self._frozen)  # nothing that refers to this trainer
        counters = {name: self.graph.slot(COUNTER, name) for name in (GOOD_STEPS, SKIPPED_STEPS)}
        self._counters = {LOSS_SCALE: self.graph.slot(SCALE), **counters}
        if random := self.graph.slot(RANDOM):
            state[random][0] = first_seed(seed, self.graph)
        if self._ranks is not None:
            self._ranks.start(state)
        self._accepted = not_finite(state)
        self._buffers.set(state)
        give_back()
        self.kept: tuple[str | Path, int] | None = None
        self.losses = Losses()
        self.read: dict[int, float] = {}
        self.callback_states = CallbackStates()

    @property
    def placement(self) -> Placement | None:
        """Where the nodes of a step run; None on the CPU, and before the first step on a device."""
        return None if self._placed is None else self._placed.placement

    @property
    def copies(self) -> Copies:
        """How many tensors of the state, and weights, were copied to the device and back; none on the CPU."""
        return Copies() if self._memory is None else self._memory.copies

    def __repr__(self) -> str:
        """What it trains and how far it is, in one line."""
        loss = "" if math.isnan(self.losses.last) else f", loss {self.losses.last:.4g}"
        return f"<Trainer of {self.graph!r}: {self.steps} steps{loss}, learning rate {self.learning_rate:g}>"

    def _repr_html_(self) -> str:
        """For notebooks: where it is, and the losses so far."""
        facts = {"graph": repr(self.graph)[1:-1], "steps": str(self.steps), "epoch": str(self.epoch)}
        facts |= {"learning rate": f"{self.learning_rate:g}", "kernels": str(self.kernels or "the file's")}
        facts |= {} if math.isnan(self.losses.last) else {"loss": f"{self.losses.last:.6g}"}
        curve = [pages.chart({"loss": self.losses.points}, "step", "loss")] if self.losses.points else []
        return pages.fragment(pages.facts(facts), *curve)

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, a finite number of 0 or more; setting another is an InvalidArgumentError.

        One that is set stays: it takes the place of the schedule.
        """
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._set_rate(value)
        self.schedule = None

    def _set_rate(self, value: float) -> None:
        rate = np.full_like(self._no_rate, checked_rate(value, self._no_rate.dtype))
        self._rate = OrtValue.ortvalue_from_numpy(rate)
        self._learning_rate = float(value)

    def step(self, /, *batch: Any, **more: Any) -> float:
        """Run one training step on a batch; return the loss before the update.

        The batch: arrays by the names of `graph.inputs`, as keywords or as one mapping; or in their order, as arguments
        or as one tuple or list, as a DataLoader gives it. They are cast to the types of the graph within their kind
        (float64 to float32, int32 to int64).
        Errors: InvalidArgumentError for names that are missing, unknown or given twice, too many arrays, arrays of
        another kind or shape, labels of classes that do not exist, no rows, and whatever else onnxruntime cannot run;
        FloatingPointError for a loss that is not finite, with the reason if the batch holds NaN or infinity, or no
        label that counts. The state then stays as it was. Every hundredth step on the CPU, a weight that is no longer
        finite is a FloatingPointError too; a step on a device notices it at once.
        """
        buffers = self._buffers
        feeds = self.inputs.together(batch, more)
        fed = self.inputs.ort_values(feeds) if self._ranks is None else self._ranks.summed(feeds, buffers.state)
        with refusals(fed):
            if self._placed is None:
                self._run(fed)
            else:
                self._placed.run(lengths_of(fed), partial(self._run, fed))
        losses = self._read(buffers.steps + 1, feeds) if buffers.is_full else []
        buffers.renew()
        if self._division is not None:
            self._division.exchange(buffers.state)
        if losses and self.loss_scale == LEAST_SCALE and self._counter(GOOD_STEPS) == 0:
            raise diverged(f"no scale of the loss keeps the gradients finite in step {self.steps}", self.kept)
        if self._ranks is not None:
            self._ranks.verify()
        elif self._memory is None and self.steps % LOOKED_AT == 0:
            state = {name: self._buffers.state[name] for name in self.graph.parameters}
            read = {name: value for name, value in state.items() if value.element_type() != TensorProto.BFLOAT16}
            weights = self._buffers.arrays(read, copy=False)
            check_finite(weights, self._accepted, step=self.steps, kept=self.kept, instead="")
        self._keep(losses)
        return self.losses.last

    def _run(self, fed: Mapping[str, OrtValue], session: onnxruntime.InferenceSession | None = None) -> None:
        """A step in a session, or in the only one."""
        if session is not None:
            self._buffers.use(session)
            self._session = session
        binding = self._buffers.binding
        for name, value in fed.items():
            binding.bind_ortvalue_input(name, value)
        if self.graph.learning_rate is not None:
            binding.bind_ortvalue_input(self.graph.learning_rate, self._rate)
        self._buffers.run()

    def _read(self, last: int, feeds: Feeds | None = None) -> list[tuple[int, float]]:
        """The steps up to `last` whose losses were not read, and the losses; FloatingPointError for no finite number.

        feeds: of the last one, whose state is not renewed yet.
        """
        losses = self._buffers.losses(last)
        result = list(zip(range(last - len(losses) + 1, last + 1), losses, strict=True))
        for step, loss in result:
            if not math.isfinite(loss):
                what = f"the loss is {loss} in step {step}"
                fault = self.inputs.fault(what, feeds) if feeds is not None and step == last else None
                if fault is None and step <= self.graph.options.accumulate:
                    fault = diverged(what, self.kept, AT_ONCE)
                raise fault or diverged(f"{what} (learning rate {self.learning_rate:g})", self.kept)
        return result

    def read_losses(self) -> list[float]:
        """The losses of the steps since the last one that was read, see `read_every`; errors as `step`."""
        losses = self._read(self.steps)
        self._keep(losses)
        return [loss for _, loss in losses]

    def _keep(self, losses: Sequence[tuple[int, float]]) -> None:
        for step, loss in losses:
            self.losses.add(step, loss)
        self.read = dict(losses) or self.read

    @property
    def steps(self) -> int:
        """How many steps have run."""
        self._buffers.swap_if_renewed()
        return self._buffers.steps

    @property
    def skipped_steps(self) -> int:
        """How many of the steps have left out their update, since a gradient was not finite; 0 without a loss scale."""
        return int(self._counter(SKIPPED_STEPS) or 0)

    @property
    def loss_scale(self) -> float | None:
        """What the loss of the next step is multiplied by; None where the graph does not scale it."""
        return self._counter(LOSS_SCALE)

    def _counter(self, name: str) -> float | None:
        """A number of the loss scale; None where the graph has none."""
        slot = self._counters[name]
        return None if slot is None else float(self._buffers.on_host(self._buffers.state[slot]).numpy())

    @property
    def gradient_norms(self) -> dict[str, float]:
        """‖gradient‖₂ of every parameter in the last step; InvalidArgumentError unless the graph computes them."""
        if self.graph.gradient_norms is None:
            raise InvalidArgumentError("the graph has no gradient norms. Make it with gradient_norms=True")
        norms = self._buffers.result(self.graph.gradient_norms)
        return dict(zip(self.graph.parameters, map(float, norms), strict=True))

    @property
    def input_gradients(self) -> dict[str, np.ndarray]:
        """The gradient of the loss by each input of `wrt_inputs` in the last step, at the parameters before it.

        Errors: InvalidArgumentError for a graph without `wrt_inputs`, before the first step, and on several ranks.
        """
        if not self.graph.input_gradients:
            raise InvalidArgumentError("the graph has no gradients of inputs. Make it with wrt_inputs=[…]")
        if not self._buffers.more:
            raise InvalidArgumentError(
                "there are no gradients of inputs "
                + ("before the first step" if self._ranks is None else "on several ranks. Train on one")
            )
        return {x: np.array(self._buffers.more[g].numpy()) for x, g in self.graph.input_gradients.items()}

    def state(self) -> dict[str, np.ndarray]:
        """A copy of everything that a step renews. All ranks call this, as between updates gradients are summed."""
        return self._state(copy=True)

    def _state(self, *, copy: bool) -> dict[str, np.ndarray]:
        if self._ranks is not None and (new := self._ranks.sum_waiting(self._buffers.state)):
            self.set_state(new)
        return self._buffers.arrays(self._buffers.state, copy=copy)

    def held_by_all(self) -> dict[str, np.ndarray]:
        """A copy of what a step renews and every rank has the whole of."""
        parts = {} if self._division is None else self._division.kept
        return self._buffers.arrays({name: value for name, value in self._buffers.state.items() if name not in parts})

    def set_state(self, values: Mapping[str, np.ndarray]) -> None:
        """Put values in the place of parts of the state; InvalidArgumentError for unknown names and other shapes."""
        state = self.state()
        for name, value in values.items():
            if name not in state:
                raise InvalidArgumentError(f"expected names of the state, got {name!r}{near(name, state)}")
            if np.shape(value) != state[name].shape:
                raise InvalidArgumentError(f"{name!r} has shape {state[name].shape}, got {np.shape(value)}")
            state[name] = np.asarray(value).astype(state[name].dtype)
        accepted = {name: state[name] for name in values}
        self._buffers.set(state)
        accept(self._accepted, accepted)

    def parameters(self, *, ema: bool = False) -> dict[str, np.ndarray]:
        """Copies of the parameters, or of their running means."""
        source = self._weights(ema=ema)
        return self._buffers.arrays({name: source[name] for name in self.graph.parameters})

    def _weights(self, *, ema: bool) -> dict[str, OrtValue]:
        """What the forward model reads: the parameters, or their running means, and the running statistics."""
        result = {name: self._buffers.state[name] for name in self.graph.forward_state}
        if not ema:
            return result
        means = {source: name for name, source in self.graph.copies.items()}
        if not means:
            raise InvalidArgumentError("the optimizer keeps no running means. Make it with ema=0.999")
        for name, mean in means.items():
            array = self._buffers.arrays({mean: self._buffers.state[mean]})[mean]
            same = array.dtype == (dtype := self._buffers.dtype(name)) and self._division is None
            result[name] = self._buffers.state[mean] if same else self._buffers.ort_value(name, array.astype(dtype))
        return result

    def predict(self, /, *batch: Any, ema: bool = False, **more: Any) -> dict[str, Any]:
        """The outputs in inference mode for one batch, as `step` takes it; with a target, the loss too.

        The results are arrays; for outputs that are no tensors, such as the maps of ZipMap, they are what
        `InferenceSession.run` returns.
        """
        return self._evaluator.predictions(self.inputs.together(batch, more), self._weights(ema=ema))

    def evaluate(
        self,
        loader: Iterable[Any] | Feeds | None = None,
        /,
        *arrays: Any,
        ema: bool = False,
        metrics: Metrics | None = None,
        **more: Any,
    ) -> Measured:
        """The loss in inference mode: of one batch, or of a loader's, weighted by the sizes of their targets.

        Without a single target the length of axis 0 of the first input weighs them. If labels are ignored or classes
        have weights, it is what the labels of a batch count. The result is a float whose `metrics` are numbers, and
        arrays of them, by name. Batches of `NextToken` are weighted by the tokens that count, and have the metric
        `perplexity`. A batch is given as `step` takes it, except that a single tuple or list is a loader. ema: of the
        running means of the weights. metrics: as `fit` takes them. Errors: as
        `step`; FloatingPointError for a batch whose data make the loss not finite.
        """
        weights, asked = self._weights(ema=ema), chosen_metrics(metrics)
        if loader is None or isinstance(loader, Mapping) or arrays or more:
            batch = self.inputs.together([loader, *arrays], more)
            return self._evaluator.mean([batch], weights, None, asked, what="the loss is")
        if not isinstance(loader, Iterable):
            self.inputs.check_loader(loader)
        return self._evaluator.mean(loader, weights, self._ranks, asked)

    def named(self, batch: Any) -> dict[str, Any]:
        """A batch of a loader by names: a mapping, or a sequence in the order of `graph.inputs`."""
        return self.inputs.named(batch)

    def end_profiling(self) -> str:
        """Write what onnxruntime has measured, where the session options ask for it; the path of the file.

        On a device that is of the lengths of the last step, and there is nothing before the first.
        """
        if self._session is None:
            raise InvalidArgumentError("there is nothing measured before the first step on a device")
        return self._session.end_profiling()

    @property
    def updates(self) -> int:
        """How many updates there have been: steps, but for accumulation and those that were skipped."""
        return (self.steps - self.skipped_steps) // self.graph.options.accumulate

    @property
    def waiting(self) -> int:
        """How many steps were accumulated since the last update, which the next one will contain."""
        return (self.steps - self.skipped_steps) % self.graph.options.accumulate

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, from which a training continues bit for bit. It appears complete or not at all.

        Errors: FloatingPointError if the training has diverged, see `fit`. All ranks call this, rank 0 writes.
        """
        state = self._finite(self._state(copy=False))
        callbacks, tensors = self.callback_states.described()
        about = {
            "steps": self.steps,
            "epoch": self.epoch,
            "batch": self.batch,
            "learning_rate": self.learning_rate,
            "schedule": None if self.schedule is None else described(self.schedule),
            "settings": self.graph.settings,
            "operators": operators(self.graph),
        } | ({"callbacks": callbacks} if callbacks else {})
        if self.communicator.rank == 0:
            write_checkpoint(path, state | tensors, about)
        self.kept = path, self.steps

    def _finite(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.read_losses()
        check_finite(arrays, self._accepted, step=self.steps, kept=self.kept)
        return arrays

    def load(self, path: str | Path) -> Trainer:
        """Continue from a checkpoint; returns the trainer.

        Errors: CheckpointError for a file that is no checkpoint, or whose tensors do not fit the graph, and the trainer
        stays as it was. All ranks call this, rank 0 reads.

        Warns: OnnxBackpropWarning for other operators in the forward model, another loss or kind of optimizer.
        """
        declared = self._buffers.declared()
        read, about = read_checkpoint(path) if self.communicator.rank == 0 else ({}, {})
        tensors = without_callbacks(read)
        if self._ranks is not None:
            tensors, about = self._ranks.from_first(tensors, about, declared)
        progress = read_progress(path, about)
        check_tensors(path, tensors, declared)
        if self.communicator.rank == 0:
            warn_of_another(path, about, self.graph)
        if progress.learning_rate is not None:
            try:
                self._set_rate(progress.learning_rate)  # first, since it may be refused
            except InvalidArgumentError as e:
                raise CheckpointError(f"{path}: {e}") from e
        self.callback_states.take(path, about, read, self.communicator)
        self.rewind({name: tensors[name] for name in declared}, progress.steps)
        self.epoch, self.batch = progress.epoch, progress.batch
        self.schedule = progress.schedule
        self.losses, self.read = Losses(), {}  # those before are not known
        self._accepted = not_finite(tensors)
        self.kept = path, self.steps
        return self

    def rewind(self, state: dict[str, np.ndarray], steps: int) -> None:
        """Continue from a complete state, as that of a step; all ranks call this.

        Errors: InvalidArgumentError for other names or shapes, and a number of steps below 0.
        """
        require_numbers(0, whole=True, steps=steps)
        declared = self._buffers.declared()
        if wrong := [n for n in {**declared, **state} if n not in declared or n not in state]:
            what = "is no part of it" if wrong[0] in state else "is missing"
            raise InvalidArgumentError(
                f"expected all {len(declared)} tensors of the state; {wrong[0]!r} {what}", "state"
            )
        for name, (shape, _) in declared.items():
            if np.shape(state[name]) != tuple(shape):
                got = np.shape(state[name])
                raise InvalidArgumentError(f"{name!r} has shape {tuple(shape)}, got an array of {got}", "state")
        if self._ranks is not None:
            self._ranks.replica.forget()
        self._buffers.set(dict(state))
        self._buffers.restart(steps)

    def export(self, path: str | Path, *, ema: bool = False) -> None:
        """Write the plain inference model with the trained weights, or with their running means.

        It has the inputs, outputs, names and metadata of the original model; above 2 GB the weights lie in a file
        beside it. Errors: FloatingPointError if the training has diverged, see `fit`. With several ranks, rank 0
        writes.
        """
        values = self._finite(self._buffers.arrays(self._weights(ema=ema), copy=False))
        if self.communicator.rank == 0:
            save_model(self.graph.inference_model(values, mapped=True), path)
