"""`onnx-backprop finetune`: train an adapter of a language model on texts."""

import argparse
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnx_backprop.command.commands.train import (
    check_device,
    explained,
    fit_of,
    lines_of,
    outcome_of,
    program_of,
    write_report_of,
)
from onnx_backprop.command.files import check_folder
from onnx_backprop.command.options import ROWS, by_name, say, shared
from onnx_backprop.command.parser import Command, argument, flag
from onnx_backprop.command.training import (
    SCHEDULES,
    WATCHED,
    best_of,
    callbacks_of,
    check_watched,
    optimizer_of,
    schedule_of,
    search_rate,
)
from onnx_backprop.converters.finetune.lora import LoraModel, lora
from onnx_backprop.converters.tables import sparkline
from onnx_backprop.converters.training.losses import NextToken
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.progress import hidden, note
from onnx_backprop.training.checkpoint import held
from onnx_backprop.training.reports.history import TokenLoss

CHECKPOINT, BEST = "checkpoint.safetensors", "best.safetensors"
LENGTH = 512  # tokens of a row, if the model reads as many


def run(arguments: argparse.Namespace) -> int:
    """Train an adapter; returns the exit code."""
    target = Path(arguments.output)
    _check(arguments, target)
    with hidden(really=arguments.quiet), ExitStack() as stack:
        target.mkdir(parents=True, exist_ok=True)
        stack.enter_context(held(target / CHECKPOINT))
        return _finetune(arguments, target)


def _check(arguments: argparse.Namespace, target: Path) -> None:
    """Before any long work: nothing is replaced unasked, and every number is one that can be."""
    check_device(arguments)
    if not 0 <= arguments.split < 1:
        raise InvalidArgumentError(f"--split: expected a share from 0 to below 1, got {arguments.split}")
    if arguments.split and arguments.evaluation:
        raise InvalidArgumentError("--split: --evaluation names the texts to measure on already. Leave one out")
    if bool(arguments.text) == bool(arguments.preferences):
        raise InvalidArgumentError("--text: expected this or --preferences, one of both")
    if not arguments.name or Path(arguments.name).name != arguments.name:
        raise InvalidArgumentError(f"--name: expected the name of a file, without a folder, got {arguments.name!r}")
    if not arguments.preferences:
        COMMAND.refuse_options(arguments, "goes with --preferences", "beta")
    if arguments.pack and arguments.preferences:
        raise InvalidArgumentError("--pack: pairs of --preferences are not packed. Leave it out")
    if arguments.metrics and arguments.preferences:
        raise InvalidArgumentError("--metrics: are of --text; pairs are measured by the loss alone. Leave it out")
    check_watched(arguments, split=True)
    if arguments.floats and not arguments.merged:
        raise InvalidArgumentError("--floats: goes with --merged")
    model = Path(arguments.model)
    folder = (model if model.is_dir() else model.parent).resolve()
    for option, path in (("-o", target), ("--merged", arguments.merged and Path(arguments.merged))):
        if not path:
            continue
        if not path.resolve().parent.is_dir():
            raise InvalidArgumentError(f"{option}: there is no folder {path.resolve().parent}. Make it first")
        if path.resolve() == folder:
            raise InvalidArgumentError(f"{option}: {path} is the folder of the model. Name another one")
        check_folder(option, path, ", --force to replace, or --resume", replace=arguments.force or arguments.resume)
    if arguments.merged and Path(arguments.merged).resolve() == target.resolve():
        raise InvalidArgumentError("--merged: it is the folder of -o. Name another one")


