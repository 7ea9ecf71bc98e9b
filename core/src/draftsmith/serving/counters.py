"""A running vLLM's counters, read over HTTP as Prometheus would."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from draftsmith.errors import ServingError, UserError
from draftsmith.serving.vllm_process import DraftCounters

__all__ = ["Reading", "metrics_address", "parse_metrics", "read_metrics"]

_PREFIX = "vllm:"
_DRAFT = f"{_PREFIX}spec_decode_num_"
#: Seconds until a server must answer.
TIMEOUT = 10.0


@frozen(kw_only=True)
class Reading:
    """What a server's counters say at one moment, summed over its engines. All but the gauges only grow.

    Attributes:
        time: of the reading, in seconds of a monotonic clock.
        generated: tokens of all answers.
        first_tokens, first_token_seconds: answers begun, and the time that took in all.
        gaps, gap_seconds: the same of the times between two deliveries of an answer.
        running, waiting: requests at this moment.
    """

    time: float
    counters: DraftCounters
    generated: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0
    gaps: float = 0.0
    gap_seconds: float = 0.0
    running: int = 0
    waiting: int = 0


def metrics_address(url: str) -> str:
    """``http://host:8000`` or ``host:8000`` → ``http://host:8000/metrics``.

    Raises:
        UserError: it is no address of a web server.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(full)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        parts.path.encode("ascii")
    except ValueError:  # a bracket of IPv6 that is not closed, a port that is no number, letters no request may have
        known = False
    if not known:
        raise UserError(f"{url!r} is no address of a server", hint="such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}/metrics"


def read_metrics(url: str, *, drafting: bool = True) -> Reading:
    """Read a server's counters now.

    Args:
        drafting: it must draft; False: it need not.

    Raises:
        ServingError: it does not answer, is no vLLM, or does not draft although it must.
    """
    address = metrics_address(url)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as reply:
            text = reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise ServingError(
            f"answers {error.code} {error.reason}: this is no vLLM server, or its counters are switched off",
            where=address,
            hint="name the address of a vLLM server that was started without --disable-log-stats",
        ) from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: a name that no host can have
        reason = getattr(error, "reason", None) or error
        raise ServingError(
            f"cannot be reached: {reason}", where=address, hint="is the server running, and is this its address?"
        ) from error
    return parse_metrics(text, address, time.monotonic(), drafting=drafting)


def parse_metrics(text: str, where: str, now: float, *, drafting: bool = True) -> Reading:
    """The counters in the text of ``/metrics``.

    Raises:
        ServingError: they are not those of a vLLM, or of one that drafts nothing although it must.
    """
    found: dict[str, float] = {}
    positions: dict[int, float] = {}
    foreign = False
    for name, labels, value in _samples(text, where):
        foreign |= not name.startswith(_PREFIX)
        if name == f"{_DRAFT}accepted_tokens_per_pos_total" and "position" in labels:
            position = int(labels["position"])
            positions[position] = positions.get(position, 0.0) + value
        elif name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = found.get(name.removeprefix(_PREFIX), 0.0) + value
    if not found:
        raise ServingError(
            "has no counters of vLLM" + (", only those of another program" if foreign else ""),
            where=where,
            hint="name the address of a vLLM server that was started without --disable-log-stats",
        )
    draft = _DRAFT.removeprefix(_PREFIX)
    if drafting and f"{draft}drafts_total" not in found:
        raise ServingError(
            "this vLLM drafts nothing: it has no counters of speculative decoding",
            where=where,
            hint="start it with a draft: `draftsmith serve CHECKPOINT`",
        )
    return Reading(
        time=now,
        counters=DraftCounters(
            drafts=int(found.get(f"{draft}drafts_total", 0)),
            drafted=int(found.get(f"{draft}draft_tokens_total", 0)),
            accepted=int(found.get(f"{draft}accepted_tokens_total", 0)),
            accepted_per_position=tuple(int(positions[each]) for each in sorted(positions)),
        ),
        generated=found.get("generation_tokens_total", 0.0),
        first_tokens=found.get("time_to_first_token_seconds_count", 0.0),
        first_token_seconds=found.get("time_to_first_token_seconds_sum", 0.0),
        gaps=found.get("inter_token_latency_seconds_count", 0.0),
        gap_seconds=found.get("inter_token_latency_seconds_sum", 0.0),
        running=int(found.get("num_requests_running", 0)),
        waiting=int(found.get("num_requests_waiting", 0)),
    )


def _samples(text: str, where: str) -> Iterator[tuple[str, dict[str, str], float]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ServingError(
            "the package prometheus-client is not installed, which reads servers' counters",
            hint="pip install 'draftsmith[watch]'",
        ) from None
    samples: list[Any] = []
    try:
        for family in text_string_to_metric_families(text):
            samples += family.samples
    except ValueError as error:
        raise ServingError(
            f"does not answer with counters: {error}", where=where, hint="name the address of a vLLM server"
        ) from error
    return ((each.name, dict(each.labels), float(each.value)) for each in samples)
