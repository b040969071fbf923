"""Operators of an ExportedProgram in others of torch, where its exporter's form has another gradient than torch."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.torch.modules import torch


def stop_padding_rows(node: Any, graph: Any, arguments: dict[str, Any]) -> None:
    """Stop the gradient of the rows that an embedding reads at its padding_idx, which torch does not train."""
    aten, value = torch.ops.aten, node.meta["val"]
    indices = arguments["indices"]

    def call(target: Any, args: tuple[Any, ...], value: Any) -> Any:
        new = graph.call_function(target, args)
        new.meta = {**node.meta, "val": value}
        return new

    with graph.inserting_before(node.next):
        stopped = call(torch.ops.onnx_backprop.stop.default, (node,), value)
        padding = call(aten.eq.Scalar, (indices, arguments["padding_idx"]), indices.meta["val"] == 0)
        rows = call(aten.unsqueeze.default, (padding, -1), padding.meta["val"].unsqueeze(-1))
        trained = call(aten.where.self, (rows, stopped, node), value)
    node.replace_all_uses_with(trained, delete_user_cb=lambda user: user not in (stopped, trained))


def _caller(node: Any, graph: Any) -> Callable[..., Any]:
    """What puts a call beside a node, for its module, with the value that the call has."""

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        new = graph.call_function(target, args, kwargs)
        value = target(*(arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args), **kwargs)
        new.meta = {**node.meta, "val": value}
        return new

    return call


def root_of_variance(node: Any, graph: Any, *, pair: bool) -> None:
    """A standard deviation whose gradient is 0 where it is 0, as torch's, and not that of a root, NaN.

    pair: with the mean beside it.
    """
    aten, call = torch.ops.aten, _caller(node, graph)
    with graph.inserting_before(node):
        packet = aten.var_mean if pair else aten.var
        variance = call(getattr(packet, node.target._overloadname), *node.args, **node.kwargs)
        variance, mean = (call(getitem, variance, n) for n in range(2)) if pair else (variance, None)
        positive = call(aten.gt.Scalar, variance, 0)
        root = call(aten.sqrt.default, call(aten.where.ScalarOther, positive, variance, 1.0))
        result = call(aten.where.self, positive, root, variance)
    if pair:
        _replace_outputs(node, graph, result, mean)
    else:
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def smooth(node: Any, graph: Any, arguments: dict[str, Any]) -> None:
    """(1 - ε) · CE - ε · mean of log p over the classes, of the labels that count: torch's exporter leaves ε out."""
    aten, share, reduction = torch.ops.aten, arguments["label_smoothing"], arguments["reduction"]
    x, labels, ignored = arguments["self"], arguments["target"], arguments["ignore_index"]
    if arguments["weight"] is not None or labels.meta["val"].is_floating_point():
        raise UnsupportedError(
            "export: cross_entropy with label_smoothing: expected labels that are integers and no weight. Export the "
            "logits and give loss=ob.losses.SoftmaxCrossEntropy(weights=…, label_smoothing=…)"
        )

    call = _caller(node, graph)
    axis = 1 if x.meta["val"].dim() > 1 else 0
    with graph.inserting_before(node):
        plain = call(aten.cross_entropy_loss.default, x, labels, None, reduction, ignored)
        counts = call(aten.ne.Scalar, labels, ignored)
        smooth = call(aten.mean.dim, call(aten.log_softmax.int, x, axis), [axis])
        smooth = call(aten.where.ScalarOther, counts, smooth, 0.0)
        if reduction:  # 1: the mean of those that count, 2: the sum
            smooth = call(aten.sum.default, smooth)
        if reduction == 1:
            smooth = call(aten.div.Tensor, smooth, call(aten.sum.default, counts))
        result = call(aten.sub.Tensor, call(aten.mul.Tensor, plain, 1 - share), call(aten.mul.Tensor, smooth, share))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def bounded_cross_entropy(node: Any, graph: Any, arguments: dict[str, Any]) -> None:
    """A binary cross entropy whose gradient is torch's at 0 and 1 too: (x - t) / max(x · (1 - x), 1e-12), not NaN."""
    aten, call, reduction = torch.ops.aten, _caller(node, graph), arguments["reduction"]
    x, target, weight = arguments["self"], arguments["target"], arguments["weight"]
    steepest = min(1e12, torch.finfo(x.meta["val"].dtype).max)
    with graph.inserting_before(node):
        inside = call(aten.gt.Scalar, call(aten.mul.Tensor, x, call(aten.rsub.Scalar, x, 1)), 1e-12)
        loss = call(aten.binary_cross_entropy.default, call(aten.where.ScalarOther, inside, x, 0.5), target, None, 0)
        stopped = call(torch.ops.onnx_backprop.stop.default, x)
        slope = call(aten.mul.Tensor, call(aten.sub.Tensor, stopped, target), steepest)
        rise = call(aten.mul.Tensor, call(aten.sub.Tensor, x, stopped), slope)  # 0, whose gradient is the slope
        end = call(aten.add.Tensor, call(aten.binary_cross_entropy.default, stopped, target, None, 0), rise)
        result = call(aten.where.self, inside, loss, end)
        if weight is not None:
            result = call(aten.mul.Tensor, result, weight)
        if reduction:  # 1: the mean, 2: the sum
            result = call(aten.mean.default if reduction == 1 else aten.sum.default, result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def max_of_all(node: Any, graph: Any, arguments: dict[str, Any]) -> None:
    """An adaptive pool of one window as the first of its maxima, which alone has a gradient in torch, not each."""
    aten, call, axes = torch.ops.aten, _caller(node, graph), len(arguments["output_size"])
    with graph.inserting_before(node):
        pair = call(aten.max.dim, call(aten.flatten.using_ints, arguments["self"], -axes), -1, True)
        parts = [call(getitem, pair, n) for n in range(2)]
        for _ in range(axes - 1):
            parts = [call(aten.unsqueeze.default, part, -1) for part in parts]
    _replace_outputs(node, graph, *parts)


def _replace_outputs(node: Any, graph: Any, *values: Any) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(values[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
