"""Where training gets hidden states from while it runs: one or many endpoints, each of which captures on request.

An :class:`Endpoint` is a verifier that captures one row when asked: :class:`EngineEndpoint` is the engine of this
process, :class:`ServerEndpoint` a vLLM server on some host. A :class:`CapturePool` makes one of many. Torch-free.
"""

from __future__ import annotations

from draftsmith.capture.endpoints.base import Answer, Endpoint
from draftsmith.capture.endpoints.engine import EngineEndpoint
from draftsmith.capture.endpoints.pool import CapturePool
from draftsmith.capture.endpoints.server import Expected, ServerEndpoint
from draftsmith.errors import EndpointFailed

__all__ = ["Answer", "CapturePool", "Endpoint", "EndpointFailed", "EngineEndpoint", "Expected", "ServerEndpoint"]
