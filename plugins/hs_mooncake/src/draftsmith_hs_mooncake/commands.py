"""``draftsmith store``: a Mooncake store on this host."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from draftsmith_hs_mooncake.store import StoreClient

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Start, stop, show and clean a Mooncake store on this host.")

_Master = Annotated[str | None, typer.Option(help="HOST:PORT of a store elsewhere; default: the one of this host")]
_Admin = Annotated[str | None, typer.Option(help="HOST:PORT of its admin server")]
#: Seconds that a command waits for a master.
_PATIENCE = 10.0


@app.command()
def up(
    size: Annotated[str, typer.Option(help="memory that the store holds, such as 512M or 200GiB")] = "4GiB",
    host: Annotated[
        str, typer.Option(help="address of this host to listen on, as other hosts reach it")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the master; 0: one that is free")] = 0,
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="of its admin server; 0: one that is free")] = 0,
    protocol: Annotated[str, typer.Option(help="tcp or rdma")] = "tcp",
    device: Annotated[str, typer.Option(help="RDMA devices, comma-separated")] = "",
) -> None:
    """Start a master and a process that owns the memory, in the background; what dies of them is started again."""
    from draftsmith.errors import ConfigError, Problem
    from draftsmith_hs_mooncake.host import start, to_bytes
    from draftsmith_hs_mooncake.supervisor import Settings

    if protocol not in ("tcp", "rdma"):
        raise ConfigError([Problem(f"{protocol!r} is not a protocol", where="--protocol", hint="tcp or rdma")])
    settings = Settings(
        host=host, port=port, admin_port=admin_port, size=to_bytes(size), protocol=protocol, device=device
    )
    if not _is_loopback(host):
        typer.echo(
            f"warning: the store has no authentication: whoever reaches {host} can read, change and remove what is "
            "in it. Use it in trusted networks only.",
            err=True,
        )
    store = start(settings)
    typer.echo(f"the store is up: master {store.master}, admin {store.admin}, {_amount(store.size)}; log: {store.log}")
    typer.echo("in a recipe:\n")
    named = ", ".join(f'{name}: "{value}"' for name, value in store.options().items())
    typer.echo(f"transport:\n  name: hs_mooncake\n  options: {{{named}}}\n")
    typer.echo("recipes of this user on this host find it without options. `draftsmith store down` stops it.")


@app.command()
def down() -> None:
    """Stop the store of this host. All that is in it is lost."""
    from draftsmith_hs_mooncake.host import stop

    stopped = stop()
    typer.echo("no store runs on this host" if stopped is None else f"the store is down: master {stopped.master}")


@app.command()
def status(master: _Master = None, admin: _Admin = None) -> None:
    """Show how full the store is, and which runs have keys in it."""
    from draftsmith_hs_mooncake.admin import keys, usage
    from draftsmith_hs_mooncake.place import claims, describe_claim

    client = _client(master, admin)
    now = usage(client.address.admin)
    typer.echo(f"master {client.address.master}, admin {client.address.admin}")
    typer.echo(
        f"{_amount(now.used)} of {_amount(now.capacity)} used; {now.keys} keys; {now.clients} owners of memory"
        + (f"; {now.evicted} keys of other users were evicted" if now.evicted else "")
    )
    for run, count in sorted(_runs(keys(client.address.admin)).items()):
        owners = [describe_claim(each) for each in claims(client, run, _PATIENCE)] or ["claimed by nobody"]
        typer.echo(f"  {run}: {count} keys; {'; '.join(owners)}")


@app.command()
def gc(
    run: Annotated[
        list[str] | None, typer.Option(help="remove this run's keys, whoever works there (repeatable)")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="remove the keys of all runs")] = False,
    master: _Master = None,
    admin: _Admin = None,
) -> None:
    """Remove the keys of runs whose process has ended on this host; those of other hosts' runs only by name."""
    from draftsmith_hs_mooncake.admin import keys
    from draftsmith_hs_mooncake.place import claims

    client = _client(master, admin)
    for name, count in sorted(_runs(keys(client.address.admin)).items()):
        named = name in (run or ())
        if run and not named and not every:
            continue
        reason = None if named or every else _why_kept(claims(client, name, _PATIENCE))
        if reason is None:
            typer.echo(f"{name}: {_remove(client, name)} keys removed")
        else:
            typer.echo(f"{name}: {count} keys kept: {reason}")


def _client(master: str | None, admin: str | None) -> StoreClient:
    from pathlib import Path

    from draftsmith_hs_mooncake.options import MooncakeOptions
    from draftsmith_hs_mooncake.store import client_for
    from draftsmith_hs_mooncake.transport import MooncakeTransport

    return client_for(MooncakeTransport(MooncakeOptions(master=master, admin=admin), Path()).address())


def _runs(keys: list[str]) -> Counter[str]:
    from draftsmith_hs_mooncake.wire import run_of

    return Counter(run for key in keys if (run := run_of(key)) is not None)


def _remove(client: StoreClient, run: str) -> int:
    from draftsmith_hs_mooncake.wire import run_regex

    return client.remove_matching(run_regex(run), _PATIENCE)


def _why_kept(claims: list[Mapping[str, Any]]) -> str | None:
    """Why a run's keys are not to be removed unasked; None: they are."""
    from draftsmith_hs_mooncake.place import describe_claim
    from draftsmith_hs_mooncake.processes import is_gone

    if not claims:
        return "nobody has claimed them; `--run NAME` removes them"
    for claim in claims:
        gone = is_gone(claim["process"])
        if gone is None:
            return f"{describe_claim(claim)}: this host cannot see whether it runs; `--run NAME` removes them"
        if not gone:
            return f"{describe_claim(claim)} is at work"
    return None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _amount(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
