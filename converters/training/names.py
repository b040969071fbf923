"""Names of what a training graph keeps beside its parameters, and of what it says of itself."""

import re

RANDOM_STATE = "random_state"  # int64: the seed, and the number of runs so far
LEARNING_RATE, STEP, MICRO_STEP = "learning_rate", "optimizer_step", "micro_step"
COUNTED = "counted_tokens"  # of the runs since the last update
LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS = "loss_scale", "loss_scale.good_steps", "loss_scale.skipped_steps"
LEAST_SCALE = 2.0**-14
OPTIMIZER_METADATA = "onnx_backprop.optimizer"
_MUST_HAVE_THE_SHAPE_OF = "_must_have_the_shape_of_"
SOFTMAX_CROSS_ENTROPY, NEXT_TOKEN = "softmax_cross_entropy", "next_token"
PERPLEXITY = "perplexity"
CLASSES_FIRST = "If the classes are on axis 1, give the loss axis=1"
CLASSES_LAST = "If the classes are on the last axis, give the loss axis=-1"  # what to do about labels of another shape


def shape_check(target: str, prediction: str) -> str:
    """What nodes are named after that fail where a target has another shape: onnxruntime's message names them."""
    return f"{target}{_MUST_HAVE_THE_SHAPE_OF}{prediction}"


def failed_shape_check(message: str) -> tuple[str, str] | None:
    """The target and the prediction of the `shape_check` whose failure a message of onnxruntime is about."""
    match = re.search(rf"Name:'(.+){_MUST_HAVE_THE_SHAPE_OF}(.+)/Reshape", message)
    return None if match is None else (match[1], match[2])
