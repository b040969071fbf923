"""onnx-backprop train: what it writes, resuming, the report, and what it refuses."""

from __future__ import annotations

import contextlib
import html.parser
import os
import re
import struct
import subprocess
import sys
from contextvars import Context
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_backprop as ob
from models import unet_resize
from onnx_backprop import Trainer
from onnx_backprop.__main__ import main
from onnx_backprop.training.checkpoint import held
from onnx_backprop.training.reports.history import read_log
from tests.support.training_models import classifier, data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(classifier(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **data())
    return tmp_path


def train(folder: Path, *more: str, epochs: int = 3) -> int:
    """The command with what every test needs; a later option overrides an earlier one."""
    given = ["--data", str(folder / "data.npz"), "--loss", "softmax_cross_entropy", "--training-mode"]
    given += ["--epochs", str(epochs), "--batch-size", "10", "--learning-rate", "0.02"]
    return main(["train", str(folder / "model.onnx"), "-o", str(folder / "out.onnx"), *given, *more])


def accuracy(path: Path) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    y = np.asarray(session.run(["y"], {"x": data()["x"]})[0])
    return float(np.mean(y.argmax(axis=1) == data()["labels"]))


def test_private_training(folder: Path) -> None:
    """--seed gives the same weights again; without it nobody knows the noise."""
    weights: list[bytes] = []
    for seed in ("5", "5", "0", "0"):
        private = ["--per-sample-clip", "0.5", "--noise", "0.3", "--optimizer", "sgd", "--no-frozen-statistics"]
        given = ["--data", str(folder / "data.npz"), "--loss", "softmax_cross_entropy", "--learning-rate", "0.1"]
        target = folder / "private.onnx"
        arguments = ["train", str(folder / "model.onnx"), "-o", str(target), *given, *private, "--seed", seed]
        assert main([*arguments, "--force", "--quiet", "--epochs", "30"]) == 0
        assert accuracy(target) > 0.7
        weights.append(target.read_bytes())
    assert weights[0] == weights[1]
    assert weights[2] != weights[3]


def test_trains_and_says_what_it_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--evaluation", str(folder / "data.npz"), epochs=30) == 0
    assert accuracy(folder / "out.onnx") > 0.85
    printed = capsys.readouterr().out
    assert "5 parameters trained, 0 frozen" in printed
    assert re.search(r"steps: 180 in [\d.]+ s, [\d.]+ ms each\n", printed)
    match = re.search(r"training loss: ([\d.]+) -> ([\d.]+)", printed)
    assert match is not None
    assert float(match[2]) < 0.5 * float(match[1])
    assert re.search(r"evaluation loss: [\d.]+ -> [\d.]+", printed)
    assert re.search(r"course: █[▁▂▃▄▅▆▇█]{47}\n", printed)
    assert f"written: {folder / 'out.onnx'}" in printed
    # what it is about to do comes first
    assert printed.index("data: x float32 60×") < printed.index(
        "training: adamw, softmax_cross_entropy, 30 epochs, 180 steps"
    )
    assert printed.index("training: adamw") < printed.index("steps: 180 in")


def test_what_is_watched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics, the end of a training, the best weights, a rate that is found; lines where nobody watches a bar."""
    options = [
        "--metrics",
        "accuracy,iou",
        "--patience",
        "2",
        "--keep-best",
        "--find-rate",
        "--class-weights",
        "balanced",
    ]
    options += ["--label-smoothing", "0.1", "--evaluation", str(folder / "data.npz")]
    written = ["--log", str(folder / "log.csv"), "--report", str(folder / "report.html")]
    assert train(folder, *options, *written, epochs=30) == 0
    captured = capsys.readouterr()
    rate = re.search(r"^learning rate: ([\d.]+) of 1e-07 … ", captured.out, re.M)
    best = re.search(r"^best accuracy: ([\d.]+), whose weights are written$", captured.out, re.M)
    assert rate is not None
    assert best is not None
    records = read_log(folder / "log.csv")
    measured = [r.metrics["accuracy"] for r in records if r.metrics]
    assert {r.learning_rate for r in records} == {float(rate[1])}
    assert len(measured) == measured.index(max(measured)) + 3 < 30
    assert accuracy(folder / "out.onnx") == pytest.approx(max(measured)) == pytest.approx(float(best[1]), rel=1e-3)
    lines = [line for line in captured.err.splitlines() if line.startswith("epoch ")]
    assert len(lines) == len(measured)
    assert re.match(r"epoch 1/30: loss [\d.]+, evaluation [\d.]+, accuracy [\d.]+, iou [\d.]+, learning rate", lines[0])
    page = (folder / "report.html").read_text()
    assert all(f"<figcaption>{name} (" in page for name in ("loss", "accuracy", "iou", "learning rate"))
    assert "learning rate (logarithmic)" in page
    assert "Learning rates that were tried" in page
    assert "out.onnx.best.safetensors" in captured.out[captured.out.index("written: ") :]
    names = {path.name for path in folder.iterdir()}
    assert {"out.onnx.best.safetensors", "out.onnx.checkpoint.safetensors"} < names


@pytest.mark.parametrize("form", ["balanced", "numbers", "npy", "text"])
def test_weights_of_classes(folder: Path, form: str) -> None:
    labels = data()["labels"]
    weights = len(labels) / (3 * np.bincount(labels))
    given = "balanced"
    if form == "numbers":
        given = ",".join(map(repr, weights.tolist()))
    elif form == "npy":
        np.save(given := str(folder / "weights.npy"), weights)
    elif form == "text":
        Path(given := str(folder / "weights.txt")).write_text("\n".join(map(repr, weights.tolist())))
    assert train(folder, "--class-weights", given, "--ignore-index", "-1", epochs=1) == 0
    loss = ob.losses.SoftmaxCrossEntropy(weight=weights, ignore_index=-1)
    graph = ob.training_graph(folder / "model.onnx", loss=loss, optimizer="adamw", training_mode=True)
    trainer = ob.Trainer(graph, learning_rate=0.02)
    trainer.fit(ob.Batches(data(), 10), 1, progress=False)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(folder / "out.onnx").graph.initializer}
    for name, value in trainer.parameters().items():
        np.testing.assert_array_equal(stored[name], value, err_msg=name)


def test_balanced_weights_where_the_last_class_has_no_label(folder: Path) -> None:
    assert train(folder, "--class-weights", "balanced", "--ignore-index", "2", epochs=1) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "8x8"], "--size: goes with --layout classes"),
        (["--metrics", "accuracy"], "--metrics: goes with --evaluation"),
        (["--keep-best"], "--keep-best: goes with --evaluation"),
        (["--metrics", "acuracy", "--evaluation", "data.npz"], "Did you mean 'accuracy'"),
        (["--loss", "mse"], "Labels of classes go with --loss softmax_cross_entropy"),
        (["--monitor", "f1"], "--monitor: goes with --patience or --keep-best"),
        (["--class-weights", "none.txt"], "--class-weights: expected balanced, numbers with commas, or a file"),
        (["--class-weights", "1,2"], "expected one number for each of 3 classes"),
        (["--loss", "mse", "--ignore-index", "3"], "--ignore-index: goes with softmax_cross_entropy"),
    ],
)
def test_refusals_of_what_is_watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    assert train(folder, *options) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize("option", [(), ("--no-frozen-statistics",)], ids=["kept", "renewed"])
def test_frozen_statistics(folder: Path, option: tuple[str, ...]) -> None:
    assert train(folder, "--frozen", "scale", "b1", *option) == 0
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(folder / "out.onnx").graph.initializer}
    assert np.array_equal(stored["mean"], np.zeros(16)) == (not option)


def test_on_a_terminal_of_80_columns(folder: Path) -> None:
    """No line is longer, no word is broken, and every wait says what for."""
    options = ["--data", "data.npz", "--evaluation", "data.npz", "--loss", "softmax_cross_entropy", "--epochs", "2"]
    names = ["-o", "a_trained_model_with_a_name_that_needs_some_room.onnx", "--report", "a_report_beside_it.html"]
    code, printed = on_a_terminal(["train", "model.onnx", *names, *options], folder, columns=80)
    assert code == 0, printed
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[A-Z]", "", printed))
    assert max(map(len, lines)) <= 80
    text = " ".join(printed.split())
    for words in (
        "making a training graph of model.onnx …",
        "opening it in onnxruntime …",
        "training:",  # the bar, which also says that it is
        "saving",
        "writing a_trained_model_with_a_name_that_needs_some_room.onnx …",
        "timing some steps for the report …",
        "written: a_trained_model_with_a_name_that_needs_some_room.onnx, "
        "a_trained_model_with_a_name_that_needs_some_room.onnx.checkpoint.safetensors, a_report_beside_it.html",
    ):
        assert words in text


def on_a_terminal(arguments: list[str], folder: Path, *, columns: int) -> tuple[int, str]:
    """The command on a pseudo-terminal: exit code and what the screen gets."""
    fcntl, pty, termios = (import_module(name) for name in ("fcntl", "pty", "termios"))
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "onnx_backprop", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(Path(ob.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    parts: list[bytes] = []
    with contextlib.suppress(OSError):  # which is how the end of a terminal reads on Linux
        while part := os.read(reader, 65536):
            parts.append(part)
    os.close(reader)
    return process.wait(), b"".join(parts).decode()


def test_resumed_is_the_same_as_uninterrupted(folder: Path) -> None:
    arguments = ["--schedule", "constant", "--momentum", "0.9", "--optimizer", "sgd", "--quiet"]
    assert train(folder, *arguments, "--log", str(folder / "whole.csv"), epochs=4) == 0
    whole = (folder / "out.onnx").read_bytes()
    for name in ("out.onnx", "out.onnx.checkpoint.safetensors"):
        (folder / name).unlink()
    assert train(folder, *arguments, "--log", str(folder / "log.csv"), epochs=2) == 0
    assert (folder / "out.onnx").read_bytes() != whole
    assert train(folder, *arguments, "--log", str(folder / "log.csv"), "--resume", epochs=4) == 0
    assert (folder / "out.onnx").read_bytes() == whole
    expected, got = ([(r.step, r.epoch, r.loss) for r in read_log(folder / n)] for n in ("whole.csv", "log.csv"))
    assert got == expected


class Page(html.parser.HTMLParser):
    """Counts elements, and collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.references += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]


