"""Optimizers: what a step does to the parameters, as functions in standard ONNX operators.

    optimizer = AdamW(weight_decay=0.01, clip_norm=1.0, groups=[Group(parameters=["*bias"], weight_decay=0.0)])

x is a parameter, g its gradient, η the learning rate (times the factor of its group), λ the weight decay and t the
number of the step, counted from 1. The formulas are those of torch.optim; `Lion` is that of its paper. Moments have
the parameter's type, float32 for float16 and bfloat16; what depends on t is worked out in float64.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, TypeVar

from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.training.update.optimizer_function import Update
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.extensions import load_extensions

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Group", "Lion", "Optimizer", "RMSProp", "register_optimizer"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with their own treatment; a parameter belongs to the first group that matches it.

    Args:
        parameters: names, globs or regular expressions, as in `trainable`.
        rate: factor of the learning rate.
        weight_decay: instead of the optimizer's; None for the optimizer's.
        frozen: do not train them, as if they were listed in `frozen`.
    """

    parameters: Patterns
    rate: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        require("Group", "rate", self.rate, low=0)
        if self.weight_decay is not None:
            require("Group", "weight_decay", self.weight_decay, low=0)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """The arguments of every optimizer.

    Args:
        weight_decay: λ.
        clip_value: gradients are first clipped to ± this, element by element.
        clip_norm: gradients are scaled by min(1, clip_norm / (n + 10⁻⁶)), n being the square root of the sum of the
            squares of all of them.
        accumulate: one update for so many runs of the graph, along the mean of their gradients.
        ema: d of a running mean of each parameter, m ← m + (1 - d) / (1 - dᵗ)·(x - m) after update t: the mean of the
            parameter after each update, weighted by dᵗ⁻ⁱ, without the initial value. Before the first update it is x.
        groups: parameters with their own learning rate or weight decay.
    """

    name: ClassVar[str]
    hyper: ClassVar[tuple[str, ...]] = ()  # numbers that the update reads, of the optimizer's own

    weight_decay: float = 0.0
    clip_value: float | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    ema: float | None = None
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        """Refuse numbers outside their range, and a class of a user's own that lacks what it names."""
        lacking = [name for name in ("name", *self.hyper) if not hasattr(self, name)]
        if lacking:
            raise InvalidArgumentError(
                f"optimizer: {type(self).__name__} has no {lacking[0]!r}. A class of your own names itself by `name` "
                "and has a field for every number in `hyper`: write @dataclass(frozen=True, kw_only=True) above it"
            )
        require(self.name, "weight_decay", self.weight_decay, low=0)
        for name in ("clip_value", "clip_norm"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise InvalidArgumentError(f"{self.name}: {name}: expected None or more than 0, got {limit!r}")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise InvalidArgumentError(f"{self.name}: accumulate: expected 1 or more, got {self.accumulate!r}")
        if self.ema is not None:
            require(self.name, "ema", self.ema, low=0, high=1)
        for field in fields(self):
            if field.name.startswith("beta") or field.name in ("momentum", "alpha"):
                require(self.name, field.name, getattr(self, field.name), low=0, high=1)
            elif field.name in ("epsilon", "rate_decay", "initial"):
                require(self.name, field.name, getattr(self, field.name), low=0)

    def slots(self) -> dict[str, float]:
        """The tensors that are kept for each parameter, by the ends of their names, and what they start from."""
        return {}

    @abstractmethod
    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        """Emit the update of one parameter; return its new value, then those of its state."""


def require(owner: str, name: str, value: float, *, low: float, high: float = math.inf) -> None:
    """Raise InvalidArgumentError unless low <= value < high and value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
        upper = "" if high == math.inf else f" and less than {high:g}"
        raise InvalidArgumentError(f"{owner}: {name}: expected {low:g} or more{upper}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """g ← g + λ·x;  v ← μ·v + g;  x ← x - η·v, with Nesterov's momentum x - η·(g + μ·v); without μ x - η·g.

    momentum: μ. Source: Sutskever et al., "On the importance of initialization and momentum", 2013.
    """

    name: ClassVar[str] = "SGD"
    hyper: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise InvalidArgumentError("SGD: nesterov: expected a momentum above 0 with it, got momentum=0")

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        g = u.decayed(x, g)
        if not state:
            return (u.Sub(x, u.Mul(u.rate, g)),)
        momentum = u.number("momentum")
        v = u.Add(u.Mul(momentum, state[0]), g)
        direction = u.Add(g, u.Mul(momentum, v)) if self.nesterov else v
        return u.Sub(x, u.Mul(u.rate, direction)), v


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """g ← g + λ·x;  m ← β₁·m + (1-β₁)·g;  v ← β₂·v + (1-β₂)·g²;
    x ← x - η/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε).

    Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    name: ClassVar[str] = "Adam"
    hyper: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "epsilon")
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def slots(self) -> dict[str, float]:
        return {"mean": 0.0, "square": 0.0}

    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        return _adam(u, x, u.decayed(x, g), *state)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """x ← x·(1 - η·λ), then as Adam without λ in g.

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    name: ClassVar[str] = "AdamW"
    weight_decay: float = 0.01

    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        return _adam(u, u.shrunk(x), g, *state)


def _adam(u: Update, x: str, g: str, mean: str, square: str) -> Sequence[str]:
    mean = u.Add(u.Mul(u.number("beta1"), mean), u.Mul(u.rest("beta1"), g))
    square = u.Add(u.Mul(u.number("beta2"), square), u.Mul(u.rest("beta2"), u.Mul(g, g)))
    rate = u.scalar("η/(1-β₁ᵗ)", lambda: u.exact.Div(u.exact_rate, u.one_less_power("beta1")))
    root = u.scalar("1/√(1-β₂ᵗ)", lambda: u.exact.Reciprocal(u.exact.Sqrt(u.one_less_power("beta2"))))
    denominator = u.Add(u.Mul(u.Sqrt(square), root), u.number("epsilon"))
    return u.Sub(x, u.Mul(rate, u.Div(mean, denominator))), mean, square


@dataclass(frozen=True, kw_only=True)
class RMSProp(Optimizer):
    """g ← g + λ·x;  s ← α·s + (1-α)·g²;  d = g / (√s + ε);  x ← x - η·d, with momentum b ← μ·b + d;  x ← x - η·b.

    centered: √(s - a²) for √s, a ← α·a + (1-α)·g. Source: Tieleman, Hinton, lecture 6.5, 2012; Graves, 2013.
    """

    name: ClassVar[str] = "RMSProp"
    hyper: ClassVar[tuple[str, ...]] = ("alpha", "epsilon", "momentum")
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def slots(self) -> dict[str, float]:
        return {"square": 0.0} | ({"mean": 0.0} if self.centered else {}) | ({"momentum": 0.0} if self.momentum else {})

    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        slots = dict(zip(self.slots(), state, strict=True))
        g = u.decayed(x, g)
        alpha, rest = u.number("alpha"), u.rest("alpha")
        slots["square"] = variance = u.Add(u.Mul(alpha, slots["square"]), u.Mul(rest, u.Mul(g, g)))
        if self.centered:
            slots["mean"] = mean = u.Add(u.Mul(alpha, slots["mean"]), u.Mul(rest, g))
            variance = u.Sub(variance, u.Mul(mean, mean))
        direction = u.Div(g, u.Add(u.Sqrt(variance), u.number("epsilon")))
        if self.momentum:
            slots["momentum"] = direction = u.Add(u.Mul(u.number("momentum"), slots["momentum"]), direction)
        return u.Sub(x, u.Mul(u.rate, direction)), *slots.values()


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """g ← g + λ·x;  s ← s + g²;  x ← x - η/(1 + (t-1)·δ) · g / (√s + ε).

    rate_decay: δ. initial: what s starts from. Source: Duchi, Hazan, Singer, 2011.
    """

    name: ClassVar[str] = "Adagrad"
    hyper: ClassVar[tuple[str, ...]] = ("epsilon", "rate_decay")
    epsilon: float = 1e-10
    rate_decay: float = 0.0
    initial: float = 0.0

    def slots(self) -> dict[str, float]:
        return {"square": self.initial}

    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        g = u.decayed(x, g)
        square = u.Add(state[0], u.Mul(g, g))

        def decayed() -> str:
            b = u.exact
            past = b.Mul(b.Sub(u.exact_step, u.exact_one), u.exact_number("rate_decay"))
            return b.Div(u.exact_rate, b.Add(u.exact_one, past))

        rate = u.scalar("η/(1+(t-1)δ)", decayed) if self.rate_decay else u.rate
        return u.Sub(x, u.Mul(rate, u.Div(g, u.Add(u.Sqrt(square), u.number("epsilon"))))), square


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """x ← x·(1 - η·λ) - η·sign(β₁·m + (1-β₁)·g);  m ← β₂·m + (1-β₂)·g.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, program 2.
    """

    name: ClassVar[str] = "Lion"
    hyper: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    beta1: float = 0.9
    beta2: float = 0.99

    def slots(self) -> dict[str, float]:
        return {"mean": 0.0}

    def update(self, u: Update, x: str, g: str, *state: str) -> Sequence[str]:
        direction = u.Sign(u.Add(u.Mul(u.number("beta1"), state[0]), u.Mul(u.rest("beta1"), g)))
        mean = u.Add(u.Mul(u.number("beta2"), state[0]), u.Mul(u.rest("beta2"), g))
        return u.Sub(u.shrunk(x), u.Mul(u.rate, direction)), mean


_READY = (SGD, Adam, AdamW, RMSProp, Adagrad, Lion)
OPTIMIZERS: dict[str, type[Optimizer]] = {rule.name.lower(): rule for rule in _READY}
AnyOptimizer = TypeVar("AnyOptimizer", bound=type[Optimizer])


def register_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """A decorator: `optimizer="name"` and `--optimizer name` mean this subclass of `Optimizer`, its name in lower case.

        from dataclasses import dataclass

        @ob.register_optimizer
        @dataclass(frozen=True, kw_only=True)
        class SignSGD(ob.optimizers.Optimizer):
            name = "SignSGD"

            def update(self, u, x, g):  # x ← x - η·sign(g)
                return (u.Sub(u.shrunk(x), u.Mul(u.rate, u.Sign(g))),)

    Errors: InvalidArgumentError for anything that is no such class, and for the name of an optimizer of this package.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer) and hasattr(optimizer, "name")):
        raise InvalidArgumentError(f"optimizer: expected a subclass of Optimizer with a name, got {optimizer!r}")
    if OPTIMIZERS.get(optimizer.name.lower()) in _READY:
        raise InvalidArgumentError(f"optimizer: the name {optimizer.name!r} is one of this package's. Take another")
    OPTIMIZERS[optimizer.name.lower()] = optimizer
    return optimizer


def check_optimizer(optimizer: Any) -> Optimizer | None:
    """The optimizer as an object; InvalidArgumentError unless it is None, a name or an Optimizer."""
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        load_extensions()
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]()
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    names, hint = ", ".join(map(repr, OPTIMIZERS)), near(str(optimizer), OPTIMIZERS)
    raise InvalidArgumentError(f"optimizer: expected None, one of {names}, or an Optimizer, got {optimizer!r}{hint}")


def __dir__() -> list[str]:
    return list(__all__)
