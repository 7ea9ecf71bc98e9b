"""What captures while a run trains, from its recipe: where states lie, whether they fit, and who captures."""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from draftsmith.capture.endpoints import CapturePool, Endpoint, EngineEndpoint
from draftsmith.capture.plan import human_bytes
from draftsmith.capture.run import make_engine
from draftsmith.capture.states import SAMPLES, WORK, run_transport, state_layout
from draftsmith.capture.statistics import Statistics
from draftsmith.errors import DiskSpaceError, FingerprintMismatch
from draftsmith.interfaces import HiddenStateTransport, StateLayout
from draftsmith.stages import Stage, write_text_atomically
from draftsmith.train.distributed import Ranks
from draftsmith.train.online import OnlineCapture

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun
    from draftsmith.data.dataset import PreparedData

__all__ = ["Place", "capture_endpoints", "check_room", "open_capture"]

_OWNER = "owner"


def check_room(
    transport: HiddenStateTransport,
    layout: StateLayout,
    *,
    streams: Sequence[Sequence[int]],
    ahead: int,
    keep: bool,
    ignore_disk_space: bool = False,
    where: str,
) -> None:
    """Whether the transport holds what is there at most.

    Args:
        streams: tokens of the rows of each stream that samples are asked ahead for. With *keep*, of those that are not
            stored yet.

    Raises:
        DiskSpaceError: it does not, with the sizes.
    """
    free = transport.free_bytes()
    lengths = [length for stream in streams for length in stream]
    if free is None or not lengths:
        return
    longest = max(lengths)
    one = transport.bytes_for(layout, longest, 1)
    if one > free:
        raise DiskSpaceError(
            f"the states of the longest row ({longest} tokens) take {human_bytes(one)}, and the transport has room "
            f"for {human_bytes(free)}",
            where=where,
            hint="give the transport more room, or shorten rows (data.max_length)",
        )
    if keep:
        all_of_it = transport.peak_bytes_for(layout, sum(lengths), len(lengths), longest=longest)
        if all_of_it > free and not ignore_disk_space:
            raise DiskSpaceError(
                f"keeping the states of {len(lengths)} rows takes {human_bytes(all_of_it)}, and the transport has "
                f"room for {human_bytes(free)}",
                where=where,
                hint="leave online.keep out: states are then captured anew for every use, and deleted after it",
            )
        return
    window = [length for stream in streams for length in sorted(stream, reverse=True)[:ahead]]
    needed = transport.bytes_for(layout, sum(window), len(window))
    if needed > free:
        raise DiskSpaceError(
            f"{len(window)} samples may wait to be read, which take up to {human_bytes(needed)}, and the transport "
            f"has room for {human_bytes(free)}",
            where=where,
            hint=f"lower online.ahead ({ahead}), or give the transport more room",
        )


def open_capture(
    run: ResolvedRun,
    data: PreparedData,
    statistics: Statistics,
    ranks: Ranks,
    say: Callable[[str], None],
    *,
    overwrite: bool,
) -> OnlineCapture:
    """What captures the rows of *run* while it trains. Starts nothing before it is entered.

    Args:
        statistics: the teacher's.
        ranks: those that train; each captures its own rows.
        say: the first rank's line to the user; the others print theirs to stderr.
        overwrite: states of another capture that are in its place may be removed.

    Raises:
        FingerprintMismatch: the run's folder holds a capture that was a stage of its own.
    """
    online, capture = run.recipe.online, run.recipe.capture
    layout, transport = state_layout(run), run_transport(run)
    if not ranks.first:
        say = functools.partial(_say_of_rank, ranks.rank)
    tables = (data.train, data.validation)

    def check(stored: frozenset[str]) -> None:
        check_room(
            transport,
            layout,
            streams=[
                [length for name, length in zip(each.sample_ids, each.lengths, strict=True) if name not in stored]
                for each in tables
            ],
            ahead=online.ahead * ranks.world,
            keep=online.keep,
            ignore_disk_space=capture.ignore_disk_space,
            where=str(run.folders.states),
        )

    def pool() -> CapturePool:
        say(f"capture goes on while training: {_whose(run)}; at most {online.ahead} samples ahead of the trainer")
        longest = max(length for each in tables for length in each.lengths)
        endpoints = capture_endpoints(run, transport, layout, longest=longest)
        return CapturePool(endpoints, in_flight=online.in_flight, patience=online.patience, say=say)

    return OnlineCapture(
        pool=pool,
        transport=transport,
        layout=layout,
        place=Place(run.folders.states, run.folders.output, overwrite),
        keep=online.keep,
        missing=online.missing,
        ahead=online.ahead,
        rows=sum(len(each) for each in tables),
        refused_share=capture.refused_share,
        statistics=statistics,
        lasts=run.transport.guarantees.persistent,
        say=say,
        check=check,
        ranks=ranks,
    )


def _say_of_rank(rank: int, message: str) -> None:
    print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


def _whose(run: ResolvedRun) -> str:
    endpoints = run.recipe.online.endpoints
    if not endpoints:
        return f"the verifier runs in this process ({run.capture_engine})"
    return f"{len(endpoints)} endpoint{'s' if len(endpoints) > 1 else ''}"


def capture_endpoints(
    run: ResolvedRun, transport: HiddenStateTransport, layout: StateLayout, *, longest: int
) -> list[Endpoint]:
    """The servers of the recipe; without any, the engine of this process. Starts nothing."""
    if run.recipe.online.endpoints:
        from draftsmith.capture.endpoints.server import Expected, ServerEndpoint

        expected = Expected.of(
            model=str(run.verifier.path),
            verifier=run.verifier.fingerprint,
            transport=transport,
            layout=layout,
            longest=longest,
        )
        timeout = run.recipe.online.request_timeout
        return [ServerEndpoint(url, expected, timeout=timeout) for url in run.recipe.online.endpoints]
    return [EngineEndpoint(make_engine(run.capture_engine, run, transport, layout, longest=longest))]


@frozen
class Place:
    """The run's folders, as far as a capture that goes on while training needs them.

    Attributes:
        folder: of the states.
        output: the run's.
        overwrite: what another capture left there may be removed.
    """

    folder: Path
    output: Path
    overwrite: bool

    def take(self) -> str:
        """Make sure that the folder holds no capture that was a stage of its own; returns who owns it.

        The owner is the same at every start of the run, and no other run's, on whichever host either is.

        Raises:
            FingerprintMismatch: it does hold one.
        """
        stage = Stage("capture", self.folder)
        if stage.record() is not None:
            if not self.overwrite:
                raise FingerprintMismatch(
                    "the folder holds states of a capture that was a stage of its own (capture.mode: offline)",
                    where=str(self.folder),
                    hint="choose another output, or run with --overwrite to remove them",
                )
            shutil.rmtree(self.folder)
        path = self.folder / _OWNER
        try:
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            owner = f"{self.output} (begun on {socket.gethostname()}, {secrets.token_hex(4)})"
            write_text_atomically(path, owner + "\n")
            return owner

    def leave(self) -> None:
        """Remove what holds nothing any more."""
        (self.folder / _OWNER).unlink(missing_ok=True)
        for each in (self.folder / SAMPLES, self.folder / WORK, self.folder):
            with contextlib.suppress(OSError):  # a log stays, and so does what a transport keeps there
                each.rmdir()
