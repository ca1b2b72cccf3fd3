"""Is the data stream a function of the step alone?"""

import numpy as np

from jaxdp.checking.lines import Line
from jaxdp.checking.subject import Subject
from jaxdp.data import Loader

NAME = "data stream"
_MOST = 1 << 21  # positions whose examples are counted


def stream(subject: Subject) -> Line:
    """The same batch when asked again, in another order; every example once an epoch."""
    batches = subject.batches
    order = (0, 1, 5, 1, 0)
    seen: dict[int, dict[str, np.ndarray]] = {}
    for t in order:
        batch = {name: np.asarray(x) for name, x in batches.batch(t).items()}
        if t in seen and any(seen[t][name].tobytes() != batch[name].tobytes() for name in batch):
            return Line(
                NAME,
                "fail",
                f"step {t} gave other examples when asked again: the stream depends on what was "
                "read before, so a resumed run sees other data; make it a function of the step",
            )
        seen[t] = batch
    shapes = {tuple((name, x.shape, str(x.dtype)) for name, x in b.items()) for b in seen.values()}
    if len(shapes) > 1:
        return Line(
            NAME, "fail", f"batches have {len(shapes)} different shapes; every step compiles anew"
        )
    if not isinstance(batches, Loader) or len(batches.source) > _MOST:
        return Line(
            NAME, "pass", "a function of the step: nothing in it knows the number of devices"
        )
    return _every_example_once(batches)


def _every_example_once(loader: Loader) -> Line:
    n = len(loader.source)
    steps = -(-n // loader.global_batch)
    first_epoch = np.concatenate([loader.indices(t) for t in range(steps)])[:n]
    counts = np.bincount(first_epoch, minlength=n)
    if (counts != 1).any():
        example = int(np.argmax(counts != 1))
        return Line(
            NAME, "fail", f"example {example} came {counts[example]} times in the first epoch"
        )
    return Line(NAME, "pass", f"a function of the step; all {n:,} examples once in the first epoch")
