"""`onnx-backprop web`: write a page that trains a model in the browser."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.command.commands.train import loaders_of, step_options
from onnx_backprop.command.files import check_folder
from onnx_backprop.command.images import OF_IMAGES, data_and_evaluation
from onnx_backprop.command.options import say, shared
from onnx_backprop.command.parser import Command, argument, flag
from onnx_backprop.command.training import OF_LOSSES
from onnx_backprop.converters.devices.adapt import fix_lengths
from onnx_backprop.converters.finetune.lora import lora
from onnx_backprop.converters.prepare.writing.files import same_file
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.training.data.images import DEVIATIONS, MEANS, scaled


def run(arguments: argparse.Namespace) -> int:
    """Write the site."""
    # not before: it checks with onnxruntime
    from onnx_backprop.web.site import held_out, title_of, write_site

    folder = Path(arguments.site)
    _check(arguments, folder)
    data, evaluation = data_and_evaluation(arguments)
    assert data is not None
    options = step_options(arguments, data)
    model: Any = arguments.model
    if arguments.lora:
        adapted = lora(model, arguments.lora, arguments.rank, alpha=arguments.alpha, seed=arguments.seed)
        model, options["trainable"] = adapted.model, adapted.trainable
        say(arguments, f"rank {arguments.rank}, {repr(adapted).partition(': ')[2][:-1]}")
    convert = partial(training_graph, **options)
    graph = convert(model, inline=True)
    loader, measured = loaders_of(graph, data, evaluation, arguments)
    kinds = {v.name: v.type.tensor_type.elem_type for v in graph.model.graph.input}
    arrays, train = held_out(
        _typed(loader, kinds), None if measured is None else _typed(measured, kinds), arguments.seed
    )
    fixed = None
    if arguments.webgpu:
        lengths = {name: (loader.size, *array.shape[1:]) for name, array in arrays.items()}
        model = copied(load(model))
        fix_lengths(model, lengths)
        fixed = convert(model)
    sizes = write_site(
        folder,
        graph,
        arrays,
        train=train,
        title=title_of(arguments.model),
        batch=loader.size,
        learning_rate=arguments.learning_rate,
        fixed=fixed,
        runtime=None if arguments.runtime is None else Path(arguments.runtime),
        schedule=_schedule(arguments, train),
        bytes_as=_bytes_as(loader),
        names=getattr(data, "classes", ()),
    )
    if not arguments.quiet:
        parts = {"graphs and weights": "model/", "data": "data.bin", "runtime": "runtime/"}
        totals = {what: sum(n for name, n in sizes.items() if name.startswith(start)) for what, start in parts.items()}
        totals["page"] = sum(sizes.values()) - sum(totals.values())
        print(", ".join(f"{what}: {size / 1000:,.0f} KB" for what, size in totals.items() if size))
        print(f"rows: {train:,} to train on, {len(next(iter(arrays.values()))) - train:,} held out")
        print(f"written: {folder}. Look at it with `onnx-backprop serve {folder}`")
    return 0


def _schedule(arguments: argparse.Namespace, rows: int) -> dict[str, Any] | None:
    """What the page makes of the learning rate, over the epochs that are asked for."""
    if arguments.schedule == "constant" and not arguments.warmup:
        return None
    steps = max(1, rows // min(arguments.batch_size, rows)) * arguments.epochs
    return {"name": arguments.schedule, "steps": steps, "warmup": arguments.warmup}


def _typed(loader: Any, kinds: dict[str, int]) -> dict[str, np.ndarray]:
    """All rows, scaled, in the element types of the inputs."""
    from onnx import helper

    whole = {n: a if isinstance(a, np.ndarray) else a[np.arange(len(a))] for n, a in loader.arrays.items()}
    whole |= {n: scaled(whole[n], scale) for n, scale in loader.scales.items()}
    return {n: a.astype(helper.tensor_dtype_to_np_dtype(kinds[n]), copy=False) for n, a in whole.items()}


def _bytes_as(loader: Any) -> tuple[Any, Any] | None:
    """What 0 and 255 of a visitor's picture are for the model, where --scale says it."""
    for scale in loader.scales.values():
        if scale != "imagenet":
            return 0.0, 255 * scale
        pairs = list(zip(MEANS, DEVIATIONS, strict=True))
        return [-mean / deviation for mean, deviation in pairs], [(1 - mean) / deviation for mean, deviation in pairs]
    return None


def _check(arguments: argparse.Namespace, folder: Path) -> None:
    """Before any long work."""
    is_site = (folder / "site.json").is_file()
    ways = ", or --force to replace the site in it" if is_site else ""
    check_folder("-o", folder, ways, replace=is_site and arguments.force)
    if arguments.lora and arguments.trainable:
        raise InvalidArgumentError("--lora: the adapters are what is trained. Leave --trainable out")
    if not arguments.lora:
        COMMAND.refuse_options(arguments, "goes with --lora", "rank", "alpha")
    for what in ("model", "data", "evaluation"):
        path = getattr(arguments, what)
        if path is not None and any(same_file(path, file) for file in folder.rglob("*")):
            raise InvalidArgumentError(f"{path} lies in {folder}, which is written. Name another folder")


COMMAND = Command(
    description="DATA holds an array for every input of the model and for the target, or images, as for train. "
    "SITE is a folder for any static server; with `onnx-backprop serve SITE` the page may use threads.",
    run=run,
    arguments=[
        *shared("model"),
        argument("-o", "--output", dest="site", metavar="SITE", required=True, help="the folder to write"),
        *shared("--data", metavar="DATA"),
        *shared("--evaluation", metavar="DATA", help="held-out rows (default: a tenth of the data)"),
        *shared("--loss", required=True),
        *shared("--prediction", "--trainable", "--frozen", "--tie", "--untie", "--straight-through", "--strict"),
        *shared("--checkpoint", "--stop", "--free", "--limit", "--force", "--quiet"),
        *shared("--optimizer", help="the optimizer (%(default)s)"),
        *shared("--batch-size", metavar=None),
        *shared("--learning-rate", metavar=None, help="the first learning rate (%(default)s)"),
        *shared("--weight-decay", metavar=None),
        *(each for each in OF_IMAGES if each.dest != "augment"),
        *OF_LOSSES,
        argument(
            "--schedule",
            choices=("constant", "linear", "cosine"),
            default="constant",
            help="schedule of the learning rate, down to 0 over --epochs (%(default)s)",
        ),
        *shared("--epochs", default=20, help="length of --schedule, after which the page stops (%(default)s)"),
        *shared("--warmup"),
        *shared("--training-mode", "--no-frozen-statistics"),
        *shared("--seed", help="seed of the choice of held-out rows (%(default)s)"),
        argument(
            "--lora",
            nargs="+",
            action="extend",
            also="targets",
            metavar="NAME",
            help="weights that get a low-rank adapter; only the adapters are trained; globs too",
        ),
        *shared("--rank", "--alpha"),
        argument(
            "--runtime",
            metavar="FOLDER",
            help="copy this folder, `dist` of onnxruntime-web, into SITE (default: the page loads it from a CDN)",
        ),
        flag("--webgpu", help="train on the graphics processor, with batches of one size, only in float32"),
    ],
)
