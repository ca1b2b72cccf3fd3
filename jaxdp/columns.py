"""The columns of a run's log: what a row holds besides the metrics of the loss's own."""

# reported by the step
STEP = (
    "loss", "weight", "grad_norm", "inner_grad_norm", "skipped", "nonfinite", "nonfinite_run",
    "loss_scale", "overflows", "learning_rate",
)  # fmt: skip
# added by the loop, by the log and, of the time that is left, by what people see
LOG = (
    "step", "eval", "unit", "elapsed_s", "step_time_s", "data_wait", "per_second",
    "per_second_per_device", "eta_s",
)  # fmt: skip
EVAL_PREFIX = "eval/"  # of the held-out means in TensorBoard


def taken(name: str) -> bool:
    """Whether a loss may not call a metric of its own so."""
    return name in STEP or name in LOG or name.startswith(EVAL_PREFIX)
