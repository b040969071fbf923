"""The oracle that shares no code with ours: the file in PyTorch, node by node and in float64. Needs torch."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from tests.search.subject import SkippedError, Subject, differs


def pytorch(s: Subject) -> str | None:
    """The gradient of PyTorch, where it has the operators and onnxruntime's forward."""
    if find_spec("torch") is None:
        raise SkippedError("no PyTorch")
    from tests.field.twin import Twin, torch

    w = s.exact
    leaves = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in w.point.items()}
    fed = {n: leaves[n] if n in leaves else torch.from_numpy(v) for n, v in w.feeds.items()}
    try:
        twin = Twin(w.model, {n: leaf for n, leaf in leaves.items() if n not in fed})
        outputs = {n: twin(fed, n) for n in w.of}
    except Exception as e:  # noqa: BLE001 - an operator, an opset or a type that the twin does not have
        raise SkippedError(f"no twin: {type(e).__name__} {str(e)[:60]}") from None
    values = {n: v.detach().numpy().astype(w.values[n].dtype) for n, v in outputs.items()}
    if differs(values, {n: w.values[n] for n in w.of}, w.rounding, "forward"):
        raise SkippedError("another forward")
    loss = sum((torch.from_numpy(w.seeds[n].astype(np.float64)) * v).sum() for n, v in outputs.items())
    of_leaves = list(leaves.values())
    gradients = torch.autograd.grad(loss + 0 * sum(x.sum() for x in of_leaves), of_leaves)
    want = {n: g.numpy().astype(v.dtype) for (n, v), g in zip(w.point.items(), gradients, strict=True)}
    return differs(w.gradient, want, w.rounding, "PyTorch")
