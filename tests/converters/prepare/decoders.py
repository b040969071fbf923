"""Decoders by hand, with and without a cache of keys and values, in the forms that exporters write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.graphs.emit import Emitter

VOCABULARY, WIDTH, HEADS, SIZE, LAYERS, MOST = 11, 16, 2, 8, 2, 16
B, T, P = 2, 4, 3
FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
FORMS = (
    "plain",
    "by length",
    "transposed",
    "joint",
    "MultiHeadAttention",
    "Attention",
    "GroupQueryAttention",
    "opset 23",
)
Dims = Sequence[str | int]


class Decoder(Emitter):
    """Two layers of attention and a product, learned positions, a head that is the table of tokens.

    form: how keys are stored and attended to. cache: whether there are presents; pasts: and pasts. fixed: whether all lengths
    are numbers. prefix: of the names of pasts. state: how the first layer's convolution along time is written, "" for
    none: "operator" or "nodes".
    """

    def __init__(
        self,
        form: str,
        *,
        cache: bool = True,
        pasts: bool = True,
        fixed: bool = False,
        prefix: str = "past",
        state: str = "",
    ) -> None:
        super().__init__("node", set())
        self.form, self.cache, self.fixed, self.prefix_of_pasts = form, cache, fixed, prefix
        self.pasts, self.state = cache and pasts, state
        self.rng = np.random.default_rng(0)
        self.weights: list[TensorProto] = []
        self.inputs: dict[str, tuple[int, Dims]] = {}
        self.outputs: dict[str, tuple[int, Dims]] = {}

    def weight(self, name: str, *shape: int) -> str:
        array = self.rng.normal(size=shape).astype(np.float32) * 0.25
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def at(self, *numbers: int) -> str:
        return self.constant(list(numbers), np.int64)

    def dims(self, *names: str | int) -> Dims:
        lengths = {"head": SIZE, "batch": B, "tokens": T, "past": P, "total": (P if self.pasts else 0) + T}
        return [lengths.get(str(n), n) if self.fixed else n for n in names]

    def input(self, name: str, kind: int, *dims: str | int) -> str:
        self.inputs[name] = (kind, self.dims(*dims))
        return name

    def output(self, value: str, name: str, *dims: str | int) -> None:
        if name not in self.outputs:
            self.nodes.append(helper.make_node("Identity", [value], [name]))
            self.outputs[name] = (FLOAT, self.dims(*dims))

    def heads(self, x: str) -> str:
        return self.Transpose(self.Reshape(x, self.at(0, 0, HEADS, SIZE)), perm=[0, 2, 1, 3])

    def joined(self, x: str) -> str:
        return self.Reshape(self.Transpose(x, perm=[0, 2, 1, 3]), self.at(0, 0, HEADS * SIZE))

    def build(self, opset: int | None = None) -> ModelProto:
        tokens = self.input("input_ids", INT64, "batch", "tokens")
        self.mask = self.input("attention_mask", INT64, "batch", "total")
        positions = self.input("position_ids", INT64, "batch", "tokens")
        table = self.weight("table", VOCABULARY, WIDTH)
        x = self.Add(self.Gather(table, tokens), self.Gather(self.weight("places", MOST, WIDTH), positions))
        self.bias = self._bias(tokens)
        for n in range(LAYERS):
            x = self.Add(x, self.MatMul(self._attention(n, x), self.weight(f"o{n}", WIDTH, WIDTH)))
            x = self.Add(x, self.Tanh(self.MatMul(x, self.weight(f"mlp{n}", WIDTH, WIDTH))))
            x = self.Add(x, self._convolved(x)) if self.state and not n else x
        logits = self.MatMul(x, self.Transpose(table, perm=[1, 0]))
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        outputs = {"logits": (FLOAT, self.dims("batch", "tokens", VOCABULARY)), **self.outputs}
        graph = helper.make_graph(self.nodes, self.form, self._values(self.inputs), self._values(outputs), self.weights)
        imports = [helper.make_opsetid("", opset or (23 if self.form == "opset 23" else 20))]
        return helper.make_model(
            graph, opset_imports=[*imports, helper.make_opsetid("com.microsoft", 1)], ir_version=10
        )

    @staticmethod
    def _values(declared: dict[str, tuple[int, Dims]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, *what) for name, what in declared.items()]

    def _bias(self, tokens: str) -> str:
        """0 where a query sees a key, else -1e4: (B, 1, T, P + T)."""
        if self.form == "by length" and self.pasts:  # as genai's builder writes it, the size of a head not declared
            past = self.Gather(self.Shape(self._pasts(0)[0]), self.constant(2, np.int64), axis=0)
            total = self.Add(past, self.Squeeze(self.Shape(tokens, start=1, end=2), self.at(0)))
        else:
            total = self.Squeeze(self.Shape(self.mask, start=1, end=2), self.at(0))
        length = self.Squeeze(self.Shape(tokens, start=1, end=2), self.at(0))
        zero, one = self.constant(0, np.int64), self.constant(1, np.int64)
        keys, queries = self.Range(zero, total, one), self.Range(self.Sub(total, length), total, one)
        later = self.Greater(self.Unsqueeze(keys, self.at(0)), self.Unsqueeze(queries, self.at(1)))
        masked = self.Unsqueeze(self.Equal(self.mask, zero), self.at(1, 2))
        low, none = self.constant(-1e4, np.float32), self.constant(0, np.float32)
        return self.Where(self.Or(masked, later), low, none)

    def _pasts(self, n: int) -> list[str]:
        if not self.pasts:
            return ["", ""]
        shapes: tuple[Dims, ...] = (("batch", HEADS, "past", SIZE),) * 2
        if self.form in ("joint", "Attention"):
            return [self.input(f"{self.prefix_of_pasts}{n}", FLOAT, 2, "batch", HEADS, "past", SIZE)]
        if self.form == "by length":
            shapes = (("batch", HEADS, "past", "head"),) * 2
        if self.form == "transposed":
            shapes = (("batch", HEADS, SIZE, "past"), ("batch", HEADS, "past", SIZE))
        names = (f"{self.prefix_of_pasts}.{n}.{what}" for what in ("key", "value"))
        return [self.input(name, FLOAT, *dims) for name, dims in zip(names, shapes, strict=True)]

    def _attention(self, n: int, x: str) -> str:
        if self.form == "Attention":
            return self._packed(n, x)
        q, k, v = (self.MatMul(x, self.weight(f"{what}{n}", WIDTH, WIDTH)) for what in "qkv")
        pasts = self._pasts(n)
        if self.form in ("MultiHeadAttention", "GroupQueryAttention", "opset 23"):
            return self._fused(n, q, k, v, pasts)
        q, k, v = self.heads(q), self.heads(k), self.heads(v)
        if self.pasts and self.form == "joint":
            pasts = [self.Gather(pasts[0], self.constant(i, np.int64), axis=0) for i in (0, 1)]
        if self.form == "transposed":
            k = self.Transpose(k, perm=[0, 1, 3, 2])
        if self.pasts:
            k = self.Concat(pasts[0], k, axis=3 if self.form == "transposed" else 2)
            v = self.Concat(pasts[1], v, axis=2)
        if self.cache:
            if self.form == "joint":
                both = self.Concat(self.Unsqueeze(k, self.at(0)), self.Unsqueeze(v, self.at(0)), axis=0)
                self.output(both, f"present{n}", 2, "batch", HEADS, "total", SIZE)
            else:
                axes = (SIZE, "total") if self.form == "transposed" else ("total", SIZE)
                self.output(k, f"present.{n}.key", "batch", HEADS, *axes)
                self.output(v, f"present.{n}.value", "batch", HEADS, "total", SIZE)
        k = k if self.form == "transposed" else self.Transpose(k, perm=[0, 1, 3, 2])
        scores = self.Add(self.Mul(self.MatMul(q, k), self.constant(SIZE**-0.5, np.float32)), self.bias)
        return self.joined(self.MatMul(self.Softmax(scores, axis=-1), v))

    def _convolved(self, x: str) -> str:
        """A convolution of each channel with two tokens before, kept from step to step."""
        x, kernel, dims = self.Transpose(x, perm=[0, 2, 1]), self.weight("taps", WIDTH, 1, 3), ("batch", WIDTH, 2)
        left = self.input("left", FLOAT, *dims) if self.pasts else self._zeros(x)
        if self.state == "operator":
            attributes = {"activation": "silu", "domain": "com.microsoft"}
            y, kept = self.emit("CausalConvWithState", [x, kernel, "", left], attributes, outputs=2)
        else:
            both = self.Concat(left, x, axis=2)
            y, kept = self.Conv(both, kernel, group=WIDTH), self.Slice(both, self.at(-2), self.at(2**62), self.at(2))
            y = self.Mul(y, self.Sigmoid(y))
        if self.cache:
            self.output(kept, "kept", *dims)
        return self.Transpose(y, perm=[0, 2, 1])

    def _zeros(self, x: str) -> str:
        lengths = self.Concat(self.Shape(x, end=1), self.at(WIDTH, 2), axis=0)
        return self.ConstantOfShape(lengths, value=helper.make_tensor("", FLOAT, [1], [0]))

    def _packed(self, n: int, x: str) -> str:
        weight, bias = self.weight(f"qkv{n}", WIDTH, 3 * WIDTH), self.weight(f"b{n}", 3 * WIDTH)
        mask = self.Cast(self.mask, to=INT32)
        y, present = self.emit(
            "Attention",
            [x, weight, bias, mask, self._pasts(n)[0]],
            {"num_heads": HEADS, "unidirectional": 1, "domain": "com.microsoft"},
            outputs=2,
        )
        if self.cache:
            self.output(present, f"present{n}", 2, "batch", HEADS, "total", SIZE)
        return y

    def _fused(self, n: int, q: str, k: str, v: str, pasts: list[str]) -> str:
        given: dict[str, Any] = {"domain": "com.microsoft"}
        if self.form == "GroupQueryAttention":
            last = self.Sub(self.ReduceSum(self.mask, self.at(1), keepdims=0), self.at(1))
            total = self.Squeeze(self.Shape(self.mask, start=1, end=2), self.at(0))
            inputs = [q, k, v, *pasts, self.Cast(last, to=INT32), self.Cast(total, to=INT32)]
            given |= {"num_heads": HEADS, "kv_num_heads": HEADS}
        elif self.form == "opset 23":
            inputs, given = [q, k, v, self.bias, *pasts], {"q_num_heads": HEADS, "kv_num_heads": HEADS}
        else:
            inputs, given = [q, k, v, "", "", self.bias, *pasts], {**given, "num_heads": HEADS}
        op_type = self.form if self.form in ("MultiHeadAttention", "GroupQueryAttention") else "Attention"
        y, key, value = self.emit(op_type, inputs, given, outputs=3)
        if self.cache:
            self.output(key, f"present.{n}.key", "batch", HEADS, "total", SIZE)
            self.output(value, f"present.{n}.value", "batch", HEADS, "total", SIZE)
        return y


def decoder(form: str, **options: Any) -> ModelProto:
    """A decoder of a form."""
    return Decoder(form, **options).build()


def merged(form: str = "plain", *, shared: bool = True) -> ModelProto:
    """A decoder with pasts and one without as the branches of an If, as optimum merges them.

    shared: whether the weights are those of the main graph; else each branch has its own.
    """
    cached, first = decoder(form).graph, decoder(form, pasts=False).graph
    branches: dict[str, GraphProto] = {}
    for name, graph in (("then_branch", cached), ("else_branch", first)):
        outputs = [helper.make_tensor_value_info(value.name, FLOAT, None) for value in cached.output]
        branch = helper.make_graph(list(graph.node), name, [], outputs)
        _suffix(branch, f"/{name}")
        if not shared:
            branch.initializer.extend(graph.initializer)
        branches[name] = branch
    inputs = [*cached.input, helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])]
    node = helper.make_node("If", ["use_cache_branch"], [v.name for v in cached.output], **branches)
    stored = list(cached.initializer) if shared else []
    graph = helper.make_graph([node], "merged", inputs, list(cached.output), stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _suffix(graph: GraphProto, suffix: str) -> None:
    """Give what a branch makes names of its own."""
    new = {name: name + suffix for node in graph.node for name in node.output if name}
    for node in graph.node:
        node.name += suffix if node.name else ""
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in graph.output:
        value.name = new[value.name]
