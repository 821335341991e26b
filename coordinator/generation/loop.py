"""The engine's loop: take in requests that fit, do other work between steps, give the scheduler its turns.

On the engine's thread. Knows neither how a model is loaded nor what happens after the loop has failed.
"""

from __future__ import annotations

import traceback

from titan.common.errors import EngineFailed
from titan.coordinator.generation.grammar import Grammars
from titan.coordinator.generation.jobs import Jobs
from titan.coordinator.generation.life import Life
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.generation.observer import Observer
from titan.coordinator.generation.scheduler import Occupancy, Scheduler
from titan.coordinator.generation.watchdog import Watchdog
from titan.coordinator.generation.work import Work

__all__ = ["Loop"]


class Loop:
    """Attributes:
    occupancy: of the scheduler after its last turn; any thread may read it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        grammars: Grammars,
        jobs: Jobs,
        work: Work,
        life: Life,
        watchdog: Watchdog,
        observer: Observer,
        max_sequences: int,
    ) -> None:
        self._jobs = jobs
        self._work = work
        self._life = life
        self._watchdog = watchdog
        self._scheduler = Scheduler(loaded, grammars, jobs.end, observer, max_sequences)
        self.occupancy: Occupancy = self._scheduler.occupancy

    def run(self) -> None:
        """Until the engine is stopped and nothing runs any more.

        Raises:
            Exception: what made the loop fail; every request that ran has got an error.
        """
        scheduler = self._scheduler
        try:
            while self._wait_for_something():
                self._watchdog.begin()
                if self._work.waiting:
                    scheduler.settle()
                    self._work.run()
                while (job := self._jobs.take(scheduler.fits)) is not None:
                    scheduler.admit(job)
                scheduler.turn()
                self.occupancy = scheduler.occupancy
                self._watchdog.end()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            scheduler.fail_all(error)
            self._jobs.end_running(EngineFailed(f"the engine failed ({type(error).__name__})", "try again"))
            self.occupancy = scheduler.occupancy
            raise
        finally:
            self._watchdog.end()

    def _wait_for_something(self) -> bool:
        """False when the engine is to end."""
        if not self._scheduler.idle:
            return True
        with self._jobs.changed:
            self._jobs.changed.wait_for(lambda: self._life.stopping or self._jobs.waiting or self._work.waiting)
        return not self._life.stopping
