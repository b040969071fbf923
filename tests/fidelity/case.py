"""The cases of one subject, in a process of its own: python -m tests.fidelity.case SUBJECT FOLDER

Writes FOLDER/<mode>-<exporter>.json for each case that is not there yet.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import onnx_backprop as ob
from tests.fidelity.compare import difference, loss_gap, tolerance, unnamed
from tests.fidelity.exporters import OURS, export, exporters
from tests.fidelity.reference import FACTOR, Reference, Training, reference
from tests.fidelity.subject import Subject

RIGHT, WARNED, WRONG, REFUSED = "right", "warned", "wrong", "refused"
NOT_EXPORTED, NOT_WRITTEN = "not exported", "not in the file"
MODES = ("eval", "train")
_WARNINGS = (
    "under torch.no_grad() or torch.autocast()",
    "left out a detach()",
    "left out label_smoothing",
    "changes its buffers",
    "trained as one",
    "has no tensor for these buffers",
)  # of another way than the module's, with the names


class WrongError(Exception):
    """The training of the file is not that of the module."""


class _Case:
    def __init__(self, subject: Subject, mode: str, exporter: str, there: Reference, folder: Path) -> None:
        self.subject, self.mode, self.exporter, self.there, self.folder = subject, mode, exporter, there, folder
        self.stage, self.said, self.numbers = "", list[str](), dict[str, float]()

    def judge(self) -> dict[str, Any]:
        start = time.monotonic()
        verdict, sentence = self._verdict()
        return {
            "subject": self.subject.name,
            "kind": self.subject.kind,
            "mode": self.mode,
            "exporter": self.exporter,
            "verdict": verdict,
            "stage": self.stage,
            "sentence": sentence,
            "warnings": self.said,
            "seconds": time.monotonic() - start,
            **self.numbers,
        }

    def _verdict(self) -> tuple[str, str]:
        if self.exporter in self.subject.lost:
            return NOT_WRITTEN, "the exporter drops it: its file is that of another module"
        self.stage = "export"
        inputs = self.subject.batch(0)
        try:
            module = self.subject.module().train(self.mode == "train")
            with self._listening():
                self.model = export(self.exporter, module, inputs, self.mode, self.folder / "model.onnx")
        except Exception as e:  # noqa: BLE001 - whatever an exporter says
            if self.exporter != OURS:
                return NOT_EXPORTED, _first_line(e)
            return (REFUSED if isinstance(e, ob.OnnxBackpropError) else WRONG), _first_line(e)
        try:
            return self._stages()
        except WrongError as e:
            warned = self.stage != "set" and any(words in text for text in self.said for words in _WARNINGS)
            return WARNED if warned else WRONG, str(e)
        except ob.OnnxBackpropError as e:
            if self.exporter != OURS and "does not pass onnx.checker" in str(e):
                return NOT_EXPORTED, _first_line(e)
            unknown = self.stage == "patterns" and " matches no " in str(e)  # it says so: the file has no such name
            return WARNED if unknown else REFUSED, str(e)
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the verdict
            return WRONG, f"{type(e).__name__}: {e}; {traceback.format_exc().splitlines()[-3].strip()}"

    def _stages(self) -> tuple[str, str]:
        self.stage = "set"
        sgd = self._graph(ob.optimizers.SGD(momentum=0.9))
        mismatch = difference(sgd.initial_values(), self.there.sgd.initial, live=self.there.sgd.live)
        if mismatch:
            silent = unnamed(mismatch, self.said, self._stored(), self.there.sgd.initial, sgd.parameters)
            if silent:
                raise WrongError(f"{mismatch}; no warning names {', '.join(silent)}")
            return WARNED, f"{mismatch}"
        self.stage = "gradients"
        losses, _, first = self._train(sgd, self.there.sgd)
        self._gradients({name: first[f"{name}.momentum"] for name in sgd.parameters}, self.there.sgd)
        self.stage = "sgd"
        self._compare(losses, self.there.sgd)
        self.stage = "adamw"
        adamw = self._graph(ob.optimizers.AdamW())
        self._compare(self._train(adamw, self.there.adamw)[0], self.there.adamw)
        if self.there.parts is not None and self.there.grouped is not None:
            self.stage = "patterns"
            frozen, slow = (f"{name}.*" for name in self.there.parts)
            self._patterns(frozen, slow, self.there.grouped)
        self.stage = ""
        return RIGHT, ""

    def _graph(self, optimizer: Any, frozen: Sequence[str] = ()) -> Any:
        patterns = [*frozen, *(self.subject.frozen if self.exporter != OURS else ())]
        with self._listening():
            graph = ob.training_graph(
                self.model,
                loss=self.subject.loss,
                optimizer=optimizer,
                training_mode=self.mode == "train" and self.exporter != OURS,  # ours has the mode of each module
                **({"frozen": patterns} if patterns else {}),
            )
        return graph

    @contextmanager
    def _listening(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        texts = (str(w.message) for w in caught if issubclass(w.category, ob.OnnxBackpropWarning))
        self.said += [text for text in texts if text not in self.said]

    def _stored(self) -> dict[str, np.ndarray]:
        """The float tensors of the file."""
        proto = onnx.load(self.model) if isinstance(self.model, str) else self.model
        tensors = proto.graph.initializer if isinstance(proto, onnx.ModelProto) else ()
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}
        return {name: value for name, value in arrays.items() if value.dtype.kind == "f"}

    def _train(self, graph: Any, there: Training) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Losses, final parameters, and all that the first step renewed."""
        trainer = ob.Trainer(graph, learning_rate=there.rate)
        batches = islice(cycle(self.there.batches), len(there.losses))
        losses, first = [trainer.step(*next(batches))], trainer.state()
        losses += [trainer.step(*batch) for batch in batches]
        return losses, {name: np.asarray(value) for name, value in trainer.parameters().items()}, first

    def _gradients(self, got: dict[str, np.ndarray], there: Training) -> None:
        """got: SGD's momentum after the first step."""
        mismatch = difference(got, there.gradients, there.gradient_slack, there.live)
        if mismatch:
            raise WrongError(f"other gradients in the first step: {', '.join(mismatch.missing or mismatch.extra)}")

    def _compare(self, losses: list[float], there: Training) -> None:
        gap, allowed = loss_gap(losses, there.losses), tolerance(there.own)
        self.numbers |= {f"{self.stage}_gap": gap, f"{self.stage}_own": there.own}
        if gap > allowed:
            pairs = enumerate(zip(losses, there.losses, strict=True), 1)
            step, (loss, expected) = next(
                ((i, p) for i, p in pairs if loss_gap(p[:1], p[1:]) > allowed), (0, (0.0, 0.0))
            )
            raise WrongError(
                f"losses are off by {gap:.1e} (PyTorch's float32 by {there.own:.1e}), first in step {step}: "
                f"{loss:.7g}, PyTorch {expected:.7g}"
            )

    def _patterns(self, frozen: str, slow: str, there: Training) -> None:
        groups = [ob.optimizers.Group(parameters=[slow], rate=FACTOR)]
        asked = f"with {frozen!r} frozen and a tenth of the rate for {slow!r}"
        graph = self._graph(ob.optimizers.AdamW(groups=groups), [frozen])
        mismatch = difference(graph.initial_values(), there.initial, live=there.live)
        if mismatch:
            raise WrongError(f"{asked}: {mismatch}")
        losses, final, _ = self._train(graph, there)
        moved = difference(final, there.final, there.slack, there.live)
        if moved:
            raise WrongError(
                f"{asked}: other values after {len(losses)} steps: {', '.join(moved.missing or moved.extra)}"
            )
        self._compare(losses, there)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    cause = error.__cause__
    more = f" ({type(cause).__name__}: {str(cause).strip().splitlines()[0]})" if cause and str(cause).strip() else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}{more}"[:400]


def main(name: str, folder: Path) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    from tests.fidelity import catalog

    torch.set_num_threads(1)
    subject = catalog.subject(name)
    for mode in MODES:
        paths = {exporter: folder / f"{mode}-{exporter}.json" for exporter in exporters()}
        if all(path.exists() for path in paths.values()):
            continue
        there = reference(subject, mode)
        for exporter, path in paths.items():
            if not path.exists():
                path.with_suffix(".started").touch()
                answer = _Case(subject, mode, exporter, there, folder).judge()
                path.write_text(json.dumps(answer))
                path.with_suffix(".started").unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
