"""The training loop of `Trainer.fit`: epochs, schedules, checkpoints, the log and the progress bar."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_backprop.converters.prepare.writing.files import check_writable
from onnx_backprop.distributed.communicator import anywhere
from onnx_backprop.opset.core import progress as bars
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.hints import explaining
from onnx_backprop.training.callbacks.base import Callback, Run, better_of
from onnx_backprop.training.checkpoint import held
from onnx_backprop.training.data.batches import Batches, Shards, of_data, shard_of_rank
from onnx_backprop.training.data.loaders import reusable
from onnx_backprop.training.divergence import BadBatchError
from onnx_backprop.training.measures import Metrics, check_ranks, chosen_metrics, plain_numbers, result_names
from onnx_backprop.training.reports.history import Log, Measured, Record, Records
from onnx_backprop.training.reports.plots import check_plot, draw
from onnx_backprop.training.reports.progress import Progress, logger, tell_summary
from onnx_backprop.training.schedules import Schedule

if TYPE_CHECKING:
    from onnx_backprop.training.trainer import Trainer

AnyCallback = Callable[[Any, Record], "bool | None"]  # of the trainer and a step; or a `Callback`
_TAKES = "It takes batches and epochs: fit(ob.Batches({'x': x, 'target': y}, 32), epochs=10)"
Logger = Callable[[dict[str, Any]], Any]  # of what is known of a step


@explaining(_TAKES)
def fit(
    trainer: Any,  # a Trainer, whose module imports this one and whose method this is
    loader: Iterable[Any],
    epochs: int,
    *,
    schedule: Schedule | None = None,
    callbacks: Iterable[AnyCallback] = (),
    evaluation: Iterable[Any] | None = None,
    metrics: Metrics | None = None,
    ema: bool = False,
    checkpoint: str | Path | None = None,
    every: int = 0,
    log: str | Path | Logger | Iterable[str | Path | Logger] | None = None,
    plot: str | Path | None = None,
    progress: bool | None = None,
) -> Records:
    """Train until `epochs` epochs are complete, including those before a loaded checkpoint.

    Args:
        loader: yields the batches of an epoch each time it is iterated over; its `set_epoch(n)` is called if it has
            one. If a training is resumed within an epoch, the batches that were seen are skipped.
        epochs: how many in all.
        schedule: the learning rate of every update. Default: that of the checkpoint or of the last call, else a
            constant rate; a rate that is set on the trainer ends it.
        callbacks: called as callback(trainer, record) after every step and before its checkpoint; one that returns
            True ends the training, on all ranks. Every rank has the same number. `ob.callbacks` has ready ones, whose
            states are in the checkpoint.
        evaluation: batches whose loss in inference mode is measured after every epoch.
        metrics: other measures of them: names, as "accuracy" or "accuracy,f1"; records of `ob.metrics`; functions of
            (target, output), as in scikit-learn; a list of these, or a dict with your own names.
        ema: evaluate the running means of the weights, which `export(ema=True)` writes.
        checkpoint: a file to save to after every epoch, and after every `every` steps if that is not 0. Only one
            training at a time may use it.
        log: a file with a line per step, .csv or .jsonl; a function that gets a dict per step, such as `wandb.log`; a
            tracker of `ob.callbacks`; or a list of these. The entries are "step", "epoch", "loss", "learning_rate",
            "seconds"; after the last step of an epoch "evaluation" and the metrics; with a loss scale "skipped".
        plot: a picture of the losses, drawn at the end; if that fails, there is a warning.
        progress: a progress bar, with a table of epochs in a notebook. Default: if a person is watching, on a terminal
            or in a notebook. True: otherwise lines on the standard error.

    The logger "onnx_backprop" gets a line for every epoch at INFO, and at least one a minute.

    If the trainer reads losses only every so many steps, their records come together after the last of them; with
    callbacks, each loss is read.

    With several ranks, all call this, each with the whole batches, of which `Batches` reads only a rank's rows, or with
    `distributed.Shard`s; rank 0 writes the files.

    Returns: a record for every step, a list that a notebook shows as a curve. Errors: FloatingPointError if a loss is
    not finite, or if the state to be saved has a number that is not finite and was at the start; the last checkpoint is
    of an earlier step. If NaN, infinity or the lack of a label that counts in a batch explains it, the error says in
    which array and row. Such a batch in the evaluation ends the training after the checkpoint of the epoch.

    Warns: OnnxBackpropWarning if no update was made, as in fewer steps than `accumulate`; a further fit continues with
    what was accumulated. The logger names runs that were accumulated after the last update.
    """
    if not all(isinstance(n, Integral) and n >= 0 for n in (epochs, every)):
        if hasattr(epochs, "shape"):
            raise InvalidArgumentError(f"epochs: expected a whole number, got an array. {_TAKES}")
        raise InvalidArgumentError(f"epochs, every: expected whole numbers of 0 or more, got {epochs!r}, {every!r}")
    if every and checkpoint is None:
        raise InvalidArgumentError("every: goes with checkpoint, the file to save to")
    if checkpoint is not None:
        check_writable(checkpoint)
    if plot is not None:
        check_plot(plot)
    loader = reusable(loader, epochs - trainer.epoch)
    trainer.inputs.check_loader(loader)
    if evaluation is not None:
        evaluation = reusable(evaluation, epochs - trainer.epoch, "evaluation")
        trainer.inputs.check_loader(evaluation)
    asked = chosen_metrics(metrics)
    check_ranks(asked, trainer.communicator)
    if asked and evaluation is None:
        raise InvalidArgumentError("metrics: goes with evaluation, the batches to measure")
    if ema and evaluation is None:
        raise InvalidArgumentError("ema: goes with evaluation, the batches to measure")
    if ema and not trainer.graph.copies:
        raise InvalidArgumentError("ema: the optimizer keeps no running means. Make it with ema=0.999")
    if schedule is not None:
        if not callable(schedule):
            raise InvalidArgumentError(
                f"schedule: expected a function from the number of an update to its learning rate, got {schedule!r}, "
                "as those in onnx_backprop.schedules"
            )
        trainer.schedule = schedule
    if (
        not isinstance(callbacks, Iterable)
        or callable(callbacks)
        or not all(map(callable, callbacks := tuple(callbacks)))
    ):
        raise InvalidArgumentError(f"callbacks: expected a list of functions, got {callbacks!r}")
    if isinstance(log, str | Path) or callable(log) or not isinstance(log, Iterable):
        logs = () if log is None else (log,)
    else:
        logs = tuple(log)
    if wrong := [entry for entry in logs if not (isinstance(entry, str | Path) or callable(entry))]:
        raise InvalidArgumentError(f"log: expected a file, a function, or a list of these, got {wrong[0]!r}")
    names = () if evaluation is None else result_names(trainer.graph, asked)
    records, updates = Records(), trainer.updates
    writes = trainer.communicator.rank == 0
    logs, plot, progress = (logs, plot, progress) if writes else ((), None, False)
    measured = better_of(asked, names, evaluation=evaluation is not None)
    run = Run(trainer, loader, epochs, measured)
    trainer.callback_states.begin(callbacks, trainer.kept and trainer.kept[0])
    hooked = [callback for callback in callbacks if isinstance(callback, Callback)]
    with ExitStack() as stack:
        stack.enter_context(bars.hidden(really=progress is False))
        if checkpoint is not None and writes:
            stack.enter_context(held(checkpoint))
        stop = [callback.start(run) for callback in hooked]
        ended = bool(hooked) and anywhere(trainer.communicator, any(stop))
        writers = [_writer(entry, trainer.steps, names, stack) for entry in logs]
        bar = stack.enter_context(Progress(progress, loader, epochs, trainer))
        measure = None if evaluation is None else partial(_measured, trainer, evaluation, ema, checkpoint, asked)
        shard = shard_of_rank(loader, trainer.communicator)
        for record in () if ended else _steps(trainer, shard, epochs, measure, 1 if callbacks else every):
            records.append(record)
            for write in writers:
                write(record)
            last = record.step == trainer.steps - 1  # of those that were read together
            bar.show(record, ends_epoch=last and trainer.batch == 0)
            stop = [callback(trainer, record) for callback in callbacks]
            # behind the callbacks: a killed process goes through a step once more rather than past one
            if checkpoint is not None and last and (trainer.batch == 0 or (every and trainer.steps % every == 0)):
                bar.wait("saving")
                trainer.save(checkpoint)
            if callbacks and anywhere(trainer.communicator, any(stop)):
                break
        if checkpoint is not None and trainer.steps:  # without a record too: the last step's may not have been written
            bar.wait("saving")
            trainer.save(checkpoint)
        for callback in hooked:
            callback.finish(run)
    if records:
        tell_summary(records)
        if writes:
            _tell_of_waiting(trainer, updates)
    if plot is not None:
        try:
            draw(records, plot)
        except InvalidArgumentError as e:  # which is no reason to lose the records
            warn(str(e))
    return records


def _tell_of_waiting(trainer: Trainer, before: int) -> None:
    """Say which of the runs have changed nothing. before: how many updates there were."""
    waiting, takes = trainer.waiting, trainer.graph.options.accumulate
    what = f"{waiting} run{' was' if waiting == 1 else 's were'} accumulated, an update takes {takes}"
    if trainer.updates > before:
        if waiting:
            logger.info("%s, and they have not changed the weights yet; the next fit continues with them", what)
        return
    skipped = f"steps skipped for gradients that were not finite: {trainer.skipped_steps}"
    advice = ". A fit that goes on from here continues with them" if waiting else ""
    warn(f"no update was made: {what if waiting else skipped}{advice}")


def _writer(
    log: str | Path | Logger, start: int, metrics: Sequence[str], stack: ExitStack
) -> Callable[[Record], object]:
    """What takes the records for a log; it is closed with the stack."""
    if isinstance(log, str | Path):
        file = Log(log, start=start, metrics=metrics)
        stack.callback(file.close)
        return file.write
    if close := getattr(log, "close", None):
        stack.callback(close)
    return lambda record: log(record.known())


def _steps(
    trainer: Trainer, loader: Iterable[Any], epochs: int, measure: Callable[[], Measured] | None, every: int
) -> Iterator[Record]:
    """Run step after step; the trainer's epoch and batch are those of the step to come.

    every: the number of steps behind which losses are read in any case, 0 for none.
    """
    waiting: list[Record] = []  # whose losses were not read
    while trainer.epoch < epochs:
        epoch = trainer.epoch
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        resumable = isinstance(loader, Batches | Shards)
        batches = loader.since(trainer.batch) if resumable else itertools.islice(loader, trainer.batch, None)
        batch = next(batches, None)
        if batch is None and not trainer.batch:
            raise InvalidArgumentError(f"the loader is empty in epoch {epoch}; expected at least one batch")
        while batch is not None:
            start = time.perf_counter()
            if (following := trainer.schedule) is not None:
                trainer.learning_rate = following(trainer.updates)
                trainer.schedule = following
            rate = trainer.learning_rate
            try:
                trainer.step(trainer.named(batch))
            except BadBatchError as e:
                raise of_data(e, loader, trainer.batch, "the data") from None
            seconds = time.perf_counter() - start
            batch = next(batches, None)
            measured = None
            if batch is None:
                trainer.epoch, trainer.batch = epoch + 1, 0
                measured = None if measure is None else measure()
            else:
                trainer.batch += 1
            metrics = {} if measured is None else plain_numbers(measured.metrics)
            measured = None if measured is None else float(measured)
            waiting.append(Record(trainer.steps - 1, epoch, math.nan, rate, seconds, measured, None, metrics))
            if batch is None or (every and trainer.steps % every == 0):
                trainer.read_losses()
            if trainer.read.get(trainer.steps) is not None:
                skipped = None if trainer.loss_scale is None else trainer.skipped_steps
                for record in waiting:
                    yield replace(record, loss=trainer.read[record.step + 1], skipped=skipped)
                waiting.clear()
        if trainer.epoch == epoch:  # a checkpoint behind the last batch of a loader that has become shorter
            trainer.epoch, trainer.batch = epoch + 1, 0


def _measured(
    trainer: Trainer, evaluation: Iterable[Any], ema: bool, checkpoint: str | Path | None, metrics: Metrics
) -> Measured:
    """The loss of the evaluation; where its data are at fault the epoch is saved all the same."""
    try:
        return trainer.evaluate(evaluation, ema=ema, metrics=metrics)
    except BadBatchError:
        if checkpoint is not None and trainer.communicator.size == 1:
            trainer.save(checkpoint)
        raise
