"""SamplerCache: the sampler of the last batch, built only when the batch changes."""

from collections.abc import Sequence

from peagle.engine.batch import BatchEntry
from peagle.engine.sampling.sampler import Sampler


class SamplerCache:
    def __init__(self, rows: int) -> None:
        """`rows`: the most rows of a request in one pass."""
        self.rows = rows
        self._ids: tuple[str, ...] = ()
        self._sampler: Sampler | None = None

    def clear(self) -> None:
        """Forget the sampler: a request has a new sampling state, or the engine ends."""
        self._ids = ()
        self._sampler = None

    def sampler(self, entries: Sequence[BatchEntry]) -> Sampler | None:
        """None: every request takes the argmax of the raw logits."""
        states = [state for entry in entries if (state := entry.state.sampling_state) is not None]
        if all(state.plain for state in states):
            return None
        ids = tuple(entry.request.id for entry in entries)
        if self._ids != ids:
            self._ids = ids
            self._sampler = Sampler(states, self.rows)
        return self._sampler