def _finetune(arguments: argparse.Namespace, target: Path) -> int:
    from onnx_backprop import Trainer, text  # not before: the other commands need no runtime
    from onnx_backprop.text.preferences import PairBatches
    from onnx_backprop.text.templates import template_for

    folder = text.ModelFolder(arguments.model)
    tokenizer = folder.tokenizer(arguments.tokenizer, begins=arguments.begin or None)
    if arguments.template:
        template_for(tokenizer, arguments.template)  # refused here also where no text is a conversation
    length = min(LENGTH, folder.context or LENGTH) if arguments.length is None else arguments.length
    if folder.context is not None and length > folder.context:
        raise InvalidArgumentError(f"--length: the model reads at most {folder.context} tokens, got {length}")
    examples, held_out = _examples(arguments, tokenizer, length)
    whole = [one for row in (*examples, *held_out) for one in (row if arguments.preferences else [row])]
    note(f"putting adapters into {folder.model}")
    targets = arguments.targets or text.projections(folder.model)
    adapted = lora(folder.model, targets, arguments.rank, alpha=arguments.alpha, seed=arguments.seed)
    _check_vocabulary(adapted.model, max(int(one.ids.max()) for one in whole), tokenizer)
    note("making a training graph")
    loss, arguments.loss = _loss(arguments)
    graph = training_graph(
        adapted.model,
        loss=loss,
        trainable=adapted.trainable,
        optimizer=optimizer_of(arguments),
        memory=arguments.memory,
        lengths={} if arguments.memory is None else _lengths(adapted.model, len(examples), length, arguments),
        gradient_norms=arguments.report is not None,
    )
    options = {"length": length, "pad": tokenizer.pad, "names": _inputs(graph), "seed": arguments.seed}
    if arguments.device:  # where each set of lengths may be a session of its own
        options["step"] = max(8, -(-length // 4))
    kind, more = (PairBatches, {}) if arguments.preferences else (text.TextBatches, {"pack": arguments.pack})
    batches = kind(examples, arguments.batch_size, **more, **options)
    measured = kind(held_out, arguments.batch_size, shuffle=False, **options) if held_out else None
    plan = _plan(arguments, adapted, batches, measured)
    say(arguments, "\n".join((graph.summary(most=ROWS), *lines_of(plan))))
    note("opening it in onnxruntime")
    trainer = Trainer(graph, **by_name(arguments, "learning_rate seed device read_every"))
    checkpoint = target / CHECKPOINT
    for pairs in (batches, measured):
        if isinstance(pairs, PairBatches):
            note("measuring what the model prefers before")
            pairs.refer(trainer)
    if arguments.resume and checkpoint.is_file():
        trainer.load(checkpoint)
        say(arguments, f"resumed from {checkpoint} after {trainer.steps} steps")
    rates = None if trainer.steps or not arguments.find_rate else search_rate(arguments, trainer, batches)
    going_on = trainer.steps and arguments.find_rate  # by the schedule of the checkpoint
    steps = -(-len(batches) * arguments.epochs // arguments.accumulate)
    schedule = None if going_on else schedule_of(arguments, steps)
    before = None if measured is None else trainer.evaluate(measured)
    start = time.perf_counter()
    with explained(trainer, checkpoint):
        records, norms = fit_of(
            arguments,
            trainer,
            batches,
            schedule=schedule,
            callbacks=(calls := callbacks_of(arguments, target / BEST)),
            evaluation=measured,
            metrics=arguments.metrics,
            checkpoint=checkpoint,
        )
    outcome = outcome_of(records, time.perf_counter() - start, trainer, "") | best_of(calls)
    if trainer.placement is not None:
        say(arguments, f"device: {trainer.placement}")
    perplexities = [record.perplexity for record in records if record.perplexity is not None]
    if isinstance(before, TokenLoss) and perplexities:
        outcome["perplexity"] = f"{before.perplexity:.4g} -> {perplexities[-1]:.4g} on the texts held out"
    note(f"writing {target}")
    values = trainer.parameters()
    folder.write(target, adapted.model, {arguments.name: values}, template=arguments.template)
    written = [str(target), str(target / f"{arguments.name}.onnx_adapter")]
    if arguments.merged:
        from onnx_backprop.quantization import merged_by_reference  # not before: it needs a runtime

        note(f"writing {arguments.merged}")
        merged = merged_by_reference(adapted, values, floats=arguments.floats)
        folder.write(arguments.merged, merged, template=arguments.template)
        written.append(str(arguments.merged))
    if arguments.report:
        note("timing some steps for the report")
        facts = plan | outcome | program_of(arguments, trainer)
        write_report_of(arguments, trainer, batches, facts, records, norms, rates)
        written.append(str(arguments.report))
    curve = {"course": sparkline([r.loss for r in records])} if len(records) > 1 else {}
    say(arguments, "\n".join(lines_of(outcome | curve)))
    say(arguments, f"written: {', '.join(written)}")
    return 0


def _examples(arguments: argparse.Namespace, tokenizer: Any, length: int) -> tuple[list[Any], list[Any]]:
    """Rows to train on, and to measure on."""
    from onnx_backprop import text
    from onnx_backprop.text.preferences import read_pairs

    def read(paths: list[str]) -> list[Any]:
        if arguments.preferences:
            return [pair for path in paths for pair in read_pairs(path, tokenizer, template=arguments.template)]
        return text.windows(text.read_examples(paths, tokenizer, template=arguments.template), length)

    note("reading the texts")
    examples = read(arguments.preferences or arguments.text)
    if arguments.evaluation:
        return examples, read(arguments.evaluation)
    order = np.random.default_rng(arguments.seed).permutation(len(examples))
    count = math.ceil(arguments.split * len(examples))
    if count == len(examples):
        raise InvalidArgumentError(
            f"--split: {arguments.split} of {len(examples)} rows leaves none to train on. Give more, or --evaluation"
        )
    return [examples[n] for n in sorted(order[count:])], [examples[n] for n in order[:count]]


def _loss(arguments: argparse.Namespace) -> tuple[Any, str]:
    """The loss, and what it is called."""
    if not arguments.preferences:
        return NextToken(), "cross entropy of the next token"
    from onnx_backprop.text.preferences import preference_loss

    return preference_loss(arguments.beta), f"preferences between answers, beta {arguments.beta:g}"


def _check_vocabulary(model: ModelProto, highest: int, tokenizer: Any) -> None:
    """InvalidArgumentError for a tokenizer whose tokens the model does not have."""
    dims = [v.type.tensor_type.shape.dim for v in model.graph.output if v.name == "logits"]
    classes = dims[0][-1].dim_value if dims and dims[0] else 0
    if classes and highest >= classes:
        raise InvalidArgumentError(
            f"--tokenizer: its token {highest} is none of the {classes} of the model ({len(tokenizer)} tokens in all). "
            "Name the tokenizer of this model"
        )


def _inputs(graph: TrainingGraph) -> list[str]:
    """The inputs of a training graph that texts give, which are all that it cannot do without."""
    arrays = ("input_ids", "labels", "attention_mask", "position_ids", "reference")
    missing = [name for name in graph.inputs if name not in arrays]
    if missing:
        raise InvalidArgumentError(
            f"MODEL: its input {missing[0]!r} is nothing that a text gives; expected inputs of {', '.join(arrays[:-1])}"
        )
    return [name for name in (*graph.inputs, *graph.optional) if name in arrays]


def _lengths(model: ModelProto, rows: int, length: int, arguments: argparse.Namespace) -> dict[str, int]:
    """The lengths of the model's symbolic dimensions in the longest batch."""
    tokens = [value.type.tensor_type.shape.dim for value in model.graph.input if value.name == "input_ids"]
    pairs = {"pairs": min(arguments.batch_size, rows)} if arguments.preferences else {}
    shape = (2 * pairs["pairs"] if pairs else min(arguments.batch_size, rows), length)
    return pairs | {d.dim_param: n for dims in tokens for d, n in zip(dims, shape, strict=False) if d.dim_param}


def _plan(arguments: argparse.Namespace, adapted: LoraModel, batches: Any, measured: Any) -> dict[str, str]:
    """What is about to be done."""
    rows = "pairs" if arguments.preferences else "rows"
    plan = {
        "adapters": f"rank {arguments.rank}, {repr(adapted).partition(': ')[2][:-1]}",
        "data": f"{batches.rows:,} {rows}, {batches.learned:,} tokens learned, "
        f"{len(batches):,} batches of {batches.size}",
    }
    if measured is not None:
        plan["evaluation"] = f"{measured.rows:,} {rows}, {measured.learned:,} tokens, after every epoch"
    rate = "to be found" if arguments.find_rate else f"{arguments.learning_rate:g}"
    plan["training"] = (
        f"{arguments.optimizer}, {arguments.loss}, {arguments.epochs} epochs, "
        f"{len(batches) * arguments.epochs:,} steps, learning rate {rate} ({arguments.schedule})"
    )
    return plan


COMMAND = Command(
    usage="%(prog)s MODEL -o OUT (--text FILE [FILE …] | --preferences FILE [FILE …]) [options]",
    description="MODEL is a folder of onnxruntime-genai's model builder, or an ONNX file with a tokenizer.json beside "
    'it. FILE: .jsonl with {"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}]} '
    "in each line, of which only the answers are learned; any other file is one text. From the "
    '{"prompt": …, "chosen": …, "rejected": …} of --preferences, the model learns which answer is better. '
    "OUT becomes a folder that onnxruntime-genai loads. It has the model with low-rank matrices as inputs, which have "
    "no effect by themselves, NAME.onnx_adapter, and a checkpoint for --resume.",
    run=run,
    arguments=[
        argument("model", metavar="MODEL", help="the folder of the model, or its ONNX file"),
        argument("-o", "--output", metavar="OUT", required=True, help="the folder to write"),
        argument("--text", nargs="+", action="extend", metavar="FILE", help="texts to train on"),
        argument("--preferences", nargs="+", action="extend", metavar="FILE", help="pairs of answers, .jsonl (DPO)"),
        argument(
            "--beta", default=0.1, metavar="NUMBER", help="with --preferences: how close to stay to MODEL (%(default)s)"
        ),
        argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: beside MODEL)"),
        argument(
            "--template",
            choices=("chatml", "llama3", "gemma", "phi", "mistral"),
            help="how conversations are written, also by OUT (default: by the tokenizer's configuration)",
        ),
        flag("--begin", help="add the tokenizer's first tokens to texts, which onnxruntime-genai by default does not"),
        argument(
            "--length",
            type=int,
            metavar="TOKENS",
            help=f"most tokens in a row (default: {LENGTH}, or what MODEL reads)",
        ),
        argument("--evaluation", nargs="+", metavar="FILE", help="texts, or pairs, to evaluate on after every epoch"),
        argument("--split", default=0.0, metavar="SHARE", help="share of the rows to evaluate on (%(default)s)"),
        flag("--pack", help="put several examples into a row; each sees those before it"),
        *shared("--log", "--report", "--force", "--quiet", "--limit"),
    ],
    groups={
        "the adapter": [
            argument("--name", default="adapter", help="name of the file, without .onnx_adapter (%(default)s)"),
            *shared("--rank", "--alpha"),
            argument(
                "--targets",
                nargs="+",
                action="extend",
                metavar="NAME",
                help="weights that get an adapter; globs too (default: every matrix except that of the logits)",
            ),
            argument("--merged", metavar="FOLDER", help="also write a folder with the change merged into the weights"),
            flag("--floats", help="with --merged: write floats where MODEL has integers"),
        ],
        "steps and updates": [
            *shared("--epochs", default=3, help="passes through the texts (%(default)s)"),
            *shared("--batch-size", default=4),
            *shared("--optimizer"),
            *shared("--learning-rate", default=2e-4),
            argument(
                "--schedule", choices=SCHEDULES, default="cosine", help="schedule of the learning rate (%(default)s)"
            ),
            *shared("--warmup", "--weight-decay"),
            *shared("--clip-norm", default=1.0, help="limit the norm of all gradients (%(default)s)"),
            *shared("--accumulate"),
            *shared("--seed", metavar="N", help="seed of the adapter, the split and the order of rows (%(default)s)"),
            *shared("--memory"),
        ],
        "device": shared("--device", "--read-every"),
        "evaluation and stopping": WATCHED,
        "resuming": [flag("--resume", help="continue from the checkpoint in OUT, if there is one"), *shared("--every")],
    },
)
