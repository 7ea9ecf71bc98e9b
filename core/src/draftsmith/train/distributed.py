"""Several processes that train one draft: data parallel, over torch.distributed's own collectives.

``torchrun`` starts the processes; each is a *rank* and holds the whole draft, its gradients and its optimiser's state.
The row at place p of a step belongs to rank p % world. What the ranks have to agree upon goes through
:meth:`Ranks.exchange`, gradients through :meth:`Ranks.sum_`, and both alone cost nothing: one process is rank 0 of 1.

How a failure reaches everybody: between two exchanges a rank waits for nobody, so whoever fails takes part in one more
exchange, as it leaves, with its error in place of a value. The others are in that exchange, or come to it, and raise
the same error. Hence the rule for code that runs on ranks: :meth:`Ranks.sum_` and :meth:`Ranks.share_tensors` follow
an exchange directly, and nothing else waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Not used here. Its functions take the process group of the moment of their import as a default, and so keep it for
# good where they are imported after it was made, as transformers does. A group that is kept keeps its threads, and one
# of those that asks for Python's lock while the interpreter ends aborts the process.
import torch.distributed.nn.functional
from attrs import frozen
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from draftsmith.errors import ConfigError, DraftsmithError, Problem, RanksLost, is_shared, mark_shared
from draftsmith.stages import process_count

__all__ = ["ALONE", "Ranks", "join"]

Value = TypeVar("Value")

#: Bytes that a sum of gradients copies together. Larger gradients are summed where they are.
_BUCKET = 32 << 20


@frozen
class _Failure:
    """What a rank gives to its last exchange."""

    error: DraftsmithError


@frozen
class Ranks:
    """This process among those that train one draft.

    Attributes:
        rank: 0 … world - 1.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes, and that talks to the user."""
        return self.rank == 0

    def mine(self, items: Sequence[Value]) -> Sequence[Value]:
        """Those of the *items* of a step (or of a validation) that are this rank's."""
        return items[self.rank :: self.world]

    def exchange(self, value: Value) -> list[Value]:
        """What every rank gave, by rank. Whoever calls it waits for all others.

        Raises:
            DraftsmithError: of another rank that failed; every rank raises the same one.
            RanksLost: another rank has gone without a word, or does not come in time.
        """
        if self.world == 1:
            return [value]
        found = _gathered(value, self.world)
        failed = [(rank, each.error) for rank, each in enumerate(found) if isinstance(each, _Failure)]
        if failed:
            raise mark_shared(failed[0][1])
        return found

    def share(self, value: Value) -> Value:
        """The first rank's *value*, on every rank. Raises as :meth:`exchange`."""
        return self.exchange(value if self.first else None)[0]  # type: ignore[return-value]

    def in_order(self, parts: Sequence[Sequence[Value]]) -> list[Value]:
        """The inverse of :meth:`mine`: what the ranks have of their items, by place."""
        return [parts[place % self.world][place // self.world] for place in range(sum(map(len, parts)))]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up over the ranks, in place; every rank has tensors of the same shapes, in the same order.

        The result has the same bits on every rank, and in every run with as many ranks.

        Raises:
            RanksLost: as :meth:`exchange`.
        """
        if self.world == 1:
            return
        with _lost():
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0])
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                parts = flat.split_with_sizes([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(
                    bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
                )

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The first rank's *tensors*, on every rank, in the CPU's memory; the others' argument is not looked at.

        Raises:
            RanksLost, DraftsmithError: as :meth:`exchange`.
        """
        given = dict(tensors or {}) if self.first else {}
        if self.world == 1:
            return given
        facts = self.share([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()])
        found: dict[str, Tensor] = {}
        with _lost():
            for name, shape, dtype in facts:
                own = given[name].detach().cpu().contiguous() if self.first else torch.empty(shape, dtype=dtype)
                if own.numel():
                    dist.broadcast(own.view(-1).view(torch.uint8), src=0)
                found[name] = own
        return found


#: One process, and nobody to wait for.
ALONE = Ranks()


@contextmanager
def join(device: str = "auto", *, timeout: float = 1800.0) -> Iterator[Ranks]:
    """Be one of the processes that ``torchrun`` started; leave them at the end, and tell them why after an error.

    A process that was not started as one of several is alone, and no process group is made. One that is in the
    process group already stays there.

    Args:
        device: as ``train.device``. On GPUs each rank takes that of its number on the host.
        timeout: seconds that a rank waits for the others before it gives up.

    Raises:
        ConfigError: the host has fewer GPUs than processes, or this process does not know how to find the others.
        RanksLost: they do not come in time.
    """
    if process_count() == 1 and not dist.is_initialized():
        yield ALONE
        return
    outermost = not dist.is_initialized()
    if outermost:
        _initialise(device, timeout)
    try:
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        try:
            yield ranks
        except Exception as error:
            _announce(ranks, error)
            raise
    finally:
        if outermost:
            dist.destroy_process_group()


def _initialise(device: str, timeout: float) -> None:
    limit = timedelta(seconds=timeout)
    gpu = None if device == "cpu" or not torch.cuda.is_available() else _own_gpu()
    if gpu is not None:
        torch.cuda.set_device(gpu)
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))
        # torchrun's store may outlive the processes of an attempt: the next must not find their addresses there.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        # What is agreed upon goes through the CPU: it must not wait for what the GPU still computes.
        backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=gpu)
    except ValueError as error:  # a variable of the environment is missing
        raise ConfigError(
            [
                Problem(
                    f"this is one of {process_count()} processes, and cannot find the others: {error}",
                    where="environment",
                    hint="start with `torchrun … -m draftsmith train RECIPE`; for one process unset WORLD_SIZE",
                )
            ]
        ) from error
    except RuntimeError as error:
        raise _gone(error) from error


def _own_gpu() -> torch.device:
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise ConfigError(
            [
                Problem(
                    f"there are more processes on this host than its {there} GPUs",
                    where="train.device",
                    hint="start as many with --nproc-per-node (or `gpu`), or use device: cpu",
                )
            ]
        )
    return torch.device("cuda", number)


def _gathered(value: Any, world: int) -> list[Any]:
    found: list[Any] = [None] * world
    with _lost():
        dist.all_gather_object(found, value)
    return found


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, of :data:`_BUCKET` bytes at most together; a larger one is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > _BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def _lost() -> Iterator[None]:
    """A collective that fails, fails on account of the others."""
    try:
        yield
    except RuntimeError as error:
        raise _gone(error) from error


def _gone(error: BaseException) -> RanksLost:
    return RanksLost(
        f"another process of this training has ended, or does not answer: {str(error).splitlines()[0]}",
        hint="its own message says why, if it could leave one; start the same command again: it goes on from the last "
        "checkpoint. Where a process was merely slow, raise train.rank_timeout",
    )


def _announce(ranks: Ranks, error: Exception) -> None:
    """Take part in the exchange that the others are in, or come to, with *error*."""
    if ranks.world == 1 or is_shared(error) or isinstance(error, RanksLost):
        return
    plain = DraftsmithError(
        f"{type(error).__name__}: {error}",
        where=f"rank {ranks.rank}",
        hint="this should not happen, in draftsmith or in a plugin; --debug shows where, for a bug report",
    )
    for carried in (error, plain) if isinstance(error, DraftsmithError) else (plain,):
        try:
            _gathered(_Failure(carried), ranks.world)
        except RanksLost:  # nobody is there any more
            return
        except Exception:  # a plugin's error, which holds what cannot be sent
            continue
        mark_shared(error)
        return
