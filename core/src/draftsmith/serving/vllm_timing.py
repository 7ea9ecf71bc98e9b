"""Seconds that a vLLM worker spends on its steps, and of these on drafting. vLLM counts neither.

vLLM mixes :class:`RoundClock` into its worker where it is named as ``worker_extension_cls``, in whatever process that
is, and ``LLM.collective_rpc`` calls it there. Only what a step is made of is wrapped, nothing is changed: on a CPU a
clock is read before and after, on a GPU an event is recorded in the stream, and read when all is over.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

__all__ = ["EXTENSION", "RoundClock"]

#: As ``worker_extension_cls`` takes it.
EXTENSION = f"{__name__}.RoundClock"


class _Clock:
    """Time within calls; on a GPU, from when its stream comes to the work of a call until it has done all of it."""

    def __init__(self, *, gpu: bool) -> None:
        self.calls = 0
        self._gpu, self._seconds = gpu, 0.0
        self._events: list[tuple[Any, Any]] = []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = self._mark()
            try:
                return function(*arguments, **keywords)
            finally:
                self.calls += 1
                self._add(started, self._mark())

        return timed

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, started: Any, ended: Any) -> None:
        if self._gpu:
            self._events.append((started, ended))
        else:
            self._seconds += ended - started

    def seconds(self) -> float:
        if self._gpu:
            import torch

            torch.cuda.synchronize()
            self._seconds += sum(started.elapsed_time(ended) for started, ended in self._events) / 1000
            self._events.clear()
        return self._seconds


class RoundClock:
    """What a worker of vLLM is given. Names begin with ``draftsmith_``: none may be the worker's own."""

    def draftsmith_start_clocks(self) -> None:
        """Begin to count, from zero. Called once, after the warm-up."""
        worker: Any = self
        runner = worker.model_runner
        gpu = worker.device.type == "cuda"
        steps, drafting = _Clock(gpu=gpu), _Clock(gpu=gpu)
        runner.execute_model = steps.around(runner.execute_model)
        runner.sample_tokens = steps.around(runner.sample_tokens)
        # Model runner V1 proposes by a method of its own, V2 by its speculator.
        speculator = getattr(runner, "speculator", None)
        if hasattr(runner, "propose_draft_token_ids"):
            runner.propose_draft_token_ids = drafting.around(runner.propose_draft_token_ids)
        elif speculator is not None:
            speculator.propose = drafting.around(speculator.propose)
        worker.draftsmith_clocks = (steps, drafting)

    def draftsmith_read_clocks(self) -> dict[str, float | None]:
        """Seconds of all steps, and of drafting within them; the latter None where nothing was drafted."""
        worker: Any = self
        steps, drafting = worker.draftsmith_clocks
        return {"steps": steps.seconds(), "drafting": drafting.seconds() if drafting.calls else None}
