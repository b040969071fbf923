"""A producer in a process of its own: `python -m onnx_gradient_scoreboard.worker ADAPTER` reads questions, answers.

A message is its length in 8 bytes and an .npz: arrays, and a header in JSON. The producer's prints go to stderr.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import signal
import struct
import sys
import traceback
import warnings
from typing import BinaryIO

import numpy as np
from onnx import ModelProto

from onnx_gradient_scoreboard.questions import Question

MEMORY = 16 * 2**30  # bytes of address space
SECONDS = 60  # of the processor for an answer; the signal that ends the process says so


def pack(header: dict, arrays: dict[str, np.ndarray]) -> bytes:
    """A message."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps([header, list(arrays)]).encode(), np.uint8)
    np.savez(buffer, header=text, **{f"a{n}": a for n, a in enumerate(arrays.values())})
    return struct.pack("<Q", len(buffer.getvalue())) + buffer.getvalue()


def unpack(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays of a message without its length."""
    with np.load(io.BytesIO(body)) as file:
        header, names = json.loads(file["header"].tobytes())
        return header, {name: file[f"a{n}"] for n, name in enumerate(names)}


def pack_question(question: Question) -> bytes:
    """A question as a message."""
    model = np.frombuffer(question.model.SerializeToString(), np.uint8)
    header = {"kind": question.kind, "wrt": question.wrt, "outputs": question.outputs, "seeds": list(question.seeds)}
    seeds = {f"seed {n}": a for n, a in question.seeds.items()}
    return pack(header, {"model": model} | {f"feed {n}": a for n, a in question.feeds.items()} | seeds)


def _question(body: bytes) -> Question:
    header, arrays = unpack(body)
    model = ModelProto.FromString(arrays.pop("model").tobytes())
    feeds = {n.removeprefix("feed "): a for n, a in arrays.items() if n.startswith("feed ")}
    seeds = {n: arrays[f"seed {n}"] for n in header["seeds"]}
    return Question(header["kind"], model, feeds, tuple(header["wrt"]), tuple(header["outputs"]), seeds)


def read(pipe: BinaryIO) -> bytes | None:
    """The next message, None at the end."""
    size = pipe.read(8)
    return pipe.read(struct.unpack("<Q", size)[0]) if len(size) == 8 else None


def main() -> None:
    """Answer until nobody asks."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    name, _, argument = sys.argv[1].partition(":")
    adapter = importlib.import_module(name if "." in name else f"onnx_gradient_scoreboard.adapters.{name}")
    pipe.write(pack({"ready": True}, {}))
    pipe.flush()
    while body := read(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            arrays = adapter.answer(_question(body), *([argument] if argument else []))
            header = {}
        except Exception as e:  # noqa: BLE001 - a refusal, judged by its type and words
            trace = [os.path.basename(f.filename) for f in traceback.extract_tb(e.__traceback__)]
            kinds = [c.__name__ for c in type(e).__mro__]
            header, arrays = {"error": str(e), "kinds": kinds, "from": type(e).__module__, "files": trace[-3:]}, {}
        pipe.write(pack(header, {n: np.asarray(a) for n, a in arrays.items()}))
        pipe.flush()


if __name__ == "__main__":
    main()