def test_report(folder: Path) -> None:
    arguments = ["--evaluation", str(folder / "data.npz"), "--schedule", "cosine", "--ema", "0.9", "--quiet"]
    assert train(folder, *arguments, "--report", str(folder / "report.html")) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.references == []
    assert "http" not in text
    assert page.counts["svg"] == 3
    # loss and evaluation, the rate, and a norm for each of five parameters
    assert page.counts["polyline"] == 2 + 1 + 5
    for words in (
        "Time of one step, by operator",
        "Gemm",
        "w1",
        "‖gradient‖₂",
        "training loss",
        "--ema 0.9",
        f"onnx-backprop {ob.__version__} (kernels",
    ):
        assert words in text
    for words in ("_inlfunc_", "OnnxBackprop_"):
        assert words not in text
    shares = [float(share) for share in re.findall(r"([\d.]+) %", text.split("by node")[0])]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert shares == sorted(shares, reverse=True)


def test_every_option(folder: Path) -> None:
    more = ["--optimizer", "rmsprop", "--momentum", "0.5", "--weight-decay", "0.01", "--clip-norm", "1"]
    more += ["--accumulate", "2", "--warmup", "3", "--schedule", "one_cycle", "--frozen", "w1", "b1", "--seed", "3"]
    assert train(folder, *more, "--every", "2", "--prediction", "y", "--quiet", "--log", str(folder / "l.jsonl")) == 0
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(folder / "out.onnx").graph.initializer}
    before = {t.name: onnx.numpy_helper.to_array(t) for t in classifier().graph.initializer}
    np.testing.assert_array_equal(trained["w1"], before["w1"])
    assert not np.array_equal(trained["w2"], before["w2"])
    assert len(read_log(folder / "l.jsonl")) == 18


