"""Model predictive control with a network in the place of the plant: CasADi, IPOPT, exact Hessians by `ob.family`.

    pip install casadi && python examples/mpc.py

A network learns from random samples how a pendulum moves in a tenth of a second. IPOPT then swings it up with 25
bounded torques, using the predicted states. Exit code 0: the pendulum stands at the end; 1: it does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

STEP, HORIZON, TORQUE = 0.1, 25, 6.0


def pendulum(state: np.ndarray, torque: np.ndarray) -> np.ndarray:
    """(N, 2) angle (0: hanging) and speed one step later, under (N,) torques."""
    angle, speed = state[:, 0], state[:, 1]
    for _ in range(20):
        speed = speed + STEP / 20 * (torque - 0.2 * speed - 9.81 * np.sin(angle))
        angle = angle + STEP / 20 * speed
    return np.stack([angle, speed], axis=1)


def network(hidden: int = 24) -> ModelProto:
    """state (N, 2), torque (N, 1) -> next (N, 2): learns the change, from sine and cosine of the angle."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> plant (double[N, 2] state, double[N, 1] torque) => (double[N, 2] next)'
        " <int64[1] first = {0}, int64[1] second = {1}, int64[1] third = {2}> {"
        " angle = Slice (state, first, second, second) speed = Slice (state, second, third, second)"
        " s = Sin (angle) c = Cos (angle) features = Concat <axis = 1> (s, c, speed, torque)"
        " a = Gemm (features, w1, b1) h = Tanh (a) change = Gemm (h, w2, b2) next = Add (state, change) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (4, hidden), "b1": (hidden,), "w2": (hidden, 2), "b2": (2,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(0.3 * rng.standard_normal(shape), name))
    return model


def train(path: Path, epochs: int = 150) -> None:
    """Train the network and write it."""
    rng = np.random.default_rng(1)
    state = rng.uniform([-1.5, -8], [4.5, 8], (4096, 2))
    torque = rng.uniform(-TORQUE, TORQUE, (4096, 1))
    rows = {"state": state, "torque": torque, "target": pendulum(state, torque[:, 0])}
    trainer = ob.Trainer(ob.training_graph(network(), loss="mse", optimizer="adam"))
    trainer.fit(ob.Batches(rows, 256), epochs=epochs, schedule=ob.schedules.Cosine(5e-3, steps=epochs * 16))
    trainer.export(path)


def solve(f: Any, casadi: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """The states from hanging to standing, and IPOPT's statistics."""
    states, torques = casadi.MX.sym("states", 2, HORIZON + 1), casadi.MX.sym("torques", HORIZON)
    gaps, cost = [states[:, 0]], casadi.MX(0)
    for k in range(HORIZON):
        gaps.append(states[:, k + 1] - f(states[:, k].T, torques[k]).T)
        cost += 0.01 * torques[k] ** 2 + (1 - casadi.cos(states[0, k + 1] - np.pi)) + 0.02 * states[1, k + 1] ** 2
    cost += 20 * (1 - casadi.cos(states[0, HORIZON] - np.pi)) + states[1, HORIZON] ** 2
    problem = {"x": casadi.veccat(states, torques), "f": cost, "g": casadi.veccat(*gaps)}
    quiet = {"print_time": False, "ipopt": {"print_level": 0, "sb": "yes", "tol": 1e-9}}
    solver = casadi.nlpsol("mpc", "ipopt", problem, quiet)
    bound = np.concatenate([np.full(2 * HORIZON + 2, np.inf), np.full(HORIZON, TORQUE)])
    start = np.concatenate([np.linspace([0, 0], [np.pi, 0], HORIZON + 1).ravel(), np.zeros(HORIZON)])
    solution = solver(x0=start, lbx=-bound, ubx=bound, lbg=0, ubg=0)["x"]
    return np.array(solution)[: 2 * HORIZON + 2].reshape(-1, 2), solver.stats()


def main() -> int:
    """0 if the pendulum stands at the end."""
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.*"))
    os.environ.setdefault("CASADI_ONNXRUNTIME_LIB", str(library))
    casadi = import_module("casadi")
    with tempfile.TemporaryDirectory() as folder:
        plant = Path(folder, "plant.onnx")
        train(plant)
        ob.family(plant)
        f = casadi.GraphBuilder(str(plant)).create("f")
        began = time.perf_counter()
        states, stats = solve(f, casadi)
    seconds = time.perf_counter() - began
    print(
        f"{stats['return_status']} in {stats['iter_count']} iterations, {seconds:.2f} s; ends at {states[-1].round(3)}"
    )
    return 0 if stats["success"] and abs(np.cos(states[-1, 0]) + 1) < 1e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
