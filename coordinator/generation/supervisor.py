"""The life of the engine's thread: load the model, run the loop, begin it anew when it fails, let everything go.

Everything MLX is made, used and dropped here. A loop that fails keeps the model; one that fails again and again ends.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from titan.common.errors import EngineFailed, TitanError
from titan.common.log import get_logger
from titan.coordinator.generation.grammar import Grammars
from titan.coordinator.generation.jobs import Jobs
from titan.coordinator.generation.life import Life, stopping_error
from titan.coordinator.generation.loop import Loop
from titan.coordinator.generation.model import LoadedModel, ServedModel
from titan.coordinator.generation.observer import Observer
from titan.coordinator.generation.scheduler import Occupancy
from titan.coordinator.generation.vocabulary import Vocabulary
from titan.coordinator.generation.watchdog import Watchdog
from titan.coordinator.generation.work import Work

__all__ = ["MAX_RESTARTS_A_MINUTE", "Supervisor"]

MAX_RESTARTS_A_MINUTE = 5

log = get_logger("coordinator.engine")


class Supervisor:
    """`run` is the engine's thread.

    Args:
        load: makes the model.

    Attributes:
        restarts: times that the loop began anew after a failure.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        jobs: Jobs,
        work: Work,
        life: Life,
        watchdog: Watchdog,
        observer: Observer,
        max_sequences: int,
    ) -> None:
        self.restarts = 0
        self._load = load
        self._jobs = jobs
        self._work = work
        self._life = life
        self._watchdog = watchdog
        self._observer = observer
        self._max_sequences = max_sequences
        self._loop: Loop | None = None
        self._restarted_s: deque[float] = deque(maxlen=MAX_RESTARTS_A_MINUTE)

    @property
    def occupancy(self) -> Occupancy:
        loop = self._loop
        return Occupancy() if loop is None else loop.occupancy

    def run(self) -> None:
        if (found := self._load_model()) is not None:
            loaded, served = found
            try:
                self._serve(loaded, served.grammars)
            finally:
                self._loop = None
                if loaded.prompt_cache is not None:
                    loaded.prompt_cache.close()
                loaded.close()
            del loaded
        del found
        self._work.refuse(stopping_error())
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _serve(self, loaded: LoadedModel, grammars: Grammars) -> None:
        """Until the engine is stopped, or has failed too often."""
        while True:
            self._loop = Loop(
                loaded,
                grammars,
                self._jobs,
                self._work,
                self._life,
                self._watchdog,
                self._observer,
                self._max_sequences,
            )
            try:
                self._loop.run()
            except Exception:
                log.error("the engine's loop failed", exc_info=True)
                self.restarts += 1
                if not self._may_go_on():
                    self._life.fail("the engine failed again and again")
                    self._jobs.refuse(EngineFailed("the engine failed again and again", "see the coordinator's log"))
                    return
            else:
                return

    def _may_go_on(self) -> bool:
        now = time.monotonic()
        if len(self._restarted_s) == MAX_RESTARTS_A_MINUTE and now - self._restarted_s[0] <= 60:
            return False
        self._restarted_s.append(now)
        return True

    def _load_model(self) -> tuple[LoadedModel, ServedModel] | None:
        self._life.loading("loading the model")
        try:
            maybe_set_recommended_wired_limit()  # on Metal: weights may stay resident; elsewhere nothing
            loaded = self._load()
            tokenizer = loaded.tokenizer
            served = ServedModel(
                loaded.name, loaded.context_tokens, tokenizer, Vocabulary(tokenizer), Grammars(tokenizer)
            )
        except Exception as error:
            log.error("the model could not be loaded", exc_info=True)
            traceback.clear_frames(error.__traceback__)
            self._life.fail(str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}")
            return None
        self._life.ready(served)
        return loaded, served
