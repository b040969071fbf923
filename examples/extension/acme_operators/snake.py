"""acme::Snake, written out in other operators, which have gradients."""

import onnx_backprop as ob


@ob.register_expansion("acme", "Snake", versions=[1])
def snake(op):
    """y = x + sin²(αx) / α."""
    x, alpha = op.input(0), op.attribute("alpha", 1.0)
    if alpha == 0:
        raise op.refuse("expected an alpha other than 0")
    sine = op.Sin(op.Mul(x, alpha))
    return op.Add(x, op.Div(op.Mul(sine, sine), alpha))
