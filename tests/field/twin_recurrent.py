"""Recurrent layers in PyTorch, after ONNX's text: for `twin`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.field.twin_operators import Call, operator

torch: Any = import_module("torch")


@operator("LSTM")
def _lstm(c: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, s: Any = None) -> Any:
    if lengths is not None or c.get("activations") not in (None, [b"Sigmoid", b"Tanh", b"Tanh"]) or c.get("layout", 0):
        raise NotImplementedError("LSTM with sequence lengths or other activations")
    ways = []
    for d in range(w.shape[0]):
        backward = c.get("direction", "forward") == "reverse" or d == 1
        hidden = r.shape[-1]
        state = [x.new_zeros(x.shape[1], hidden) if v is None else v[d] for v in (h, s)]
        bias = 0 if b is None else b[d, : 4 * hidden] + b[d, 4 * hidden :]
        seen = []
        for t in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
            i, o, f, g = (x[t] @ w[d].T + state[0] @ r[d].T + bias).split(hidden, -1)
            cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            state = [torch.sigmoid(o) * torch.tanh(cell), cell]
            seen.append(state[0])
        ways.append((torch.stack(seen[::-1] if backward else seen), *state))
    return tuple(torch.stack(part, dim) for part, dim in zip(zip(*ways, strict=True), (1, 0, 0), strict=True))


@operator("GRU")
def _gru(c: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    if lengths is not None or c.get("activations") is not None or c.get("layout", 0):
        raise NotImplementedError("GRU with sequence lengths or other activations")
    ways = []
    for d in range(w.shape[0]):
        backward = c.get("direction", "forward") == "reverse" or d == 1
        hidden = r.shape[-1]
        state = x.new_zeros(x.shape[1], hidden) if h is None else h[d]
        wb, rb = (0, 0) if b is None else (b[d, : 3 * hidden], b[d, 3 * hidden :])
        parts = torch.zeros(3 * hidden, dtype=x.dtype) + rb
        seen = []
        for t in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
            xz, xr, xh = (x[t] @ w[d].T + wb).split(hidden, -1)
            rz, rr, rh = r[d].split(hidden, 0)
            bz, br, bh = parts.split(hidden)
            z, reset = torch.sigmoid(xz + state @ rz.T + bz), torch.sigmoid(xr + state @ rr.T + br)
            if c.get("linear_before_reset", 0):
                new = torch.tanh(xh + reset * (state @ rh.T + bh))
            else:
                new = torch.tanh(xh + (reset * state) @ rh.T + bh)
            state = (1 - z) * new + z * state
            seen.append(state)
        ways.append((torch.stack(seen[::-1] if backward else seen), state))
    return tuple(torch.stack(part, dim) for part, dim in zip(zip(*ways, strict=True), (1, 0), strict=True))


@operator("RNN")
def _rnn(c: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    if lengths is not None or c.get("layout", 0) or c.get("clip"):
        raise NotImplementedError("RNN with sequence lengths, batches first or a limit")
    functions = {b"Tanh": torch.tanh, b"Relu": torch.relu, b"Sigmoid": torch.sigmoid}
    activations = [functions[name] for name in c.get("activations", [b"Tanh"] * w.shape[0])]
    ways = []
    for d in range(w.shape[0]):
        backward = c.get("direction", "forward") == "reverse" or d == 1
        hidden = r.shape[-1]
        state = x.new_zeros(x.shape[1], hidden) if h is None else h[d]
        bias = 0 if b is None else b[d, :hidden] + b[d, hidden:]
        seen = []
        for t in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
            state = activations[d](x[t] @ w[d].T + bias + state @ r[d].T)
            seen.append(state)
        ways.append((torch.stack(seen[::-1] if backward else seen), state))
    return tuple(torch.stack(part, dim) for part, dim in zip(zip(*ways, strict=True), (1, 0), strict=True))
