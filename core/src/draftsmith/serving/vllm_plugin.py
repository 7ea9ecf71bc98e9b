"""draftsmith's ``vllm.general_plugins`` entry point: makes algorithms known to vLLM that it does not know by itself.

vLLM calls :func:`register` in each of its processes, before it reads a model's configuration, and perhaps more than
once. Each installed algorithm that names a ``vllm_registration`` is given its call.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_done: set[str] = set()


def register() -> None:
    """Call every installed algorithm's ``vllm_registration``, once a process.

    A plugin that fails is logged with its name and left out: it must not keep vLLM from serving other models.
    """
    from draftsmith.plugins import load_plugins, load_reference

    log = logging.getLogger(__name__)
    try:
        registry = load_plugins(raise_conflicts=False)
    except Exception:
        log.exception("draftsmith's plugins cannot be loaded in this vLLM process")
        return
    for algorithm in registry.algorithms:
        reference = algorithm.vllm_registration
        if reference is None or reference in _done:
            continue
        try:
            load_reference(reference)()
            _done.add(reference)
        except Exception:
            log.exception("algorithm %r cannot be registered with vLLM (%s)", algorithm.name, reference)
