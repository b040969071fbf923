"""Numbers worked out by hand or published with a specification: one table for references, evaluator and sessions."""

from __future__ import annotations

from tests.worked.convolution import biases, convolutions, forwards, transposed
from tests.worked.interpolation import interpolations, resamples
from tests.worked.layers import activations, average_pools, batch_norms_forward, layer_norms, max_pools, normalisations
from tests.worked.resize import resizes

EXAMPLES = (
    *interpolations(),
    *resamples(),
    *resizes(),
    *forwards(),
    *convolutions(),
    *transposed(),
    *biases(),
    *max_pools(),
    *activations(),
    *average_pools(),
    *batch_norms_forward(),
    *normalisations(),
    *layer_norms(),
)
