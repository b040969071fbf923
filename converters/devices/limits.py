"""What the kernels of a provider of onnxruntime cannot do, as far as a graph can be written otherwise."""

from dataclasses import dataclass

HOST = "host"  # the annotation of nodes that are for the CPU: the session's layer_assignment_settings says "cpu(host)"


@dataclass(frozen=True)
class Limits:
    """What `adapted` is to avoid.

    fixed_lengths: arithmetic on shapes runs on the host, so lengths are to be those of a batch.
    float64, float16: whether there is arithmetic in these types.
    nan: whether what is no number stays so, in a maximum above all.
    lacks: operators without a kernel that `expand.FORMS` has others for; of BatchNormalization the training mode,
        of MaxPool the Indices, of Resize antialias and of Split many parts are meant.
    annotations: whether nodes can be sent to the host by an annotation.
    """

    fixed_lengths: bool = False
    float64: bool = True
    float16: bool = True
    nan: bool = True
    lacks: frozenset[str] = frozenset()
    annotations: bool = True


NO_LIMITS = Limits()
