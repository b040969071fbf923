"""Every example in the docstring of a public name runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onnx_backprop as ob
from tests.docs import setups
from tests.docs.blocks import examples


def documented(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """A public name, and what is public in a class or a module of ours."""
    yield name, thing
    if inspect.isclass(thing) or inspect.ismodule(thing):
        names = getattr(thing, "__all__", [n for n, member in vars(thing).items() if _is_of(thing, member)])
        for member in names:
            if not member.startswith("_"):
                yield from documented(f"{name}.{member}", getattr(thing, member))


def _is_of(owner: Any, member: Any) -> bool:
    if inspect.ismodule(owner):
        return getattr(member, "__module__", None) == owner.__name__
    return callable(member) or isinstance(member, (property, classmethod, staticmethod))


# What stands around an example.
BEFORE = {
    "ob.save_adapter": 'trainer = ob.Trainer(ob.training_graph("model.onnx", loss="mse", optimizer="sgd"))',
    "ob.anonymize": 'ob.save_model(onnx.load("model.onnx"), "secret.onnx")',
    "ob.reduce": "from tests.docs.setups import asking_for_help; asking_for_help()",
    "ob.attack": "labels = np.zeros(16, int)",
    "ob.function": "u = v = x",
    "ob.vector_function": "from scipy.optimize import NonlinearConstraint, least_squares",
    "ob.requantize": 'trainer = ob.Trainer(ob.training_graph(ob.dequantize("model.int8.onnx"), loss="mse", optimizer="sgd"), '
    "learning_rate=0.1)",
}
BEHIND = {
    "ob.losses": 'ob.training_graph("model.onnx", loss=loss)',
    "ob.optimizers": 'ob.training_graph("model.onnx", loss="mse", optimizer=optimizer)',
    "ob.schedules": "schedule(0)",
}
EXAMPLES = {
    name: (thing, code)
    for name, thing in documented("ob", ob)
    if callable(thing) or inspect.ismodule(thing) or isinstance(thing, property)
    if (code := examples(inspect.getdoc(thing) or ""))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thing, code = EXAMPLES[name]
    names = setups.docstrings() | (vars(thing) if inspect.ismodule(thing) and thing is not ob else {})
    for text in (BEFORE.get(name, ""), *code, BEHIND.get(name, "")):
        exec(compile(text, name, "exec"), names)


def test_examples_are_found() -> None:
    assert {"ob", "ob.Trainer", "ob.backward", "ob.lora", "ob.losses", "ob.schedules"} <= EXAMPLES.keys()
    assert examples("y = x\n\n    a = 1\n    b = 2\n\nArgs:\n    a: no code\n\n    c = 3") == ["a = 1\nb = 2", "c = 3"]
    assert "ob.Trainer.fit" in dict(documented("ob", ob)), "members are looked at"
