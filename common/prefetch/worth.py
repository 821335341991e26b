"""Whether prefetch pays as a whole: steps with it held against steps without it, in turns, by the clock.

Condition (9) says what should pay; contention for cores, buses and slots that it does not know shows here. Prefetch
that does not make steps shorter sleeps, longer each time. Knows durations, nothing of experts.
"""

from __future__ import annotations

__all__ = ["Worth"]

LEARNING_STEPS, LEARNING_AGAIN_STEPS = 32, 8
LEAST_STALL = 0.03  # of a step; prefetch cannot save more than the stall
BLOCK_STEPS = 4  # of a trial, with and without in turns; the first of each block is under the other's influence
FIRST_VERDICT, LAST_VERDICT = 2, 12  # blocks
CLEAR_LOSS, LOSS, GAIN = 1.1, 1.02, 0.95
WORTH = 0.98  # with ÷ without, at the last verdict and in use
USE_STEPS, REST_STEPS, USE_ROUNDS = 60, 4, 8
FIRST_SLEEP_STEPS, LONGEST_SLEEP_STEPS = 1024, 16_384
OUTLIERS = 0.1  # share of the longest steps that is left out


class Worth:
    """Learning, trying, using or asleep.

    Attributes:
        phase: "learning" (predictors are scored, nothing is read), "trying", "using" or "asleep".
    """

    def __init__(self) -> None:
        self.phase = "learning"
        self._left = LEARNING_STEPS
        self._sleep_steps = FIRST_SLEEP_STEPS
        self._start("learning")

    @property
    def reading(self) -> bool:
        """This step prefetches."""
        if self.phase == "trying":
            return self._step % (2 * BLOCK_STEPS) < BLOCK_STEPS
        return self.phase == "using" and self._step % (USE_STEPS + REST_STEPS) < USE_STEPS

    @property
    def looking(self) -> bool:
        """This step asks predictors."""
        return self.phase == "learning" or self.reading

    @property
    def ratio(self) -> float | None:
        """Mean step with prefetch ÷ without, the longest of both left out; None before there are some of each."""
        if len(self._with) < BLOCK_STEPS or len(self._without) < BLOCK_STEPS:
            return None
        return _mean(self._with) / _mean(self._without)

    def ended(self, seconds: float, stall_s: float, rows: int, *, promising: bool) -> None:
        """A step of `rows` rows has ended.

        Args:
            stall_s: of `seconds`, spent waiting for reads.
            promising: condition (9) names something to read.
        """
        self._count(seconds, stall_s, rows)
        self._step += 1
        if self.phase == "asleep" and self._step >= self._left:
            if self._stall_s >= LEAST_STALL * self._seconds:
                self._start("learning", LEARNING_AGAIN_STEPS)
            else:
                self._start("asleep", FIRST_SLEEP_STEPS)
        elif self.phase == "learning" and self._step >= self._left:
            small = self._stall_s < LEAST_STALL * self._seconds
            self._start("trying") if promising and not small else self._sleep()
        elif self.phase == "trying" and self._step % (2 * BLOCK_STEPS) == 0:
            self._judge(self._step // (2 * BLOCK_STEPS), promising)
        elif self.phase == "using" and self._step >= USE_ROUNDS * (USE_STEPS + REST_STEPS):
            ratio = self.ratio
            self._start("using") if promising and ratio is not None and ratio < WORTH else self._sleep()

    def _count(self, seconds: float, stall_s: float, rows: int) -> None:
        self._seconds += seconds
        self._stall_s += stall_s
        if self.phase not in ("trying", "using"):
            return
        place = self._step % (2 * BLOCK_STEPS if self.phase == "trying" else USE_STEPS + REST_STEPS)
        turn = BLOCK_STEPS if self.phase == "trying" else USE_STEPS
        if self._rows is None:
            self._rows = rows
        if rows == self._rows and place not in (0, turn):
            (self._with if place < turn else self._without).append(seconds)

    def _judge(self, blocks: int, promising: bool) -> None:
        ratio = self.ratio
        if ratio is None:  # rows came and went
            if blocks >= LAST_VERDICT:
                self._start("trying")
        elif not promising or (blocks >= FIRST_VERDICT and ratio > CLEAR_LOSS):
            self._sleep()
        elif blocks >= LAST_VERDICT // 2 and ratio < GAIN:
            self._use()
        elif blocks >= LAST_VERDICT // 2 and ratio > LOSS:
            self._sleep()
        elif blocks >= LAST_VERDICT:
            self._use() if ratio < WORTH else self._sleep()

    def _use(self) -> None:
        self._sleep_steps = FIRST_SLEEP_STEPS
        self._start("using")

    def _sleep(self) -> None:
        self._start("asleep", self._sleep_steps)
        self._sleep_steps = min(2 * self._sleep_steps, LONGEST_SLEEP_STEPS)

    def _start(self, phase: str, steps: int = LEARNING_STEPS) -> None:
        self.phase = phase
        self._left = steps
        self._step = 0
        self._seconds = self._stall_s = 0.0
        self._rows: int | None = None
        self._with: list[float] = []
        self._without: list[float] = []


def _mean(seconds: list[float]) -> float:
    kept = sorted(seconds)[: max(1, round((1 - OUTLIERS) * len(seconds)))]
    return sum(kept) / len(kept)