HOSTILE: dict[str, tuple[dict[str, object], list[str], str]] = {
    "0-d": ({"x": np.float32(1), "labels": np.int64(1)}, [], "arrays with one number of rows, got 'x': 0, 'labels': 0"),
    "one 0-d": ({"labels": np.int64(1)}, [], "labels"),
    "objects": ({"labels": np.array([{}] * 60, object)}, [], "array 'labels': expected numbers, got 'object'"),
    "limit": ({}, ["--limit", "npz_bytes=100"], "more than the file has. The limit is 100; "),
    "limit that is none": ({}, ["--limit", "npz_bytes=1e9"], "--limit: expected NAME=NUMBER, as npz_bytes=8000000000, got"),
    "unknown limit": ({}, ["--limit", "bytes=1"], "limits: expected some of"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arrays(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arrays, more, message = HOSTILE[case]
    large = {"x": np.zeros((10_000, 4), np.float32), "labels": np.zeros(10_000, np.int64)} if more else {}
    np.savez_compressed(folder / "data.npz", **{**data(), **large, "not asked for": np.array(["a"]), **arrays})
    assert train(folder, "--quiet", *more) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_checkpoint_that_another_training_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both trainings would go on from each other's checkpoints."""
    with held(folder / "out.onnx.checkpoint.safetensors"):
        before = sorted(path.name for path in folder.iterdir())
        # a context of its own, as another process has it
        assert Context().run(train, folder, "--quiet") == 2
    error = capsys.readouterr().err
    assert "another training writes the checkpoint" in error
    assert error.count("\n") == 1
    assert before == [".out.onnx.checkpoint.safetensors.lock", "data.npz", "model.onnx"]
    assert train(folder, "--quiet") == 0
    assert not list(folder.glob(".*"))


REFUSED: dict[str, tuple[list[str], str]] = {
    "data": (["--data", "missing.npz"], "missing.npz cannot be read as an .npz file"),
    "momentum": (["--momentum", "0.9"], "--momentum: goes with sgd and rmsprop, not with adamw"),
    "names": (["--loss", "mse"], "--data: expected arrays x, target; 'target' missing, there are x, labels"),
    "no time": (["--time-limit", "0"], "--time-limit: expected a number above 0, got 0.0"),
    "endless time": (["--time-limit", "inf"], "--time-limit: expected a number above 0, got inf"),
    "epochs": (["--epochs", "0"], "--epochs: expected 1 or more, got 0"),
    "batch size": (["--batch-size", "0"], "--batch-size: expected 1 or more, got 0"),
    "learning rate": (["--learning-rate", "-1"], "--learning-rate: expected 0 or more, got -1"),
    "no learning rate": (["--learning-rate", "nan"], "--learning-rate: expected 0 or more, got nan"),
    "log": (["--log", "log.txt"], "--log: expected a name that ends in .csv or .jsonl"),
    "frozen": (["--frozen", "w3"], "frozen: expected the name of an initializer, got 'w3'. Did you mean"),
    "rate": (["--learning-rate", "1e30", "--optimizer", "sgd"], "the training has failed: the loss is"),
    "folder": (["--report", "no/report.html"], "there is no folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, message = REFUSED[case]
    assert train(folder, "--quiet", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("onnx-backprop: error: ")
    assert error.count("\n") == 1
    assert not (folder / "out.onnx").exists()


def test_reasons_for_an_early_end_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--time-limit", "1e-9", "--warmup", "1000", "--accumulate", "100", "--shard-update") == 0
    captured = capsys.readouterr()
    out, error = (" ".join(text.split()) for text in captured)
    assert "ended: behind step 0: the 6e-08 seconds are over" in out
    assert "updates: 0, of 100 steps each; the last 1 are in none" in out
    assert "warning: --warmup: the training has 1 updates, so that the learning rate ends below 0.02" in error
    assert "warning: no update was made: 1 run was accumulated, an update takes 100" in error
    assert "warning: --shard-update: does nothing on one rank" in error


def test_nothing_is_replaced_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--quiet", epochs=1) == 0
    assert train(folder, "--quiet", epochs=1) == 2
    assert "exists. Name another file, --force to replace it, or --resume" in capsys.readouterr().err
    assert train(folder, "--quiet", "--force", epochs=1) == 0


def test_an_interruption_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where there is something to go on from: not before the first checkpoint."""
    step = Trainer.step

    def interrupted(trainer: Trainer, *batch: Any) -> float:
        if trainer.steps == stop:
            raise KeyboardInterrupt
        return step(trainer, *batch)

    monkeypatch.setattr(Trainer, "step", interrupted)
    stop = 3
    assert train(folder, "--quiet") == 130
    assert capsys.readouterr() == ("", "onnx-backprop: interrupted\n")
    stop = 8
    assert train(folder, "--quiet") == 130
    checkpoint = folder / "out.onnx.checkpoint.safetensors"
    assert capsys.readouterr().err == f"onnx-backprop: interrupted. --resume goes on from {checkpoint}, step 6\n"
    monkeypatch.setattr(Trainer, "step", step)
    assert train(folder, "--quiet", "--resume") == 0


def test_a_budget_of_memory_takes_its_lengths_from_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(unet_resize.build(), folder / "model.onnx")
    rng = np.random.default_rng(0)
    arrays = {name: rng.random((6, 1, 16, 16), np.float32) for name in ("image", "target")}
    np.savez(folder / "data.npz", **arrays)
    files: list[bytes] = []
    for more in ([], ["--memory", "60%"]):
        given = ["--data", str(folder / "data.npz"), "--loss", "bce_with_logits", "--epochs", "2", "--batch-size", "2"]
        assert (
            main(["train", str(folder / "model.onnx"), "-o", str(folder / "out.onnx"), "--force", *given, *more]) == 0
        )
        files.append((folder / "out.onnx").read_bytes())
    assert files[0] == files[1]
    assert re.search(
        r"activations: [\d.]+ kB at once, [\d.]+ kB without a budget; \d+ nodes run again", capsys.readouterr().out
    )


def test_running_means_are_what_is_measured_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss that was said is that of the file, within the digits that are said."""
    assert (
        train(folder, "--ema", "0.999", "--evaluation", str(folder / "data.npz"), "--log", str(folder / "l.csv")) == 0
    )
    printed = capsys.readouterr().out
    assert "out.onnx (the running means of the weights), " in printed
    last = re.search(r"evaluation loss of the running means: [\d.]+ -> ([\d.]+)", printed)
    assert last is not None

    def loss(path: Path) -> float:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        z = np.asarray(session.run(["y"], {"x": data()["x"]})[0]).astype(float)
        picked = np.take_along_axis(z, data()["labels"][:, None], axis=1)[:, 0]
        return float(np.mean(np.log(np.exp(z).sum(axis=1)) - picked))

    assert loss(folder / "out.onnx") == pytest.approx(float(last[1]), rel=5e-4)
    assert read_log(folder / "l.csv")[-1].evaluation == pytest.approx(loss(folder / "out.onnx"), rel=1e-6)
    # of 18 updates, none of which counts more than the others, and not of the start
    assert abs(loss(folder / "out.onnx") - loss(folder / "model.onnx")) > 1e-2


@pytest.mark.usefixtures("limited")
def test_trains_on_a_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses of the CPU; and one that is not there is said before any long work."""
    assert train(folder, "--log", str(folder / "ours.csv")) == 0
    more = ("--device", "webgpu", "--read-every", "4", "--log", str(folder / "there.csv"), "--force")
    assert train(folder, *more) == 0
    assert re.search(r"device: \d+ of \d+ nodes on CPU", capsys.readouterr().out)
    ours, there = ([record.loss for record in read_log(folder / name)] for name in ("ours.csv", "there.csv"))
    np.testing.assert_allclose(there, ours, rtol=1e-4)
    assert train(folder, "--force", "--device", "gpu") == 2
    assert "--device: expected one of cpu, webgpu, " in " ".join(capsys.readouterr().err.split())
