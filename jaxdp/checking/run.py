"""All questions, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from jaxdp.checking import equality, execution, precision
from jaxdp.checking.lines import Line
from jaxdp.checking.randomness import randomness
from jaxdp.checking.stream import stream
from jaxdp.checking.subject import Subject
from jaxdp.types import Device


def run_check(
    subject: Subject,
    devices: Sequence[Device],
    on_line: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Whether a training on `devices` is the training on the first of them.

    Args:
      subject: the training.
      devices: at least two, of one kind.
      on_line: told each answer as soon as it is found.

    Returns:
      One line per question; the training is right if none of them failed.
    """
    lines: list[Line] = []
    subject = replace(subject, make_step=cache(subject.make_step))  # two lines ask the same program

    def answer(line: Line) -> None:
        lines.append(line)
        on_line(line)

    if subject.other_algorithm is not None:
        for name in (*equality.NAMES, precision.NAME):
            answer(Line(name, "n/a", subject.other_algorithm))
    else:
        answer(equality.gradients(subject, devices))
        answer(equality.weights(subject, devices, lines[0].verdict == "pass"))
        answer(equality.optimizer(subject, devices))
        answer(precision.precision(subject, devices, lines[0].verdict == "pass"))
    answer(randomness(subject, devices))
    answer(stream(subject))
    for line in execution.asked_of_a_run(subject, devices):
        answer(line)
    return lines
