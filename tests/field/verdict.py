"""One file judged, in a process of its own: python -m tests.field.verdict SOURCE VARIANT FILE ANSWER

Converted with defaults, its gradients compared with PyTorch in float64, trained for ten steps of AdamW, exported, run.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnx_backprop as ob
from tests.field.measures import as_array, beside, distance, given_out, stored_floats, worst
from tests.field.module_parameters import comparable, same_parameters, trained
from tests.field.sources import Feeds, Source, sources

STEPS, SECONDS = 10, 0.4
NEAR = 6  # other roundings of a file in float16, of which each gradient is asked
RIGHT, REFUSED, WRONG, TRACEBACK, NAN, UNDECIDED = "right", "refused", "wrong", "traceback", "NaN", "undecided"


@dataclass
class Verdict:
    """What was found about a file.

    stage: where it ended. sentence: why it is not right. oracle: what its gradients were compared with, error: how far
    the worst of them is from it, relative to its norm. parameters: how many, share: of the numbers that the file or
    the module has. seconds of processor and megabytes at the peak are the conversion's; rate and torch_rate are steps
    per second; module says whether PyTorch runs a module of its own. inputs: of a file that is refused, whether its
    gradients by the float inputs are right. same: whether the numbers that are trained are those of the module's
    parameters, differing: which are not.
    """

    source: str
    variant: str
    origin: str = ""
    verdict: str = RIGHT
    stage: str = ""
    sentence: str = ""
    clear: bool = True
    oracle: str = ""
    error: float = float("nan")
    parameters: int = 0
    share: float = float("nan")
    seconds: float = float("nan")
    megabytes: float = float("nan")
    file_megabytes: float = float("nan")
    rate: float = float("nan")
    torch_rate: float = float("nan")
    module: bool = False
    inputs: str = ""
    same: str = ""
    differing: str = ""
    notes: list[str] = field(default_factory=list)
    trace: str = ""


class JudgementError(Exception):
    """What ends the judgement with a verdict."""

    def __init__(self, verdict: str, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict = verdict


class Judge:
    """Judges a file stage by stage."""

    def __init__(self, source: Source, variant: str, path: Path) -> None:
        self.source = source
        self.path = path
        self.result = Verdict(source.name, variant, source.origin, module=source.module is not None)
        self.result.file_megabytes = path.stat().st_size / 2**20

    @cached_property
    def module(self) -> Any:
        """Unchanged until `pace`."""
        return None if self.source.module is None else self.source.module()

    def run(self) -> Verdict:
        """All stages; of a file without anything to train, whether the gradients by its inputs are right."""
        self._stages()
        if self.result.verdict == REFUSED and self.result.stage == "convert":
            self.result.inputs = self._inputs_alone()
        return self.result

    def _inputs_alone(self) -> str:
        from tests.field.oracle import Oracle

        self.values: Feeds = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.forward()
                if not any(value.dtype.kind == "f" for value in self.feeds.values()):
                    return ""
                self.oracle = Oracle(self.path, {}, self.feeds, self.prediction, self.y)
                self.backward(by_parameters=False)
        except JudgementError as e:
            if e.verdict != UNDECIDED:
                self.result.verdict, self.result.sentence = e.verdict, f"by the inputs: {e}"
            return e.verdict
        except ob.OnnxBackpropError as e:
            return f"{REFUSED}: {e}"
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the verdict
            self.result.verdict, self.result.sentence = TRACEBACK, f"by the inputs: {type(e).__name__}: {e}"
            self.result.trace = traceback.format_exc()[-3000:]
        return RIGHT

    def _stages(self) -> None:
        for stage in (
            self.convert,
            self.forward,
            self.parameters,
            self.gradients,
            self.backward,
            self.train,
            self.pace,
        ):
            self.result.stage = stage.__name__
            try:
                stage()
            except JudgementError as e:
                self.result.verdict, self.result.sentence = e.verdict, str(e)
                return
            except ob.OnnxBackpropError as e:
                self.result.verdict, self.result.sentence = REFUSED, str(e)
                self.result.clear = self._is_clear(str(e))
                return
            except Exception as e:  # noqa: BLE001 - whatever it is, it is the verdict
                self.result.verdict, self.result.sentence = TRACEBACK, f"{type(e).__name__}: {e}"
                self.result.trace = traceback.format_exc()[-3000:]
                return
        self.result.stage = ""

    def _is_clear(self, sentence: str) -> bool:
        """Names an operator and a node or tensor of the file, and goes on to say what to do."""
        model = onnx.load(self.path)
        nodes = list(model.graph.node)
        types = {node.op_type for node in nodes}
        named = {name for node in nodes for name in (node.name, *node.input, *node.output)}
        words, quoted = set(re.findall(r"\w+", sentence)), set(re.findall(r"'([^']+)'", sentence))
        return bool(types & words) and bool(quoted & named) and len(re.findall(r"[.;:] ", sentence)) > 0

    def convert(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.process_time()
            try:
                self.graph = self._graph("adamw")
            finally:
                self.result.seconds = time.process_time() - start
                self.result.megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                self.result.notes += [str(w.message) for w in caught]
                self.said = [str(w.message) for w in caught if issubclass(w.category, ob.OnnxBackpropWarning)]
        self.result.parameters = len(self.graph.parameters)
        self.values = self.graph.initial_values()

    def _graph(self, optimizer: str | None) -> Any:
        return ob.training_graph(
            str(self.path), loss=self.source.loss, optimizer=optimizer, prediction=self.source.prediction
        )

    def forward(self) -> None:
        """The file as it is in onnxruntime; the target for its prediction."""
        opened, tensor = given_out(onnx.load(self.path), self.source.prediction)
        session = _session(opened.SerializeToString() if tensor else str(self.path))
        declared = {value.name: value.type for value in session.get_inputs()}
        batch = self.source.batch()
        halves = {"tensor(float16)": np.float16}
        self.feeds: Feeds = {
            name: array.astype(halves.get(declared[name], array.dtype))
            for name, array in batch.items()
            if name in declared
        }
        floats = [v.name for v in session.get_outputs() if v.type in ("tensor(float)", "tensor(float16)")]
        self.prediction = tensor or self.source.prediction or floats[0]
        (self.y,) = session.run([self.prediction], self.feeds)
        self.model = opened if tensor else str(self.path)  # of which `backward` is asked for the same
        self.half = self.y.dtype == np.float16 or any(v.dtype == np.float16 for v in self.values.values())
        y, rng = self.y.astype(np.float64), np.random.default_rng(5)
        if self.source.loss == "softmax_cross_entropy":
            self.target = rng.integers(0, y.shape[1], (y.shape[0], *y.shape[2:]))
        else:
            self.target = (y + (y.std() + 0.1) * rng.standard_normal(y.shape)).astype(self.y.dtype)
        self.dy = rng.standard_normal(y.shape).astype(self.y.dtype)
        stored = sum(v.size for v in self.values.values())
        self.result.share = stored / max(1, self._size())

    def parameters(self) -> None:
        """The numbers that are trained beside those of the module's parameters."""
        if self.module is not None and comparable(self.result.variant):
            target = self.target.astype(np.float32) if self.target.dtype.kind == "f" else self.target
            there = trained(self.module, self.source.loss, (*self.source.batch().values(), target))
            model = onnx.load(self.path)
            self.result.same, self.result.differing = same_parameters(self.graph, there, self.said, model)

    def _size(self) -> int:
        """Float numbers of the module, or that the file stores."""
        if self.module is not None:
            return sum(p.numel() for p in self.module.parameters())
        return sum(array.size for array in stored_floats(onnx.load(self.path).graph))

    def batch(self) -> Feeds:
        return self.feeds | {str(self.graph.target): self.target}

    def gradients(self) -> None:
        """Loss and gradients of the plain training graph, in a stock session."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = self._graph(None)
        if list(graph.parameters) != list(self.graph.parameters):
            raise JudgementError(WRONG, "the graph with an optimizer has other parameters than the one without")
        fed = {k: v for k, v in self.batch().items() if k in graph.inputs}
        names = [graph.loss, self.prediction, *graph.parameters.values()]
        got, at = self._run(graph.model, {**fed, **self.values}, names)
        if not all(np.isfinite(np.asarray(v, np.float64)).all() for v in got):
            bad = [n for n, v in zip(graph.parameters, got[2:], strict=True) if not np.isfinite(v).all()]
            raise JudgementError(NAN, f"gradients are not finite: {', '.join(bad[:5])}")
        if not self.half and distance(got[1], self.y) > 1e-3:
            raise JudgementError(
                WRONG, f"the training graph computes another prediction: {distance(got[1], self.y):.1e}"
            )
        self.rounding = distance(got[1], self.y) if self.half else 0.0  # by what is rounded between nodes, and what not
        self.got = dict(zip(graph.parameters, got[2:], strict=True))
        from tests.field.oracle import Oracle

        self.oracle = Oracle(self.path, self.values, self.feeds, self.prediction, self.y, half=self.half)
        if self.oracle.problem:
            self.result.notes.append(self.oracle.problem)
            self._differences(list(self.values))
            return
        self.result.oracle = "PyTorch float64"
        points = self._points(at)
        there, *near = (self.oracle.of_loss(self.source.loss, self.target, point) for point in points)
        self._compare(self.got, there, near, "the loss")

    def _run(self, model: onnx.ModelProto, feeds: Feeds, names: list[str]) -> tuple[list[np.ndarray], Feeds]:
        """These outputs, and what the file's own float tensors were in the same run."""
        written = {name for node in onnx.load(self.path, load_external_data=False).graph.node for name in node.output}
        there = {name for node in model.graph.node for name in node.output} & written - {"", *names}
        extended = onnx.ModelProto()
        extended.CopyFrom(model)
        known = {value.name for value in extended.graph.output}
        extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted((there | {*names}) - known))
        answers = _run(extended, feeds, [*names, *sorted(there)])
        inner = dict(zip(sorted(there), answers[len(names) :], strict=True))
        if self.prediction in names:
            inner[self.prediction] = answers[names.index(self.prediction)]
        return answers[: len(names)], {k: v for k, v in inner.items() if np.asarray(v).dtype.kind == "f"}

    def _points(self, at: Feeds) -> list[Feeds]:
        """Where gradients are asked for: there and, in float16, beside it."""
        return [at, *(beside(at, seed) for seed in range(NEAR if self.half else 0))]

    def _compare(self, got: Feeds, expected: Feeds, near: list[Feeds], of: str) -> None:
        """With PyTorch's gradients at onnxruntime's values; in float16 as far as they agree with those beside them."""
        gap, at = self.oracle.twin.gap
        if gap > (5e-2 if self.half else 1e-3):
            raise JudgementError(WRONG, f"the training graph computes another {at!r}: {gap:.1e}")
        error, name = worst(got, expected, near)
        self.result.error = max(error, np.nan_to_num(self.result.error))
        if error > (0.1 if self.half else 1e-3):
            raise JudgementError(WRONG, f"gradient of {of} by {name!r}: off by {error:.2g} of its norm")

    def _differences(self, wrt: list[str]) -> None:
        """Where the twin has no opinion."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = ob.check_gradients(self.model, feeds=self.feeds, of=[self.prediction], wrt=wrt)
        self.result.oracle = f"differences, {report.forward}"
        if report.verdict == "wrong":
            raise JudgementError(WRONG, str(report)[:1500])
        if not report.ok:
            raise JudgementError(UNDECIDED, str(report)[:1500])

    def backward(self, *, by_parameters: bool = True) -> None:
        """`backward` with defaults, and by the float inputs."""
        floats = [name for name, value in self.feeds.items() if value.dtype.kind == "f"]
        for wrt in (None, floats):
            if wrt == [] or (wrt is None and not by_parameters):
                continue
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = ob.backward(self.model, of=[self.prediction], wrt=wrt)
            self.result.notes += [f"backward: {w.message}" for w in caught if wrt]
            wanted = list(self.values) if wrt is None else wrt
            seed = f"{self.prediction}_grad"
            fed = self.feeds | ({seed: self.dy} if seed in [v.name for v in model.graph.input] else {})
            answers, at = self._run(model, fed, [f"{name}_grad" for name in wanted])
            got = dict(zip(wanted, answers, strict=True))
            if not all(np.isfinite(v).all() for v in got.values()):
                raise JudgementError(NAN, "gradients of backward are not finite")
            if self.oracle.problem and wrt is None:
                continue  # the same parameters as before
            if self.oracle.problem:
                self._differences(wanted)
            else:
                dy = self.dy if seed in fed else np.ones_like(self.dy)
                points = self._points(at)
                there, *near = (self.oracle.of_prediction(dy, wanted, point) for point in points)
                self._compare(got, there, near, f"{self.prediction!r}")

    def train(self) -> None:
        """Ten steps of AdamW; the export computes what the trainer does."""
        self.trainer = ob.Trainer(self.graph)
        losses = [self.trainer.step(self.batch()) for _ in range(STEPS)]
        if not np.isfinite(losses).all():
            raise JudgementError(NAN, f"losses: {losses}")
        state = self.trainer.state()
        bad = [name for name, v in state.items() if v.dtype.kind == "f" and not np.isfinite(v).all()]
        if bad:
            raise JudgementError(NAN, f"not finite after {STEPS} steps: {', '.join(bad[:5])}")
        if not self.half and not self.oracle.problem:
            self._compare_losses(losses)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trained.onnx"
            self.trainer.export(path)
            asked = self.source.prediction or self.prediction
            y = as_array(_session(str(path)).run([asked], self.feeds)[0])
        expected_y = as_array(self.trainer.predict(self.batch())[asked])
        if not np.isfinite(y.astype(np.float64)).all():
            raise JudgementError(NAN, "the exported model's prediction is not finite")
        if distance(y, expected_y) > (5e-2 + 2 * self.rounding if self.half else 1e-3):
            raise JudgementError(
                WRONG, f"the exported model computes another prediction: {distance(y, expected_y):.1e}"
            )

    def _compare_losses(self, losses: list[float]) -> None:
        """After two updates: later ones tell rounding errors apart where a training at this rate is wild, and then too
        the gap is one of the largest loss."""
        kind = self.source.loss
        for exact in (False, True):
            expected = self.oracle.trained(kind, self.target, 3, exact=exact)
            gap = max(abs(a - b) for a, b in zip(losses[:3], expected, strict=True)) / (
                max(map(abs, losses[:3])) + 1e-12
            )
            if gap <= 0.05:
                return
        raise JudgementError(WRONG, f"the first losses of AdamW are {losses[:3]}, PyTorch's {expected}")

    def pace(self) -> None:
        """Steps per second, ours and PyTorch's in turns: on one thread or on all, whichever it is faster on."""
        from tests.field.oracle import eager_step, torch_threads, use_threads

        batch = self.batch()
        ours = [_steps(lambda: self.trainer.step(batch))]
        step = None
        if not self.half:
            step = eager_step(self.module, self.oracle, self.source.loss, self.target, self.source.batch())
        theirs: list[float] = []
        for threads in () if step is None else {1, torch_threads()}:
            use_threads(threads)
            try:
                theirs.append(_steps(step))
            except (
                RuntimeError
            ) as e:  # a module that keeps what it has computed for the next call is for inference only
                self.result.notes.append(f"PyTorch's module does not train: {e}")
            ours.append(_steps(lambda: self.trainer.step(batch)))
        self.result.rate = max(ours)
        self.result.torch_rate = max(theirs, default=float("nan"))


def _steps(step: Any) -> float:
    step()
    count, start = 0, time.perf_counter()
    while count < 1 or time.perf_counter() - start < SECONDS:
        step()
        count += 1
    return count / (time.perf_counter() - start)


def _session(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _run(model: onnx.ModelProto, feeds: Feeds, names: list[str]) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / "model.onnx")
        session = _session(str(Path(folder) / "model.onnx"))
    accepted = {v.name for v in (*session.get_inputs(), *session.get_overridable_initializers())}
    return session.run(names, {name: value for name, value in feeds.items() if name in accepted})


if __name__ == "__main__":
    name, variant, file, answer = sys.argv[1:]
    verdict = Judge(sources()[name], variant, Path(file)).run()
    Path(answer).write_text(json.dumps(asdict(verdict)))
