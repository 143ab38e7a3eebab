"""Pools the final hidden states of a sequence into a vector, chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Pool:
    """Computes the mean of rows. The bits of the mean do not depend on how steps divide the
    rows."""

    def __init__(self) -> None:
        self._sum: npt.NDArray[np.float64] | None = None
        self._num_rows = 0

    def clear(self) -> None:
        """Remove all rows."""
        self._sum, self._num_rows = None, 0

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """Add rows [N, size], in the order of their tokens."""
        import numpy as np  # an engine without a model does not need numpy

        terms = rows.astype(np.float64)
        if self._sum is not None:
            terms = np.concatenate([self._sum[None], terms])
        # Along this axis numpy adds row after row, so the order does not depend on the chunks.
        self._sum = np.add.reduce(terms, axis=0)
        self._num_rows += len(rows)

    def mean(self) -> npt.NDArray[np.float32]:
        """Returns the mean [size]. At least one row must have been added."""
        assert self._sum is not None
        return (self._sum / self._num_rows).astype("float32")
