"""Names of what a training graph keeps beside its parameters, and of what it says of itself."""

RANDOM_STATE = "random_state"  # int64: the seed, and the number of runs so far
LEARNING_RATE, STEP, MICRO_STEP = "learning_rate", "optimizer_step", "micro_step"
LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS = "loss_scale", "loss_scale.good_steps", "loss_scale.skipped_steps"
LEAST_SCALE = 2.0**-14
OPTIMIZER_METADATA = "onnx_backprop.optimizer"
MUST_HAVE_THE_SHAPE_OF = "_must_have_the_shape_of_"  # in names of nodes, between a target and its prediction
SOFTMAX_CROSS_ENTROPY = "softmax_cross_entropy"
STAGED = "onnx_backprop.staged"  # metadata of the last node of a sum in stages: the operator that it stands for
CLASSES_LAST = "If the classes are on the last axis, give the loss axis=-1"  # what to do about labels of another shape
