"""`onnx-backprop train`: train a model on arrays in files."""

import argparse
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from onnx_backprop import __version__
from onnx_backprop.command.files import best_beside, checkpoint_beside
from onnx_backprop.command.images import OF_IMAGES, data_and_evaluation, of_images, scale_of
from onnx_backprop.command.options import ROWS, by_name, compilation_shown, say, shared, training_options
from onnx_backprop.command.parser import Command, argument, flag
from onnx_backprop.command.supervise import supervise
from onnx_backprop.command.training import (
    OF_LOSSES,
    OF_OPTIMIZERS,
    SCHEDULES,
    WATCHED,
    best_of,
    callbacks_of,
    check_watched,
    loss_with,
    optimizer_of,
    schedule_of,
    search_rate,
)
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.quantized.dequantize import dequantize
from onnx_backprop.converters.tables import sparkline
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.distributed.communicator import Communicator, anywhere
from onnx_backprop.distributed.failures import ending_all
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.progress import hidden, note
from onnx_backprop.opset.core.reading import load
from onnx_backprop.training.checkpoint import held
from onnx_backprop.training.data.batches import Batches
from onnx_backprop.training.inputs import Inputs, rows
from onnx_backprop.training.reports.history import Record, Records, read_log

CALIBRATION = 32  # batches that say how large the values of a quantised model are
Norms = dict[str, list[tuple[float, float]]]  # of a parameter's gradient: a number for every step


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    target = Path(arguments.output)
    checkpoint = checkpoint_beside(target)
    _check(arguments)
    if arguments.launch or arguments.restarts:
        return supervise(arguments, checkpoint)
    from onnx_backprop.distributed.mpi import world  # not before: it asks what is known of the machine

    communicator = world()
    arguments.quiet |= communicator.rank > 0
    with ending_all(communicator), hidden(really=arguments.quiet), ExitStack() as stack:
        if communicator.rank == 0:
            stack.enter_context(held(checkpoint))  # what is resumed from is nobody else's
        return _train(arguments, target, checkpoint, communicator)


