"""``--explain``: every value of a run, and where it came from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from draftsmith.config.load import DEFAULT, leaves

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["explanation", "print_explanation"]


def explanation(run: ResolvedRun) -> list[tuple[str, str, str]]:
    """(key path, value, where it came from) of everything that the run uses."""
    rows = []
    for key, value in leaves(run.resolved_recipe()):
        rows.append((key, _shown(value), run.provenance.get(key) or _outer(key, run)))
    return rows


def _outer(key: str, run: ResolvedRun) -> str:
    while key:
        key = key.rpartition(".")[0]
        if key in run.provenance:
            return run.provenance[key]
    return DEFAULT


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _engine(run: ResolvedRun) -> str:
    if not run.recipe.captures_online:
        return run.capture_engine
    servers = run.recipe.online.endpoints
    where = f"vllm, on {', '.join(servers)}" if servers else run.capture_engine
    return f"{where}, while the draft is trained"


def print_explanation(run: ResolvedRun) -> None:
    """Three columns on stdout, then what was derived and who provides what."""
    rows = explanation(run)
    keys, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, value, origin in rows:
        print(f"{key:<{keys}}  {value:<{min(values, 40)}}  {origin}")
    registry = run.registry
    print()
    for name, value in run.derived.items():
        print(f"algorithm.options.{name} comes to {_shown(value)}")
    print(f"layer ids to capture: {list(run.requirements.ids(run.verifier.num_layers))}")
    print(f"engine of the capture: {_engine(run)}")
    print(f"verifier: {run.verifier.path} ({run.verifier.fingerprint})")
    print(f"output: {run.folders.output}")
    for kind, item, catalog in (
        ("algorithm", run.algorithm, registry.algorithms),
        ("architecture", run.architecture, registry.architectures),
        ("loss", run.loss, registry.losses),
        ("mask", run.mask, registry.masks),
        ("schema", run.schema, registry.schemas),
        ("transport", run.transport, registry.transports),
    ):
        print(f"{kind}: {item.name}, provided by {catalog.provider(item.name)}")
    for part in run.loss_parts:
        print(f"part of the loss: {part.name}, provided by {registry.losses.provider(part.name)}")
