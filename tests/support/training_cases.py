"""Optimizers and losses beside PyTorch's: for each case what we are asked for and what torch is asked for.

`python -m tests.data.torch_values` computes torch's values once and stores them; the tests read the stored ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx_backprop.converters.training import losses, optimizers
from onnx_backprop.converters.training.optimizers import Group
from onnx_backprop.training import schedules

OPTIMIZER_VALUES = Path(__file__).parents[1] / "data" / "optimizers.npz"
LOSS_VALUES = Path(__file__).parents[1] / "data" / "losses.npz"
SCHEDULE_VALUES = Path(__file__).parents[1] / "data" / "schedules.npz"
STEPS = 8
RATES = [0.1, 0.1, 0.05, 0.05, 0.2, 0.01, 0.3, 0.02]  # the learning rate of each step


@dataclass(frozen=True)
class OptimizerCase:
    """torch_name: a class of torch.optim, or "Lion", which the script writes itself."""

    ours: optimizers.Optimizer
    torch_name: str
    torch: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)  # parameter -> factor of the rate, weight decay


OPTIMIZERS: dict[str, OptimizerCase] = {
    "sgd": OptimizerCase(optimizers.SGD(), "SGD"),
    "sgd_decay": OptimizerCase(optimizers.SGD(weight_decay=0.1), "SGD", {"weight_decay": 0.1}),
    "sgd_momentum": OptimizerCase(optimizers.SGD(momentum=0.9), "SGD", {"momentum": 0.9}),
    "sgd_nesterov": OptimizerCase(
        optimizers.SGD(momentum=0.8, nesterov=True, weight_decay=0.05),
        "SGD",
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    ),
    "adam": OptimizerCase(optimizers.Adam(), "Adam"),
    "adam_decay": OptimizerCase(
        optimizers.Adam(beta1=0.7, beta2=0.95, epsilon=1e-3, weight_decay=0.2),
        "Adam",
        {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.2},
    ),
    "adamw": OptimizerCase(optimizers.AdamW(), "AdamW", {"weight_decay": 0.01}),
    "adamw_decay": OptimizerCase(
        optimizers.AdamW(beta1=0.8, beta2=0.9, epsilon=1e-4, weight_decay=0.3),
        "AdamW",
        {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.3},
    ),
    "rmsprop": OptimizerCase(optimizers.RMSProp(), "RMSprop"),
    "rmsprop_everything": OptimizerCase(
        optimizers.RMSProp(alpha=0.8, epsilon=1e-3, momentum=0.7, centered=True, weight_decay=0.1),
        "RMSprop",
        {"alpha": 0.8, "eps": 1e-3, "momentum": 0.7, "centered": True, "weight_decay": 0.1},
    ),
    "adagrad": OptimizerCase(optimizers.Adagrad(), "Adagrad"),
    "adagrad_everything": OptimizerCase(
        optimizers.Adagrad(epsilon=1e-3, rate_decay=0.3, initial=0.5, weight_decay=0.1),
        "Adagrad",
        {"eps": 1e-3, "lr_decay": 0.3, "initial_accumulator_value": 0.5, "weight_decay": 0.1},
    ),
    "lion": OptimizerCase(optimizers.Lion(), "Lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "lion_decay": OptimizerCase(
        optimizers.Lion(beta1=0.6, beta2=0.8, weight_decay=0.2), "Lion", {"betas": (0.6, 0.8), "weight_decay": 0.2}
    ),
    "clip_norm": OptimizerCase(optimizers.SGD(momentum=0.9, clip_norm=0.4), "SGD", {"momentum": 0.9}),
    "clip_value": OptimizerCase(optimizers.SGD(momentum=0.9, clip_value=0.2), "SGD", {"momentum": 0.9}),
    "clip_both": OptimizerCase(optimizers.Adam(clip_value=0.3, clip_norm=0.5), "Adam"),
    "groups": OptimizerCase(
        optimizers.AdamW(weight_decay=0.1, groups=[Group(parameters=["*bias"], weight_decay=0.0, rate=2.0)]),
        "AdamW",
        {"weight_decay": 0.1},
        {"bias": {"rate": 2.0, "weight_decay": 0.0}},
    ),
    "accumulate": OptimizerCase(
        optimizers.AdamW(accumulate=3, clip_norm=0.5, ema=0.8), "AdamW", {"weight_decay": 0.01}
    ),
    "ema": OptimizerCase(optimizers.SGD(momentum=0.5, ema=0.9), "SGD", {"momentum": 0.5}),
}


@dataclass(frozen=True)
class LossCase:
    """torch_name: a function of torch.nn.functional, or one that the script writes itself.

    y, t: how prediction and target are drawn, see `drawn` in the script. more: other inputs of our graph.
    """

    ours: losses.Loss | losses.LossSum
    torch_name: str
    shape: tuple[int, ...]
    torch: dict[str, Any] = field(default_factory=dict)
    ignored: int | None = None  # the label that some positions carry
    y: str = "real"
    t: str = "real"
    more: tuple[str, ...] = ()


WEIGHT = [0.5, 2.0, 1.0, 0.25]
LENGTHS = ("input_lengths", "target_lengths")
Cross = losses.SoftmaxCrossEntropy

LOSSES: dict[str, LossCase] = {
    "mse": LossCase(losses.MSE(), "mse_loss", (3, 4)),
    "mse_sum": LossCase(losses.MSE(reduction="sum"), "mse_loss", (2, 3, 4), {"reduction": "sum"}),
    "l1": LossCase(losses.L1(), "l1_loss", (3, 4)),
    "l1_sum": LossCase(losses.L1(reduction="sum"), "l1_loss", (5,), {"reduction": "sum"}),
    "huber": LossCase(losses.Huber(), "huber_loss", (4, 5)),
    "huber_delta": LossCase(losses.Huber(delta=0.4), "huber_loss", (2, 3, 4), {"delta": 0.4}),
    "bce": LossCase(losses.BCEWithLogits(), "binary_cross_entropy_with_logits", (4, 3)),
    "bce_pos_weight": LossCase(
        losses.BCEWithLogits(pos_weight=[0.5, 2.0, 3.0], reduction="sum"),
        "binary_cross_entropy_with_logits",
        (4, 3),
        {"pos_weight": [0.5, 2.0, 3.0], "reduction": "sum"},
    ),
    "cross_entropy": LossCase(Cross(), "cross_entropy", (5, 4)),
    "cross_entropy_rank_4": LossCase(Cross(), "cross_entropy", (2, 4, 3, 2)),
    "cross_entropy_weight": LossCase(Cross(weight=WEIGHT), "cross_entropy", (6, 4), {"weight": WEIGHT}),
    "cross_entropy_ignore": LossCase(
        Cross(ignore_index=-100), "cross_entropy", (6, 4, 2), {"ignore_index": -100}, ignored=-100
    ),
    "cross_entropy_ignore_a_class": LossCase(
        Cross(ignore_index=1, reduction="sum"), "cross_entropy", (6, 4), {"ignore_index": 1, "reduction": "sum"}, 1
    ),
    "cross_entropy_smooth": LossCase(Cross(label_smoothing=0.2), "cross_entropy", (3, 4, 2), {"label_smoothing": 0.2}),
    "cross_entropy_everything": LossCase(
        Cross(weight=WEIGHT, ignore_index=-1, label_smoothing=0.3),
        "cross_entropy",
        (4, 4, 3, 2),
        {"weight": WEIGHT, "ignore_index": -1, "label_smoothing": 0.3},
        ignored=-1,
    ),
    "cross_entropy_everything_sum": LossCase(
        Cross(weight=WEIGHT, ignore_index=7, label_smoothing=0.3, reduction="sum"),
        "cross_entropy",
        (4, 4, 3),
        {"weight": WEIGHT, "ignore_index": 7, "label_smoothing": 0.3, "reduction": "sum"},
        ignored=7,
    ),
}


MORE = {"weight": WEIGHT, "ignore_index": -1}
LOSSES |= {
    "smooth_l1": LossCase(losses.SmoothL1(), "smooth_l1_loss", (4, 5)),
    "smooth_l1_beta": LossCase(losses.SmoothL1(beta=0.4, reduction="sum"), "smooth_l1_loss", (2, 7), {"beta": 0.4, "reduction": "sum"}),
    "probabilities": LossCase(losses.BCE(), "binary_cross_entropy", (4, 3), y="unit", t="unit"),
    "probabilities_sum": LossCase(losses.BCE(reduction="sum"), "binary_cross_entropy", (4, 3), {"reduction": "sum"}, y="unit", t="binary"),
    "nll": LossCase(losses.NLL(), "nll", (5, 4), y="shares", t="classes"),
    "nll_rank_4": LossCase(losses.NLL(reduction="sum"), "nll", (2, 4, 3, 2), {"reduction": "sum"}, y="shares", t="classes"),
    "nll_everything": LossCase(losses.NLL(**MORE), "nll", (4, 4, 3), MORE, -1, y="shares", t="classes"),
    "nll_log": LossCase(losses.NLL(log_probabilities=True, **MORE), "nll_loss", (4, 4, 3), MORE, -1, y="log", t="classes"),
    "focal": LossCase(losses.Focal(), "focal", (4, 5), t="binary"),
    "focal_soft": LossCase(losses.Focal(gamma=1.5, alpha=0.6), "focal", (4, 5), {"gamma": 1.5, "alpha": 0.6}, t="unit"),
    "focal_no_alpha": LossCase(losses.Focal(gamma=3, alpha=None, reduction="sum"), "focal", (4, 5), {"gamma": 3, "alpha": -1, "reduction": "sum"}, t="binary"),
    "kl_div": LossCase(losses.KLDivergence(), "kl_div", (4, 5), {"reduction": "batchmean"}, y="log", t="shares"),
    "kl_div_mean": LossCase(losses.KLDivergence(reduction="mean"), "kl_div", (4, 5, 2), {"reduction": "mean"}, y="log", t="shares"),
    "kl_div_log_target": LossCase(losses.KLDivergence(reduction="sum", log_target=True), "kl_div", (4, 5), {"reduction": "sum", "log_target": True}, y="log", t="log"),
    "kl_div_zeros": LossCase(losses.KLDivergence(form="logits"), "kl_logits", (4, 5), t="one class"),
    "kl_div_probabilities": LossCase(losses.KLDivergence(form="probabilities"), "kl_probabilities", (4, 5, 3), y="shares", t="shares"),
    "cosine_embedding": LossCase(losses.CosineEmbedding(), "cosine", (4, 5)),
    "dice": LossCase(losses.Dice(), "dice", (3, 2, 4, 5), y="unit", t="binary"),
    "dice_rows": LossCase(losses.Dice(smooth=0.1, activation="sigmoid", reduction="sum"), "dice", (3, 7), {"smooth": 0.1, "activation": "sigmoid", "reduction": "sum"}, t="binary"),
    "dice_softmax": LossCase(losses.Dice(activation="softmax"), "dice", (3, 4, 5), {"activation": "softmax"}, t="classes"),
    "tversky": LossCase(losses.Tversky(activation="sigmoid"), "tversky", (3, 2, 4, 5), {"activation": "sigmoid"}, t="unit"),
    "tversky_softmax": LossCase(losses.Tversky(alpha=0.9, beta=0.6, smooth=1e-5, activation="softmax"), "tversky", (2, 3, 4, 5), {"alpha": 0.9, "beta": 0.6, "smooth": 1e-5, "activation": "softmax"}, t="classes"),
    "ctc": LossCase(losses.CTC(form="logits"), "ctc_logits", (9, 4, 5), t="sequences", more=LENGTHS),
    "ctc_sum": LossCase(
        losses.CTC(form="logits", reduction="sum", blank=2),
        "ctc_logits",
        (8, 3, 4),
        {"reduction": "sum", "blank": 2},
        t="sequences",
        more=LENGTHS,
    ),
    "ctc_zero": LossCase(
        losses.CTC(form="logits", zero_infinity=True),
        "ctc_logits",
        (4, 5, 4),
        {"zero_infinity": True},
        t="sequences",
        more=LENGTHS,
    ),
    "sum": LossCase(0.5 * losses.SoftmaxCrossEntropy(weight=WEIGHT) + 2 * losses.Dice(activation="softmax"), "mixture", (3, 4, 5), t="classes"),
}  # fmt: skip


@dataclass(frozen=True)
class ScheduleCase:
    """torch_name: a class of torch.optim.lr_scheduler. steps: how many rates are compared."""

    ours: schedules.Schedule
    torch_name: str
    rate: float
    steps: int
    torch: dict[str, Any] = field(default_factory=dict)


SCHEDULES: dict[str, ScheduleCase] = {
    "constant": ScheduleCase(schedules.Constant(0.3), "ConstantLR", 0.3, 5, {"factor": 1.0}),
    "linear": ScheduleCase(
        schedules.Linear(0.4, steps=6, final=0.1), "LinearLR", 0.4, 9,
        {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 6},
    ),
    "warmup": ScheduleCase(
        schedules.Warmup(schedules.Constant(0.4), steps=5), "LinearLR", 0.4, 9,
        {"start_factor": 0.2, "end_factor": 1.0, "total_iters": 4},
    ),
    "cosine": ScheduleCase(
        schedules.Cosine(0.5, steps=10, final=0.02), "CosineAnnealingLR", 0.5, 11, {"T_max": 10, "eta_min": 0.02}
    ),
    "step": ScheduleCase(
        schedules.Step(0.5, every=3, factor=0.5), "StepLR", 0.5, 10, {"step_size": 3, "gamma": 0.5}
    ),
    "one_cycle": ScheduleCase(
        schedules.OneCycle(0.8, steps=20), "OneCycleLR", 0.1, 20, {"max_lr": 0.8, "total_steps": 20}
    ),
    "one_cycle_everything": ScheduleCase(
        schedules.OneCycle(0.8, steps=31, rise=0.45, below=5, end_below=50), "OneCycleLR", 0.1, 31,
        {"max_lr": 0.8, "total_steps": 31, "pct_start": 0.45, "div_factor": 5, "final_div_factor": 50},
    ),
}  # fmt: skip
