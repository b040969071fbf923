"""A loss and an optimizer by names: `--loss log_cosh --optimizer signsgd`."""

from dataclasses import dataclass

import onnx_backprop as ob


@ob.register_loss("log_cosh")
def log_cosh(op, outputs):
    """The mean of log cosh(y - t), of the model's first output."""
    y = next(iter(outputs.values()))
    return op.ReduceMean(op.Log(op.Cosh(y - op.input("target", y))), keepdims=0)


@ob.register_optimizer
@dataclass(frozen=True, kw_only=True)
class SignSGD(ob.optimizers.Optimizer):
    """m ← βm + (1 - β)g;  x ← x - ηλx - η·sign(m)."""

    name = "SignSGD"
    hyper = ("beta",)
    beta: float = 0.9

    def slots(self):
        """One tensor a parameter, which starts from 0."""
        return {"mean": 0.0}

    def update(self, u, x, g, *state):
        """Emit the update."""
        mean = u.Add(u.Mul(u.number("beta"), state[0]), u.Mul(u.rest("beta"), g))
        return u.Sub(u.shrunk(x), u.Mul(u.rate, u.Sign(mean))), mean
