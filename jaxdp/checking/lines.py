"""What a check says."""

from typing import Literal, NamedTuple

Verdict = Literal["pass", "fail", "n/a"]


class Line(NamedTuple):
    """The answer to one question.

    Attributes:
      name: the question, in a word or two.
      verdict: "pass", "fail" or "n/a", not applicable.
      detail: what was measured; of a failure also where, both values and the likely cause.
    """

    name: str
    verdict: Verdict
    detail: str


def text(line: Line) -> str:
    """The line as printed."""
    return f"{line.verdict:<4}  {line.name:<14}  {line.detail}"
