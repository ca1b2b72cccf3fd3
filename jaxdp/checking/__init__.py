"""Is a training on N devices the training on one?  Each question is a line of the answer."""

from jaxdp.checking.lines import Line
from jaxdp.checking.run import run_check
from jaxdp.checking.subject import Subject, subject_of

__all__ = ["Line", "Subject", "run_check", "subject_of"]
