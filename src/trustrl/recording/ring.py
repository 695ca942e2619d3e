"""Ring of a recorder: the last steps in full, which a trigger writes."""

from collections import deque

from trustrl.recording.token_rows import Rows


class Ring:
    """The last steps in full, in host memory.

    Holds at most `num_steps` steps and `max_bytes` bytes, and drops the oldest step first.
    """

    def __init__(self, *, num_steps: int, max_bytes: int) -> None:
        self._num_steps = num_steps
        self._max_bytes = max_bytes
        self._steps: deque[tuple[int, list[Rows]]] = deque()
        self.nbytes = 0
        self.left_off: dict[int, int] = {}
        """Number of tokens by step that did not fit even after every older step was dropped."""

    def add(self, rows: Rows) -> None:
        """Adds one micro-batch of the newest step, or of a new one."""
        if not self._num_steps:
            return
        if not self._steps or self._steps[-1][0] != rows.step:
            self._steps.append((rows.step, []))
        while len(self._steps) > self._num_steps:
            self._drop_oldest()
        while len(self._steps) > 1 and self.nbytes + rows.nbytes > self._max_bytes:
            self._drop_oldest()
        if self.nbytes + rows.nbytes > self._max_bytes:
            self.left_off[rows.step] = self.left_off.get(rows.step, 0) + len(rows)
            return
        self._steps[-1][1].append(rows)
        self.nbytes += rows.nbytes

    def steps(self) -> list[tuple[int, list[Rows]]]:
        """Returns the steps still held, oldest first."""
        return list(self._steps)

    def _drop_oldest(self) -> None:
        step, parts = self._steps.popleft()
        self.nbytes -= sum(part.nbytes for part in parts)
        self.left_off.pop(step, None)
