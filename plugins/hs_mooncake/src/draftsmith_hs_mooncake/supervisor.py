"""Keeps a store running on this host: a master, and a process that owns its memory. Restarts what dies.

Started in the background by :mod:`draftsmith_hs_mooncake.host` as ``python -m draftsmith_hs_mooncake.supervisor
SETTINGS``, JSON of :class:`Settings`. Its output is the store's log; one line says what died and what was done.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
from attrs import frozen

from draftsmith_hs_mooncake import admin, state
from draftsmith_hs_mooncake.errors import StoreUnreachable
from draftsmith_hs_mooncake.installed import ENVIRONMENT, master_program
from draftsmith_hs_mooncake.options import split_address
from draftsmith_hs_mooncake.processes import identity

__all__ = ["Settings", "main"]

_READY_SECONDS = 30.0
_TRIES = 5
_POLL_SECONDS = 0.2
#: A child that dies sooner than this after its start is started again more and more slowly.
_SHORT_LIFE, _LONGEST_WAIT = 10.0, 10.0
#: The owner of a master that was restarted joins it again within seconds; one that does not is restarted.
_JOIN_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1


@frozen(kw_only=True)
class Settings:
    """Plain values.

    Attributes:
        port, admin_port: 0: one of those that are free.
        silent_seconds: after which the master forgets a segment whose owner is silent, and all that lies in it. Until
            then it gives out the memory of an owner that is dead.
        unfinished_seconds: how long the room of an object is kept that was begun and not finished. The store lists it
            nowhere, and nobody can remove it. Longer than any transfer takes.
    """

    host: str
    port: int
    admin_port: int
    size: int
    protocol: str
    device: str
    silent_seconds: int = 3
    unfinished_seconds: int = 120

    def to_json(self) -> str:
        return json.dumps(attrs.asdict(self))


class Ended(Exception):
    """A signal asked the supervisor to end."""


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


class Child:
    """A process that is started again when it dies."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._command = list(command)
        self._failures = 0
        self.start()

    def start(self) -> None:
        self._begun = time.monotonic()
        environment = {**ENVIRONMENT, **os.environ}
        self.process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
        )

    def restart(self, why: str) -> None:
        """After a pause, where it has died early again and again."""
        self._failures = self._failures + 1 if time.monotonic() - self._begun < _SHORT_LIFE else 0
        pause = min(_LONGEST_WAIT, 0.5 * 2**self._failures) if self._failures else 0.0
        say(f"{self.name} {why}: started again" + (f" in {pause:g} s" if pause else ""))
        time.sleep(pause)
        self.start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Supervisor:
    """The store of one host."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._alone_since: float | None = None
        for attempt in range(_TRIES):
            if self._start():
                break
            self.stop()
            fixed = settings.port and settings.admin_port
            if fixed or attempt == _TRIES - 1:
                raise SystemExit(f"the store did not start on {self.master} and {self.admin}: is a port taken?")
        self._note()
        say(f"the store is ready: master {self.master}, admin {self.admin}, {settings.size} bytes")

    def _start(self) -> bool:
        """Start both and wait until *this* master has the segment: another one may answer on the same port."""
        settings = self._settings
        port = settings.port or _free_port(settings.host)
        admin_port = settings.admin_port or _free_port(settings.host)
        self.master, self.admin = joined(settings.host, port), joined(settings.host, admin_port)
        self._master = Child(
            "the master",
            [
                str(master_program()),
                f"--rpc_address={settings.host}",
                f"--rpc_port={port}",
                f"--metrics_host={settings.host}",
                f"--metrics_port={admin_port}",
                f"--client_ttl={settings.silent_seconds}",
                f"--put_start_discard_timeout_sec={min(30, settings.unfinished_seconds // 2)}",
                f"--put_start_release_timeout_sec={settings.unfinished_seconds}",
                "--logtostderr=true",
            ],
        )
        self._children = [self._master]
        deadline = time.monotonic() + _READY_SECONDS
        while not (admin.ready(self.admin) and self._listens()):
            if self._master.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        command = [sys.executable, "-m", "draftsmith_hs_mooncake.owner"]
        values = [settings.host, self.master, str(settings.size), settings.protocol, settings.device]
        self._owner = Child("the segment's owner", [*command, *values])
        self._children.append(self._owner)
        while self._capacity() != settings.size:
            if time.monotonic() > deadline or any(each.process.poll() is not None for each in self._children):
                return False
            time.sleep(0.05)
        return True

    def _listens(self) -> bool:
        try:
            socket.create_connection(split_address(self.master), timeout=1).close()
        except OSError:
            return False
        return True

    def _capacity(self) -> int | None:
        try:
            return admin.usage(self.admin).capacity
        except StoreUnreachable:
            return None

    def _note(self) -> None:
        state.write(
            state.RunningStore(
                master=self.master,
                admin=self.admin,
                protocol=self._settings.protocol,
                device=self._settings.device,
                size=self._settings.size,
                log=str(state.folder() / "store.log"),
                supervisor=identity(),
                master_process=identity(self._master.process.pid),
                owner_process=identity(self._owner.process.pid),
            )
        )

    def watch(self) -> None:
        """Until a signal comes."""
        while True:
            time.sleep(_POLL_SECONDS)
            for child in self._children:
                code = child.process.poll()
                if code is not None:
                    child.restart(_ending(code))
                    self._alone_since = time.monotonic()
                    self._note()
            self._watch_segment()

    def _watch_segment(self) -> None:
        """After a restart: see that the segment joins the master again."""
        if self._alone_since is None:
            return
        if self._capacity():
            self._alone_since = None
        elif time.monotonic() - self._alone_since > _JOIN_SECONDS:
            self._owner.stop()  # its end is found in the next round
            self._alone_since = time.monotonic()

    def stop(self) -> None:
        for child in reversed(self._children):
            child.stop()


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _end(number: int, frame: Any) -> None:
    raise Ended


def main(arguments: Sequence[str]) -> int:
    settings = Settings(**json.loads(arguments[0]))
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    supervisor = None
    try:
        supervisor = Supervisor(settings)
        supervisor.watch()
    except Ended:
        say("the store is stopped")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if supervisor is not None:
            supervisor.stop()
        state.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
