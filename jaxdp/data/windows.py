"""Examples of a language model, cut from one long run of tokens."""

from pathlib import Path

import numpy as np

from jaxdp.errors import UserError


class Windows:
    """Pieces of `context` targets: every token but the first is a target exactly once.

        tokens    t0 t1 t2 t3 t4 t5 t6         context 3
        example 0 t0 t1 t2 t3                  predicts t1 t2 t3
        example 1          t3 t4 t5 t6         predicts t4 t5 t6

    Tokens after the last whole window are not used.
    """

    def __init__(self, tokens: np.ndarray, context: int, path: Path):
        """Cuts `tokens` (unsigned integers [m], may be memory-mapped); `path` is for messages.

        Raises:
          UserError: context below 1, or fewer than context + 1 tokens.
        """
        if context < 1:
            raise UserError(f"context is {context}: give at least 1")
        if len(tokens) <= context:
            raise UserError(
                f"{path}: {len(tokens)} tokens to train or evaluate on, and one example of "
                f"context {context} needs {context + 1}; give more text, or a smaller "
                f"context"
            )
        pieces = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)
        self._windows = pieces[::context]  # a view: [examples, context + 1]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return {"tokens": self._windows[indices].astype(np.int32)}
