"""vLLM's side of a capture: a KV connector that hands hidden states to the run's transport.

vLLM's method ``extract_hidden_states`` keeps the tapped states of every token in a cache of its own, in the same
blocks as the request's other caches (``vllm/model_executor/models/extract_hidden_states.py``). This connector reads
them from there, at the end of the very step in which a request's prompt is complete: ``wait_for_save`` is called
after the states are cached and before any block can be freed, by both model runners. So nothing waits for a later
step, nothing is held back, and chunked prefill and preemption need no special care: blocks are looked up when the
last prompt token is scheduled.

It works on CPUs and GPUs, and knows no transport: the address of one comes in ``kv_connector_extra_config``. Each
request carries its sample id and a digest of its token ids; both are checked against what the engine really ran.

What became of a sample is told by one line in the file (or named pipe) ``reports``. With ``on_error: stop`` a sample
that cannot be stored ends the engine, as an engine that captures for one process should; with ``on_error: report``, a
server's, it fails that sample alone.

Imported by vLLM only (``kv_connector_module_path``), with vLLM present.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from draftsmith.capture.address import TransportAddress, open_writer
from draftsmith.capture.engines.messages import REQUEST_KEY, is_sample_id, report_line, token_digest
from draftsmith.capture.finite import refusal
from draftsmith.interfaces import HiddenStateSample, HiddenStateWriter
from draftsmith.plugins.blame import plugin_error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["HiddenStateConnector"]

#: Seconds that a report waits for a reader that does not keep up.
_REPORT_PATIENCE = 30.0


@frozen
class _Ready:
    """A request whose prompt is complete at the end of this step."""

    sample_id: str
    digest: str
    token_ids: list[int]
    block_ids: list[int]


@define
class _Tracked:
    """The scheduler's view of a request under way."""

    sample_id: str
    digest: str
    token_ids: list[int]
    block_ids: list[int]
    computed: int = 0


class _Metadata(KVConnectorMetadata):  # type: ignore[misc,unused-ignore]
    """From the scheduler to the worker, once a step."""

    def __init__(self) -> None:
        self.ready: list[_Ready] = []


class HiddenStateConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc,unused-ignore]
    """See the module's text. Store-only: it loads nothing."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra: Mapping[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._address = TransportAddress.from_json(extra["transport"])
        self._layout = self._address.state_layout()
        self._group = _hidden_state_group(kv_cache_config)
        self._tracked: dict[str, _Tracked] = {}
        self._reports = str(extra["reports"])
        self._writers = int(extra.get("writer_threads", 4))
        self._stop_on_error = extra.get("on_error", "stop") == "stop"
        self._worker: _Worker | None = None

    # --- in the scheduler ---------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = _Metadata()
        for new in scheduler_output.scheduled_new_reqs:
            self._track(new)
        self._update(scheduler_output.scheduled_cached_reqs)
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.computed += count
            if tracked.computed >= len(tracked.token_ids):
                metadata.ready.append(
                    _Ready(tracked.sample_id, tracked.digest, tracked.token_ids, list(tracked.block_ids))
                )
                del self._tracked[request_id]
        for request_id in scheduler_output.finished_req_ids:
            self._tracked.pop(request_id, None)
        return metadata

    def _track(self, new: Any) -> None:
        extra = (new.sampling_params.extra_args or {}) if new.sampling_params is not None else {}
        wanted = (extra.get("kv_transfer_params") or {}).get(REQUEST_KEY)
        if not isinstance(wanted, Mapping) or not is_sample_id(wanted.get("sample_id")):
            return  # a request that is not part of the capture, such as a warm-up
        self._tracked[new.req_id] = _Tracked(
            sample_id=wanted["sample_id"],
            digest=str(wanted.get("digest")),
            token_ids=list(new.prompt_token_ids or []),
            block_ids=list(new.block_ids[self._group]),
            computed=new.num_computed_tokens,
        )

    def _update(self, cached: Any) -> None:
        for place, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            new_blocks = cached.new_block_ids[place]
            fresh = list(new_blocks[self._group]) if new_blocks is not None else []
            resumed = request_id in cached.resumed_req_ids  # after a preemption all blocks are new
            tracked.block_ids = fresh if resumed else tracked.block_ids + fresh
            tracked.computed = cached.num_computed_tokens[place]

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._tracked.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # --- in the worker ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise RuntimeError(f"expected one layer that caches hidden states, found {sorted(layers)}")
        (name,) = layers
        if get_tensor_model_parallel_rank() == 0:  # the residual stream is the same on every rank
            self._worker = _Worker(kv_caches[name], self._address, self._reports, self._writers, self._stop_on_error)

    def wait_for_save(self) -> None:
        if self._worker is None or not self.has_connector_metadata():
            return
        metadata = self._get_connector_metadata()
        if isinstance(metadata, _Metadata):
            for ready in metadata.ready:
                self._worker.publish(ready)
            metadata.ready = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # The layout that keeps all ids of a token together, as the stock connector asks for.
        return "LBNHC"


def _hidden_state_group(kv_cache_config: KVCacheConfig | None) -> int:
    """Index of the cache group with the hidden states; block ids are lists per group."""
    if kv_cache_config is None:
        return 0
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache_config.kv_cache_groups
    found = [place for place, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0
    raise RuntimeError(
        f"the hidden states' cache group is not to be told apart among {len(groups)}: "
        "vLLM cannot extract hidden states of this verifier; capture it with engine: transformers"
    )


@define
class _Worker:
    """Copies states out of the cache and hands them to the transport, a few threads behind the verifier.

    Attributes:
        cache: [blocks, ids, tokens of a block, H_t].
    """

    cache: torch.Tensor
    address: TransportAddress
    reports: str
    threads: int
    stop_on_error: bool = True
    _writer: HiddenStateWriter | None = None
    _pool: ThreadPoolExecutor | None = None
    _pending: list[Future[None]] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)
    _opening: threading.Lock = field(factory=threading.Lock)

    def publish(self, ready: _Ready) -> None:
        """Copy the states now, before the next step may overwrite them; store them in the background.

        Raises:
            TransportError: an earlier sample could not be stored, and that ends the engine.
        """
        self._settle()
        if token_digest(ready.token_ids) != ready.digest:
            self._report(ready, "failed", "the engine ran other token ids than were asked for")
            return
        try:
            states = self._gather(ready.block_ids, len(ready.token_ids))
        except RuntimeError as error:
            if self.stop_on_error:
                raise
            self._report(ready, "failed", str(error))
            return
        if self._pool is None:  # built here, in the process that uses it
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="draftsmith-states")
        while (
            len(self._pending) > 4 * self.threads
        ):  # bounds memory; the verifier waits for the disk, not the other way
            self._pending.pop(0).result()
        self._pending.append(self._pool.submit(self._store, ready, states))

    def _gather(self, block_ids: list[int], tokens: int) -> torch.Tensor:
        """[tokens, ids, H_t] on the CPU, a copy."""
        block = self.cache.shape[2]
        needed = -(-tokens // block)
        if len(block_ids) < needed:
            raise RuntimeError(
                f"{tokens} tokens need {needed} blocks of hidden states, the engine has {len(block_ids)}"
            )
        index = torch.tensor(block_ids[:needed], dtype=torch.int64, device=self.cache.device)
        pages = self.cache[index]  # [blocks, ids, block, H_t], copied
        states = pages.transpose(1, 2).flatten(0, 1)[:tokens]
        return states.to(getattr(torch, self.address.layout["dtype"])).contiguous().cpu()

    def _store(self, ready: _Ready, states: torch.Tensor) -> None:
        """Store and report.

        Raises:
            TransportError, DiskSpaceError: as the transport, where that is to end the engine.
        """
        try:
            status, why = self._put(ready, states)
        except Exception as error:
            told = plugin_error(error) or error
            self._report(ready, "failed", getattr(told, "what", None) or str(told), type(told).__name__)
            if self.stop_on_error:
                raise
            self._drop_writer()
        else:
            self._report(ready, status, why)

    def _put(self, ready: _Ready, states: torch.Tensor) -> tuple[str, str]:
        if not bool(states[:, -1].any(dim=-1).all()):
            return "failed", "the engine finished the row without caching all of its states"
        reason = refusal(states)
        if reason is not None:
            return "refused", reason
        writer = self._open_writer()
        writer.put(
            HiddenStateSample(sample_id=ready.sample_id, token_ids=torch.tensor(ready.token_ids), hidden_states=states)
        )
        writer.flush()
        return "stored", ""

    def _open_writer(self) -> HiddenStateWriter:
        """The one writer; a store that could not be reached is tried again by the next sample."""
        with self._opening:
            if self._writer is None:
                self._writer = open_writer(self.address.open(), self.address.state_layout())
            return self._writer

    def _drop_writer(self) -> None:
        """Have the next sample open another one: a run that ends or begins removes what this one found there."""
        with self._opening:
            writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()

    def _report(self, ready: _Ready, status: str, why: str = "", kind: str = "") -> None:
        """One line, so that the process that asked learns it, in whichever process this one is."""
        line = report_line(
            sample_id=ready.sample_id,
            status=status,
            why=why,
            kind=kind,
            tokens=len(ready.token_ids),
            digest=token_digest(ready.token_ids),
        )
        with self._lock:
            _append(self.reports, line)

    def _settle(self) -> None:
        """Forget what is done.

        Raises:
            TransportError: of a sample that could not be stored.
        """
        waiting = []
        for each in self._pending:
            if each.done():
                each.result()
            else:
                waiting.append(each)
        self._pending = waiting

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self._writer is not None:
            self._writer.close()


def _append(path: str, line: bytes) -> None:
    """Append *line* to a file, or to a named pipe: in one piece, and never waiting for long for whoever reads it."""
    deadline = time.monotonic() + _REPORT_PATIENCE
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a pipe that nobody reads any more: nobody waits for the report either
                return
            raise
        try:
            os.write(descriptor, line)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
        finally:
            os.close(descriptor)
        time.sleep(0.01)
