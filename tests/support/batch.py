"""Many small models in one session: they run together, each is compared by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob
from tests.support import single_op
from tests.support.renamed import joined

C = TypeVar("C")
A = TypeVar("A")
SHOWN = 5  # messages of one batch


def check_each(cases: Sequence[C], run: Callable[[Sequence[C]], Sequence[A]], check: Callable[[C, A], object]) -> None:
    """Run all cases together and check the answer of each. What is wrong runs again alone, for the message.

    A case that is right alone and wrong among the others fails too. Where they do not run together, the cases that fail
    alone are named; where none does, the error is raised.
    """
    try:
        answers = run(cases)
    except Exception:
        failed = [(case, alone) for case in cases if (alone := _alone(case, run, check))]
        if not failed:
            raise
    else:
        failed = []
        for case, answer in zip(cases, answers, strict=True):
            if among := _failure(check, case, answer):
                failed.append(
                    (
                        case,
                        _alone(case, run, check) or AssertionError(f"right alone, wrong among {len(cases)}: {among}"),
                    )
                )
    if failed:
        messages = [f"{case}: {type(e).__name__}: {e}" for case, e in failed[:SHOWN]]
        pytest.fail("\n\n".join([f"{len(failed)} of {len(cases)} are wrong", *messages]), pytrace=False)


def _alone(case: C, run: Callable[[Sequence[C]], Sequence[A]], check: Callable[[C, A], object]) -> BaseException | None:
    try:
        (answer,) = run([case])
    except Exception as e:  # noqa: BLE001 - it is shown
        return e
    return _failure(check, case, answer)


def _failure(check: Callable[[C, A], object], case: C, answer: A) -> BaseException | None:
    try:
        check(case, answer)
    except (Exception, pytest.fail.Exception) as e:  # noqa: BLE001 - it is shown
        return e
    return None


def together(
    models: Sequence[ModelProto],
    feeds: Sequence[Mapping[str, np.ndarray]],
    session: Callable[[ModelProto], onnxruntime.InferenceSession],
) -> Callable[[], list[list[np.ndarray]]]:
    """A session on all models at once; a call runs it and returns the outputs of each. Feeds that nothing takes stay out."""
    opened = session(joined(models))
    accepted = {value.name for value in opened.get_inputs()}
    fed = {f"{n}/{name}": array for n, given in enumerate(feeds) for name, array in given.items()}
    fed = {name: array for name, array in fed.items() if name in accepted}

    def run() -> list[list[np.ndarray]]:
        answers = iter(opened.run(None, fed))
        return [[np.asarray(answer) for answer in islice(answers, len(model.graph.output))] for model in models]

    return run


def calls_together(
    calls: Sequence[tuple[str, Mapping[str, object], Sequence[np.ndarray | None]]],
    kernels: str,
    *,
    dtype: str = "f32",
    threads: int = 2,
    optimised: bool = True,
) -> Callable[[], list[list[np.ndarray]]]:
    """`together` of models of `single_op`: operators with their attributes and inputs. optimised: by onnxruntime."""
    models = [single_op.model(op, attributes, inputs, dtype=dtype) for op, attributes, inputs in calls]
    feeds = [single_op.feeds(op, inputs) for op, _, inputs in calls]
    options = single_op.options(threads)
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return together(models, feeds, lambda model: ob.session(model, kernels=kernels, session_options=options))


def switched(models: Sequence[ModelProto]) -> ModelProto:
    """`joined`, each model in a branch of its own that runs where the input "n/on" is true. Outputs are of float32."""
    result = joined(models)
    nodes = iter(list(result.graph.node))
    del result.graph.node[:]
    for n, model in enumerate(models):
        names = [f"{n}/{value.name}" for value in model.graph.output]
        inner = list(islice(nodes, len(model.graph.node)))
        for node in inner:
            node.output[:] = [f"{name}/branch" if name in names else name for name in node.output]
        outputs = [helper.make_tensor_value_info(f"{name}/branch", TensorProto.FLOAT, None) for name in names]
        zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
        zeros = [helper.make_node("Constant", [], [output.name], value=zero) for output in outputs]
        branches = {
            "then_branch": helper.make_graph(inner, "then", [], outputs),
            "else_branch": helper.make_graph(zeros, "else", [], outputs),
        }
        result.graph.node.append(helper.make_node("If", [f"{n}/on"], names, name=f"{n}/if", **branches))
        result.graph.input.append(helper.make_tensor_value_info(f"{n}/on", TensorProto.BOOL, []))
    return result