def _train(arguments: argparse.Namespace, target: Path, checkpoint: Path, communicator: Communicator) -> int:
    from onnx_backprop import Trainer  # not before: the other commands need no runtime

    data, evaluation = data_and_evaluation(arguments)
    assert data is not None
    note(f"making a training graph of {arguments.model}")
    graph = training_graph(
        dequantize(arguments.model) if arguments.dequantize else arguments.model,
        gradient_norms=arguments.report is not None,
        lengths={} if arguments.memory is None else _lengths(arguments, data),
        **step_options(arguments, data),
    )
    loader, measured = loaders_of(graph, data, evaluation, arguments)
    plan = _plan(arguments, loader, measured)
    say(arguments, "\n".join((graph.summary(most=ROWS), *lines_of(plan))))
    note("opening it in onnxruntime")
    trainer = Trainer(
        graph,
        seed=arguments.seed or None,
        communicator=communicator,
        **by_name(arguments, "learning_rate sync_batch_norm shard_update device read_every"),
    )
    if arguments.resume and anywhere(communicator, communicator.rank == 0 and checkpoint.is_file()):
        trainer.load(checkpoint)
        say(arguments, f"resumed from {checkpoint} after {trainer.steps} steps")
    rates = None if trainer.steps or not arguments.find_rate else search_rate(arguments, trainer, loader)
    schedule = schedule_of(arguments, -(-len(loader) * arguments.epochs // arguments.accumulate))
    if trainer.steps and arguments.find_rate:
        schedule = None  # that of the checkpoint
    start = time.perf_counter()
    with explained(trainer, checkpoint):
        records, norms = fit_of(
            arguments,
            trainer,
            loader,
            schedule=schedule,
            callbacks=(calls := callbacks_of(arguments, best_beside(target))),
            evaluation=measured,
            metrics=arguments.metrics,
            ema=measured is not None and arguments.ema is not None,
            checkpoint=checkpoint,
        )
        seconds = time.perf_counter() - start
        note(f"writing {target}")
        trainer.export(target, ema=arguments.ema is not None)
        if arguments.dequantize and not arguments.floats and communicator.rank == 0:
            _requantize(arguments, target, loader)
    if trainer.placement is not None:
        say(arguments, f"device: {trainer.placement}")
    means = " of the running means" if arguments.ema is not None else ""
    outcome = outcome_of(records, seconds, trainer, means) | best_of(calls)
    if arguments.report and communicator.rank == 0:
        note("timing some steps for the report")
        facts = plan | outcome | program_of(arguments, trainer)
        write_report_of(arguments, trainer, loader, facts, records, norms, rates)
    curve = {"course": sparkline([r.loss for r in records])} if len(records) > 1 else {}
    say(arguments, "\n".join(lines_of(outcome | curve)))
    say(
        arguments,
        f"written: {target}{means and f' ({means[4:]} of the weights)'}, {checkpoint}"
        + (f", {best}" if (best := best_beside(target)).is_file() and arguments.keep_best else "")
        + (f", {arguments.report}" if arguments.report else ""),
    )
    return 0


def fit_of(
    arguments: argparse.Namespace, trainer: Any, loader: Batches, *, callbacks: Sequence[Any] = (), **more: Any
) -> tuple[Records, Norms]:
    """Train as the options say; records, and for a report the norms of gradients. more: what `Trainer.fit` takes."""
    norms: Norms = {name: [] for name in trainer.graph.parameters}

    def keep_norms(_: Any, record: Record) -> None:
        for name, value in trainer.gradient_norms.items():
            norms[name].append((float(record.step), value))

    all_calls = [*callbacks, *([keep_norms] if arguments.report else [])]
    with compilation_shown(quiet=arguments.quiet):
        records = trainer.fit(
            loader, callbacks=all_calls, progress=not arguments.quiet, **by_name(arguments, "epochs every log"), **more
        )
    return records, norms


@contextmanager
def explained(trainer: Any, checkpoint: Path) -> Iterator[None]:
    """A block in which a training that fails or is interrupted ends with one sentence."""
    try:
        yield
    except FloatingPointError as e:
        raise InvalidArgumentError(f"the training has failed: {e}") from e
    except KeyboardInterrupt as e:
        if trainer.kept:
            raise KeyboardInterrupt(f"--resume goes on from {checkpoint}, step {trainer.kept[1]}") from e
        raise


def _requantize(arguments: argparse.Namespace, target: Path, loader: Batches) -> None:
    """Put integers in the place of the floats that were written."""
    from onnx_backprop.quantization import requantize  # not before: it needs a runtime

    note(f"rounding {target} to integers")
    save_model(requantize(target, arguments.model, calibration=islice(loader, CALIBRATION)), target)
    say(arguments, "the losses are those of the floats; the file that is written rounds")


def lines_of(facts: Mapping[str, str]) -> Iterator[str]:
    return (f"{name}: {value}" for name, value in facts.items())


def _plan(arguments: argparse.Namespace, loader: Batches, measured: Batches | None) -> dict[str, str]:
    """What is about to be done."""
    plan = {"data": repr(loader)[len("<Batches of ") : -1]}
    if measured is not None:
        plan["evaluation"] = f"{measured.rows:,} rows, after every epoch"
    rate = "to be found" if arguments.find_rate else f"{arguments.learning_rate:g}"
    epochs = "1 epoch" if arguments.epochs == 1 else f"{arguments.epochs} epochs"
    plan["training"] = (
        f"{arguments.optimizer}, {arguments.loss}, {epochs}, {len(loader) * arguments.epochs:,} steps, "
        f"learning rate {rate} ({arguments.schedule})"
    )
    return plan


def program_of(arguments: argparse.Namespace, trainer: Any) -> dict[str, str]:
    """What the training can be done again with."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "onnx", "numpy"))
    return {
        "command": shlex.join(["onnx-backprop", *arguments.argv]),
        "program": f"onnx-backprop {__version__} (kernels {trainer.kernels!r}), {versions}",
    }


def _lengths(arguments: argparse.Namespace, data: Mapping[str, Any]) -> dict[str, int]:
    """The lengths of the model's symbolic dimensions in a step."""
    lengths: dict[str, int] = {}
    for value in load(arguments.model, mapped=True).graph.input:
        shape = np.shape(data[value.name]) if value.name in data else ()
        shape = (min(arguments.batch_size, *shape[:1]), *shape[1:]) if shape else shape
        for dim, length in zip(value.type.tensor_type.shape.dim, shape, strict=False):
            if dim.dim_param:
                lengths[dim.dim_param] = length
    return lengths


def _check(arguments: argparse.Namespace) -> None:
    """Before any long work."""
    check_device(arguments)
    if arguments.log and Path(arguments.log).suffix not in (".csv", ".jsonl"):
        raise InvalidArgumentError(f"--log: expected a name that ends in .csv or .jsonl, got {arguments.log}")
    if arguments.floats and not arguments.dequantize:
        raise InvalidArgumentError("--floats: goes with --dequantize")
    if arguments.size and arguments.layout != "classes":
        raise InvalidArgumentError("--size: goes with --layout classes")
    check_watched(arguments)


def check_device(arguments: argparse.Namespace) -> None:
    """KernelError, with what brings it, for a device that is not there."""
    if arguments.device:
        from onnx_backprop.providers.choose import chosen  # not before: the other commands need no runtime

        chosen(arguments.device, None)


def loaders_of(
    graph: TrainingGraph, data: Mapping[str, Any], evaluation: Mapping[str, Any] | None, arguments: argparse.Namespace
) -> tuple[Batches, Batches | None]:
    """Batches of the arrays that the graph's inputs are fed, checked, to train on and to evaluate on."""
    loader = _loader(graph, data, arguments, "--data", of_images(arguments))
    if evaluation is None:
        return loader, None
    return loader, _loader(graph, evaluation, arguments, "--evaluation", scale_of(arguments))


def _loader(
    graph: TrainingGraph, arrays: Mapping[str, Any], arguments: argparse.Namespace, option: str, more: Mapping[str, Any]
) -> Batches:
    missing = [name for name in graph.inputs if name not in arrays]
    if missing:
        raise InvalidArgumentError(
            f"{option}: expected arrays {', '.join(graph.inputs)}; {', '.join(map(repr, missing))} missing, "
            f"there are {', '.join(arrays) or 'none'}{_other_loss(missing, arrays)}"
        )
    chosen = {name: arrays[name] for name in graph.inputs}
    size = min(arguments.batch_size, max(map(rows, chosen.values()), default=1))
    try:
        loader = Batches(chosen, size, seed=arguments.seed, **more)
        Inputs(graph).check_loader(loader)
    except InvalidArgumentError as e:
        raise InvalidArgumentError(f"{option}: {e}") from e
    return loader


def _other_loss(missing: Sequence[str], arrays: Mapping[str, Any]) -> str:
    """What to do where the target that there is is another loss's."""
    if missing == ["target"] and "labels" in arrays:
        return ". Labels of classes go with --loss softmax_cross_entropy"
    return ". --loss mse, l1 and others read a target" if missing == ["labels"] and "target" in arrays else ""


def step_options(arguments: argparse.Namespace, data: Mapping[str, Any]) -> dict[str, Any]:
    """What train and web hand on to `training_graph`."""
    modes = by_name(arguments, "training_mode frozen_statistics")
    objective = {"loss": loss_with(arguments, data), "optimizer": optimizer_of(arguments)}
    return training_options(arguments) | modes | objective


def outcome_of(records: Records, seconds: float, trainer: Any, means: str) -> dict[str, str]:
    """What came out. means: what the evaluation is of, if that is not the weights themselves."""
    steps, takes = trainer.steps, trainer.graph.options.accumulate
    if not records:
        return {"steps": f"{steps}, all of them before"}
    ends = max(1, min(len(records) // 10, 100))
    first, last = (float(np.mean([r.loss for r in part])) for part in (records[:ends], records[-ends:]))
    before = f" ({steps} in all)" if steps > len(records) else ""
    one = median(r.seconds for r in records)  # the first of them compiles kernels
    facts = {"steps": f"{len(records)} in {seconds:.1f} s, {1000 * one:.2f} ms each{before}"}
    if trainer.waiting:
        facts["updates"] = f"{trainer.updates}, of {takes} steps each; the last {trainer.waiting} are in none"
    if records[-1].skipped is not None:
        facts["skipped steps"] = f"{records[-1].skipped} in all, their gradients were not finite"
    facts["training loss"] = f"{first:.4g} -> {last:.4g} (means of {ends} steps)"
    measured = [r.evaluation for r in records if r.evaluation is not None]
    if measured:
        facts[f"evaluation loss{means}"] = f"{measured[0]:.4g} -> {measured[-1]:.4g}"
    for name in dict.fromkeys(name for r in records for name in r.metrics):
        values = [r.metrics[name] for r in records if name in r.metrics]
        numbers = isinstance(values[-1], int | float)
        facts[f"{name}{means}"] = f"{values[0]:.4g} -> {values[-1]:.4g}" if numbers else str(values[-1])
    return facts


def write_report_of(
    arguments: argparse.Namespace,
    trainer: Any,
    loader: Batches,
    facts: dict[str, str],
    records: Sequence[Record],
    norms: Norms,
    rates: Any = None,
) -> None:
    from onnx_backprop.training.reports.profiling import profile
    from onnx_backprop.training.reports.report import write_report

    write_report(
        arguments.report,
        title=f"Training of {Path(arguments.model).name}",
        facts=facts,
        records=read_log(arguments.log) if arguments.log else records,
        norms=norms if records else {},
        profile=profile(trainer, next(iter(loader))),
        graph=trainer.graph,
        rates=rates,
    )


COMMAND = Command(
    usage="%(prog)s MODEL -o OUT --data DATA --loss LOSS [options]",
    description="DATA is an .npz file that holds an array for every input of the model and for the target: "
    "`target`, or `labels` for softmax_cross_entropy; rows are examples. A folder of such files, or of NAME.npy, "
    "and Parquet and Arrow files with a column for each array, may be larger than memory. With --layout classes it is "
    "a folder of images. A URL, as s3://bucket/data.npz, is copied through fsspec. The training writes a checkpoint "
    "beside OUT, from which --resume continues. Lists of names end at the next option.",
    run=run,
    arguments=[
        *shared("model"),
        *shared("-o", help="the trained model to write"),
        *shared("--data", metavar="DATA"),
        *shared("--loss", required=True),
        *shared("--evaluation", metavar="DATA"),
        *shared("--log", "--report", "--force", "--quiet", "--limit"),
    ],
    groups={
        "what is trained": [
            *shared("--trainable", "--frozen", "--prediction", "--stop", "--free", "--tie", "--untie"),
            flag(
                "--dequantize", help="train a quantised MODEL as a float model; OUT is quantised again in the same way"
            ),
            flag("--floats", help="with --dequantize: write OUT in floats"),
            *shared("--straight-through", "--strict", "--training-mode", "--no-frozen-statistics"),
        ],
        "steps and updates": [
            *shared("--epochs", "--batch-size", "--optimizer", "--learning-rate"),
            argument(
                "--schedule", choices=SCHEDULES, default="constant", help="schedule of the learning rate (%(default)s)"
            ),
            *shared("--warmup"),
            *OF_OPTIMIZERS,
            *shared("--per-sample"),
            *shared(
                "--seed",
                metavar="N",
                help="seed of the order of rows, of Dropout and of noise; for noise 0 means a secret one (%(default)s)",
            ),
        ],
        "device": shared("--device", "--read-every"),
        "images": OF_IMAGES,
        "classes": OF_LOSSES,
        "evaluation and stopping": WATCHED,
        "memory and precision": shared("--memory", "--precision", "--checkpoint"),
        "resuming, and several ranks": [
            flag("--resume", help="continue from the checkpoint beside OUT, if there is one"),
            *shared("--every"),
            argument(
                "--launch",
                metavar="COMMAND",
                help='start the training with this command, as "mpiexec -n 4" for four ranks',
            ),
            argument(
                "--restarts",
                default=0,
                least=0,
                metavar="TIMES",
                help="restart it from the checkpoint at most so many times if it is killed or crashes (%(default)s)",
            ),
            flag("--sync-batch-norm", help="let BatchNormalization use the statistics of all ranks' rows"),
            flag(
                "--shard-update",
                help="let each rank update a part of the weights and keep only the moments of that part",
            ),
        ],
    },
)
