"""`python -m tests.field.ranks`: a gradient of one rank and of several, with sync_batch_norm, beside PyTorch in float64.

ResNet-18 of `models.resnet`, 15 rows of 32×32. In a batch where rounding puts an activation on the other side of a Relu
all of them are some 1e-3 apart; in this one it does not.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

import onnx_backprop as ob
from models import resnet
from tests.field import twin_operators
from tests.field.twin import Twin
from tests.onnx_backprop.distributed.threads import Threads, on_ranks

torch: Any = import_module("torch")
Gradient = dict[str, np.ndarray]
RATE = 1e4  # of one step of SGD, in which the weights themselves are below rounding
MOST = 1.1  # times the distance of one rank


def _batch_norm(c: twin_operators.Call, x: Any, scale: Any, bias: Any, *_: Any) -> Any:
    """In training mode, by the statistics of the batch."""
    return torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=c.get("epsilon", 1e-5))


def distance(a: Gradient, b: Gradient) -> float:
    """‖a - b‖ / ‖b‖."""
    return (sum(((a[p] - b[p]) ** 2).sum() for p in b) / sum((b[p] ** 2).sum() for p in b)) ** 0.5


def main() -> int:
    model = resnet.build()
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer=ob.optimizers.SGD())
    before = graph.initial_values()
    rng = np.random.default_rng(1)
    image, labels = rng.random((15, 3, 32, 32), np.float32), rng.integers(0, 10, 15)

    def gradient(communicator: Threads | None) -> Gradient:
        settings = {} if communicator is None else {"communicator": communicator, "sync_batch_norm": True}
        trainer = ob.Trainer(graph, learning_rate=RATE, **settings)
        trainer.step(image=image, labels=labels)
        return {p: (before[p].astype(np.float64) - value) / RATE for p, value in trainer.parameters().items()}

    twin_operators.OPERATORS["", "BatchNormalization"] = _batch_norm
    leaves = {p: torch.tensor(before[p]).double().requires_grad_() for p in graph.parameters}
    logits = Twin(model, leaves)({"image": torch.tensor(image).double()}, "logits")
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    found = torch.autograd.grad(loss, list(leaves.values()))
    exact = {p: g.numpy() for p, g in zip(leaves, found, strict=True)}
    whole = gradient(None)
    most = distance(whole, exact)
    print(f"1 rank: {most:.2e} from float64")
    wrong = False
    for size in (2, 3, 4):
        several = on_ranks(size, gradient)[0]
        error = distance(several, exact)
        wrong |= not error < MOST * most
        print(f"{size} ranks: {error:.2e} from float64, {distance(several, whole):.2e} from 1 rank")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
