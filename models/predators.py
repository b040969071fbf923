"""Parameters of a differential equation, fitted through its integrator: a Scan of Runge-Kutta steps.

    python -m models.predators [--steps N] [--output FOLDER]

The Lotka-Volterra equations  x' = a x - b x y,  y' = d x y - c y  are integrated over `--points` intervals from known
starts; given are the populations at their ends, with noise. The model maps `start` (N, 2) and `intervals` (T) to `path`
(T, N, 2) and holds ln (a, b, c, d) as its only weight; a `Trainer` fits it. Exit code 0: every rate is found to 2 %.
Writes the fitted integrator, predators.onnx.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

Array = NDArray[np.float32]
RATES = np.array([1.1, 0.4, 0.9, 0.3], np.float32)  # a, b, c, d: those to be found
GUESS = np.array([0.7, 0.7, 0.7, 0.7], np.float32)
NOISE, INTERVAL = 0.01, 0.1
TOLERANCE = 0.02


def slope(z: str, name: str) -> str:
    """Nodes for the right-hand side at z (N, 2), as `name`."""
    return f"""
        {name}x, {name}y = Split<axis = -1, num_outputs = 2>({z})
        {name}xy = Mul({name}x, {name}y)
        {name}ax = Mul(a, {name}x)  {name}bxy = Mul(b, {name}xy)  {name}dx = Sub({name}ax, {name}bxy)
        {name}dxy = Mul(d, {name}xy)  {name}cy = Mul(c, {name}y)  {name}dy = Sub({name}dxy, {name}cy)
        {name} = Concat<axis = -1>({name}dx, {name}dy)
    """


def moved(z: str, by: str, interval: str, name: str) -> str:
    """Nodes for z + interval · by, as `name`."""
    return f"{name}_step = Mul({interval}, {by})  {name} = Add({z}, {name}_step)\n"


def build(guess: Array = GUESS) -> ModelProto:
    """(start (N, 2), intervals (T)) -> path (T, N, 2): the classical Runge-Kutta method, order 4."""
    body = slope("z", "k1") + moved("z", "k1", "half", "z2") + slope("z2", "k2") + moved("z", "k2", "half", "z3")
    body += slope("z3", "k3") + moved("z", "k3", "h", "z4") + slope("z4", "k4")
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        predators (float[N, 2] start, float[T] intervals) => (float[T, N, 2] path)
        {{
            rates = Exp(log_rates)
            a, b, c, d = Split<num_outputs = 4>(rates)
            end, path = Scan(start, intervals) <num_scan_inputs = 1, body: graph = step
                (float[N, 2] z, float h) => (float[N, 2] z_new, float[N, 2] point)
            {{
                two = Constant<value_float = 2.0>()  six = Constant<value_float = 6.0>()  half = Div(h, two)
                {body}
                middle = Add(k2, k3)  twice = Mul(two, middle)  ends = Add(k1, k4)  sum = Add(ends, twice)
                sixth = Div(h, six)  change = Mul(sixth, sum)
                z_new = Add(z, change)
                point = Identity(z_new)
            }}>
        }}
    """)
    model.graph.initializer.append(numpy_helper.from_array(np.log(guess), "log_rates"))
    return model


def observed(points: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Starts, intervals, and the populations behind them with noise."""
    rng = np.random.default_rng(seed)
    start = rng.uniform(0.8, 3, (4, 2)).astype(np.float32)
    intervals = np.full(points, INTERVAL, np.float32)
    (path,) = ob.session(build(RATES)).run(None, {"start": start, "intervals": intervals})
    exact = np.asarray(path)
    return start, intervals, exact + rng.normal(0, NOISE, exact.shape).astype(np.float32)


def fit(points: int, steps: int) -> tuple[Array, list[float], ob.Trainer]:
    """The rates found, and the loss of every step."""
    start, intervals, path = observed(points)
    graph = ob.training_graph(build(), loss="mse", optimizer="adam", trainable=["log_rates"])
    trainer = ob.Trainer(graph, learning_rate=0.05)
    losses = [float(trainer.step(start=start, intervals=intervals, target=path)) for _ in range(steps)]
    return np.exp(trainer.parameters()["log_rates"]), losses, trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, tell what was found, write the model."""
    parsed = argparse.ArgumentParser(prog="python -m models.predators", description=(__doc__ or "").split("\n")[0])
    parsed.add_argument("--steps", type=int, default=400, help="of Adam (%(default)s)")
    parsed.add_argument("--points", type=int, default=60, help="intervals of 0.1 that are integrated (%(default)s)")
    parsed.add_argument("--output", type=Path, default=Path("demo"), help="where predators.onnx goes (%(default)s)")
    options = parsed.parse_args(arguments)
    rates, losses, trainer = fit(options.points, options.steps)
    print(f"mean squared error {losses[0]:.4g} -> {losses[-1]:.4g}")
    for name, estimate, true in zip("abcd", rates, RATES, strict=True):
        print(f"{name} = {estimate:.4f} (true: {true:.4f})")
    options.output.mkdir(parents=True, exist_ok=True)
    trainer.export(options.output / "predators.onnx")
    onnx.checker.check_model(str(options.output / "predators.onnx"), full_check=True)
    return int(np.abs(rates / RATES - 1).max() > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
