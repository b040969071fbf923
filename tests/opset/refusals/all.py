"""Bad calls and the sentence each is refused with: one valid call per operator, and changes to it."""

from __future__ import annotations

from tests.opset.refusals.attributes import ATTRIBUTES
from tests.opset.refusals.convolutions import CONVOLUTIONS
from tests.opset.refusals.interpolation import INTERPOLATION, RESIZE
from tests.opset.refusals.layers import AVERAGE_POOLS, ELEMENTWISE, MAX_POOLS, NORMALISATIONS, POOLS

REFUSED = (
    *NORMALISATIONS,
    *ELEMENTWISE,
    *POOLS,
    *MAX_POOLS,
    *AVERAGE_POOLS,
    *ATTRIBUTES,
    *CONVOLUTIONS,
    *INTERPOLATION,
    *RESIZE,
)
