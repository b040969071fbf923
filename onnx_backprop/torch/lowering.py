"""An ExportedProgram rewritten so that torch's exporter keeps what a training needs.

Left alone, the exporter drops Dropout in inference mode and `detach` in any, and forgets which values were computed
under `torch.no_grad()`. Here they become operators of a library of their own, which `translations` writes in ONNX.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from operator import getitem
from typing import Any

from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.torch.formulas import bounded_cross_entropy, max_of_all, root_of_variance, smooth, stop_padding_rows
from onnx_backprop.torch.memory import ModuleTensors
from onnx_backprop.torch.modules import torch
from onnx_backprop.torch.translations import translations

_RANDOM = ("alpha_dropout", "feature_alpha_dropout", "rrelu", "rrelu_with_noise")  # switched by a mode, unlike in ONNX
_RECURRENT = ("lstm", "gru", "rnn_relu", "rnn_tanh")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def lower(program: Any) -> None:
    """Rewrite an ExportedProgram before its decomposition: Dropout, BatchNormalization, recurrent nets, stops.

    Errors: UnsupportedError for random operators with a mode that ONNX has not, for gradients inside `no_grad`, and for
    tensors other than buffers that are changed in place there.
    """
    translations()  # defines the operators
    graphs = {name: part for name, part in program.graph_module.named_modules() if hasattr(part, "graph")}
    buffers = set(program.graph_signature.inputs_to_buffers)
    for name, part in graphs.items():
        for node in list(part.graph.nodes):
            if node.op == "call_function":
                _lower(node, part, buffers, name)
        part.graph.lint()
        part.recompile()
    results = next(node for node in reversed(program.graph.nodes) if node.op == "output").args[0]
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, torch.fx.Node):
            spec.arg.name = result.name


def _lower(node: Any, part: Any, buffers: set[str], where: str) -> None:
    library, graph = torch.ops.onnx_backprop, part.graph
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        _stop_region(node, part, buffers)
        return
    schema = getattr(node.target, "_schema", None)
    namespace, _, name = ("", "", "") if schema is None else schema.name.partition("::")
    if namespace != "aten":
        return
    in_place, name = name.endswith("_"), name.rstrip("_")
    arguments = _arguments(node)
    if name in ("dropout", "feature_dropout"):
        x = arguments["self" if in_place else "input"]
        _become(node, getattr(library, name).default, (x, arguments["p"], arguments["train"]))
        if in_place:
            with graph.inserting_after(node):
                graph.call_function(torch.ops.aten.copy_.default, (x, node)).meta = dict(node.meta)
    elif name == "batch_norm" and arguments["input"].meta["val"].dim() >= 2:
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        _become(node, library.batch_norm.default, tuple(arguments[key] for key in names))
    elif name == "detach":
        literal = arguments["self"].target is torch.ops.aten.lift_fresh_copy.default  # of torch.tensor([1.0, 2.0])
        if _is_float(arguments["self"]) and not literal:
            _become(node, library.stop.default, (arguments["self"],))
    elif name in ("item", "_local_scalar_dense"):
        if _is_float(arguments["self"]):
            with graph.inserting_before(node):
                stopped = graph.call_function(library.stop.default, (arguments["self"],))
            stopped.meta = dict(arguments["self"].meta)
            node.args = (stopped,)
    elif name == "embedding" and arguments["scale_grad_by_freq"]:
        raise UnsupportedError(
            "export: an embedding with scale_grad_by_freq=True: expected False, as gradients are those of the forward "
            "pass"
        )
    elif name == "embedding" and arguments["padding_idx"] >= 0:
        stop_padding_rows(node, graph, arguments)
    elif name == "cross_entropy_loss" and arguments["label_smoothing"]:
        smooth(node, graph, arguments)
    elif name.startswith("adaptive_max_pool") and all(length == 1 for length in arguments["output_size"]):
        max_of_all(node, graph, arguments)
    elif name == "binary_cross_entropy":
        bounded_cross_entropy(node, graph, arguments)
    elif name in ("std", "std_mean"):
        root_of_variance(node, graph, pair=name == "std_mean")
    elif name in _RANDOM and arguments.get("train", arguments.get("training")):
        raise UnsupportedError(
            f"export: {name} in training mode, in {where or 'the module'}: expected a random operator that ONNX can "
            "switch to inference mode. Use Dropout, or put that module into eval()"
        )
    elif name == "scaled_dot_product_attention" and arguments["dropout_p"]:
        raise UnsupportedError(
            "export: scaled_dot_product_attention with dropout, called as an operator of torch.ops: expected "
            "torch.nn.functional.scaled_dot_product_attention. Call that"
        )
    elif name in _RECURRENT and arguments.get("num_layers", 1) > 1 and arguments.get("dropout") and "hx" in arguments:
        _split_layers(node, graph, arguments, pair=name == "lstm")


def _arguments(node: Any) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, defaults included."""
    arguments = node.target._schema.arguments
    given = dict(zip([a.name for a in arguments], node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def _become(node: Any, target: Any, args: tuple[Any, ...]) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _stop_region(node: Any, part: Any, buffers: set[str]) -> None:
    """Stop the gradient where values enter a region of `no_grad`.

    A buffer that is changed there is itself read on, as it needs no gradient: what is written into it is stopped.
    """
    enabled, inner, *inputs = node.args
    region = getattr(part, inner.target)
    if enabled:
        return
    changed: set[Any] = set()
    for call in region.graph.nodes:
        if call.target is torch.ops.higher_order.wrap_with_set_grad_enabled and call.args[0]:
            raise UnsupportedError(
                "export: torch.enable_grad() inside of torch.no_grad(): expected one of them. Leave one out"
            )
        schema = getattr(call.target, "_schema", None)
        if call.op == "call_function" and schema is not None and schema.is_mutable:
            arguments = _arguments(call)
            written = [
                arguments[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
            ]
            changed.update(value for value in written if isinstance(value, torch.fx.Node))
    places = [place for place in region.graph.nodes if place.op == "placeholder"]
    for place, value in zip(places, inputs, strict=True):
        if not isinstance(value, torch.fx.Node) or not _is_float(value):
            continue
        if place in changed:
            if value.name not in buffers:
                raise UnsupportedError(
                    f"export: {value.name!r} is changed in place under torch.no_grad(), and is no buffer: its gradient "
                    "has no form in ONNX. Compute a new tensor, or do that outside of forward"
                )
            continue
        with part.graph.inserting_before(node):
            stopped = part.graph.call_function(torch.ops.onnx_backprop.stop.default, (value,))
        stopped.meta = {key: value.meta[key] for key in ("val", "nn_module_stack", "stack_trace") if key in value.meta}
        node.args = tuple(stopped if other is value else other for other in node.args)


def _split_layers(node: Any, graph: Any, arguments: dict[str, Any], *, pair: bool) -> None:
    """A recurrent net of several layers as one call for each, with Dropout between them."""
    layers, directions = arguments["num_layers"], 1 + arguments["bidirectional"]
    per_layer = len(arguments["params"]) // layers
    states = arguments["hx"] if pair else [arguments["hx"]]
    calls: list[list[Any]] = []
    x = arguments["input"]

    def call(target: Any, args: tuple[Any, ...], value: Any) -> Any:
        new = graph.call_function(target, args)
        new.meta = {**node.meta, "val": value}
        return new

    with graph.inserting_before(node):
        for layer in range(layers):
            rows = (layer * directions, (layer + 1) * directions)
            hx = [call(torch.ops.aten.slice.Tensor, (h, 0, *rows), h.meta["val"][rows[0] : rows[1]]) for h in states]
            params = arguments["params"][layer * per_layer : (layer + 1) * per_layer]
            fixed = (
                arguments["has_biases"],
                1,
                0.0,
                arguments["train"],
                arguments["bidirectional"],
                arguments["batch_first"],
            )
            values = (node.meta["val"][0], *(h.meta["val"] for h in hx))
            result = call(node.target, (x, hx if pair else hx[0], params, *fixed), values)
            parts = [call(getitem, (result, n), value) for n, value in enumerate(values)]
            x = parts[0]
            if layer < layers - 1:
                drop = (x, arguments["dropout"], arguments["train"])
                x = call(torch.ops.onnx_backprop.dropout.default, drop, x.meta["val"])
            calls.append(parts)
        ends = [calls[-1][0]]
        for n, value in enumerate(node.meta["val"][1:], start=1):
            ends.append(call(torch.ops.aten.cat.default, ([parts[n] for parts in calls], 0), value))
    for user in list(node.users):
        user.replace_all_uses_with(ends[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _bag(*args: Any, **kwargs: Any) -> Any:
    """Embeddings of bags of one length, reduced; torch's own has a form in ONNX that onnxruntime crashes on."""
    call = inspect.signature(torch.nn.functional.embedding_bag).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    mode, weights = given["mode"], given["per_sample_weights"]
    special = (given["max_norm"], given["padding_idx"], given["scale_grad_by_freq"] or None)
    if given["input"].dim() != 2 or any(value is not None for value in special):
        raise UnsupportedError(
            "export: embedding_bag with offsets, max_norm, padding_idx or scale_grad_by_freq: expected bags of one "
            "length, two axes, and none of them. Write it with embedding and a sum"
        )
    rows = torch.nn.functional.embedding(given["input"], given["weight"])
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    return rows.max(1)[0] if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)


def _cumulative_product(input: Any, dim: int, *, dtype: Any = None) -> Any:
    """y_n = Π x_k over k ≤ n, a product of a square with ones behind its diagonal, so that zeros have gradients."""
    whole = not (input.is_floating_point() or input.is_complex())
    x = input.to(dtype or (torch.int64 if whole else input.dtype))
    if not x.dim():
        return x.clone()
    x = x.movedim(dim, -1)
    steps = torch.arange(x.size(-1))
    ones = torch.ones((), dtype=x.dtype)
    return torch.where(steps <= steps[:, None], x.unsqueeze(-2), ones).prod(-1).movedim(-1, dim)


def _distances(x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:  # noqa: ARG001 - torch's way there
    """‖x1ᵢ - x2ⱼ‖ₚ of each pair of rows; of other p gradients at ties differ from those of a norm."""
    if not 1 <= p < math.inf:
        return torch.cdist(x1, x2, p)
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), ord=p, dim=-1)


# what torch's exporter has no form of, or one that onnxruntime does not run
_WRITTEN_OUT = {"embedding_bag": _bag, "cumprod": _cumulative_product, "cdist": _distances}


def _in_autocast() -> bool:
    """Whether a block of torch.autocast is open, an enabled one or not."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


class Recorder(torch.overrides.TorchFunctionMode):
    """Writes out attention, with its Dropout, which torch leaves out in inference mode, and `x.data` as `x.detach()`.

    Inside of torch.autocast, where torch.export forgets torch.no_grad, every result under it is detached.

    tensors: of the module that torch.export runs, which are read from anywhere and parameters never changed; without,
    a module runs as it is, Dropout left out, to compare it in training mode with its file. hooks: whether one is put on
    the gradient of a value.
    """

    def __init__(self, tensors: ModuleTensors | None = None) -> None:
        super().__init__()
        self.tensors, self.plain, self.hooks, self._detaches = tensors, tensors is None, False, False
        self._depth = 0  # of calls inside of calls, which are those of torch itself

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.tensors is not None:
            self.tensors.find_stand_ins()
            stand_in = self.tensors.stand_in_of
            args, kwargs = (
                torch.utils._pytree.tree_map_only(torch.Tensor, stand_in, values) for values in (args, kwargs)
            )
            assert kwargs is not None
        name = getattr(function, "__name__", "")
        if function == torch._C._set_grad_enabled:
            self._detaches = not args[0] and _in_autocast()
        if function == torch.Tensor.data.__get__:
            return args[0].detach()
        if name == "scaled_dot_product_attention":
            return self._attention(True, *args, **kwargs)
        if name == "multi_head_attention_forward":
            return self._multi_head(*args, **kwargs)
        if name in _WRITTEN_OUT and not self.plain:
            return _WRITTEN_OUT[name](*args, **kwargs)
        if name == "embedding" and any(limit is not None for limit in (*args[3:4], kwargs.get("max_norm"))):
            raise UnsupportedError(
                "export: an embedding with max_norm, which changes its table in each call: expected None. Scale the "
                "rows of the table after each step, or where they are read"
            )
        if name == "register_hook":
            self.hooks = True
        if function in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise UnsupportedError(
                f"export: the module calls {name}: expected a forward pass, which is what a file has. Export what is "
                "differentiated, and take onnx_backprop.backward or vjp of that file"
            )
        if self.plain and name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if self.plain and name in _RECURRENT and isinstance(args[3], bool):
            args = (*args[:6], False, *args[7:])  # `train`, which Dropout between layers alone reads
        self._depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._depth -= 1
        if self.tensors is not None and not self._depth:
            self.tensors.refuse_changes(function, args)
        if self._detaches and not name.endswith("_"):
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return result

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        functional = torch.nn.functional
        function = functional.multi_head_attention_forward
        call = inspect.signature(function).bind(*args, **kwargs)
        call.apply_defaults()
        active, call.arguments["training"] = call.arguments["training"], True

        def dropout(x: Any, p: float = 0.5) -> Any:
            return x if self.plain else torch.dropout(x, p, active)

        before = functional.scaled_dot_product_attention, functional.dropout
        functional.scaled_dot_product_attention, functional.dropout = partial(self._attention, active), dropout
        try:
            return function(*call.args, **call.kwargs)
        finally:
            functional.scaled_dot_product_attention, functional.dropout = before

    def _attention(
        self,
        active: bool,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """dropout(softmax(q·kᵀ·scale + mask))·v; torch's own function of four axes without dropout and trained mask.

        Of a mask that is trained, as a bias by position, torch decomposes it into another layout than it captured.
        """
        learned = attn_mask is not None and attn_mask.requires_grad
        if self.plain or not (dropout_p or learned or query.dim() != 4):
            more = {"scale": scale, "enable_gqa": enable_gqa}
            return _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **more)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
        weights = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            weights = weights.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            weights = weights + attn_mask
        # kernels know the softmax of four axes as it stands
        if attn_mask is not None and query.dim() != 4:  # a row may have nothing to attend to: its weights are 0
            nothing = (weights == float("-inf")).all(-1, keepdim=True)
            weights = torch.softmax(weights.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
        else:
            weights = torch.softmax(weights, -1)
        return (torch.dropout(weights, dropout_p, active) if dropout_p else weights) @ value
