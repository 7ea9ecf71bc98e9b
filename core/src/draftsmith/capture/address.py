"""A transport as plain values, so that a process far away can open the same one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs import frozen

from draftsmith import api
from draftsmith.interfaces import HiddenStateReader, HiddenStateTransport, HiddenStateWriter, StateLayout
from draftsmith.plugins import load_reference
from draftsmith.plugins.results import checked

__all__ = ["TransportAddress", "open_reader", "open_transport", "open_writer"]


def open_transport(transport: api.Transport, options: Any, location: Path) -> HiddenStateTransport:
    """The transport *transport* with *options* on *location*.

    Raises:
        PluginError: its implementation cannot be imported, or is no transport.
    """
    opened: HiddenStateTransport = load_reference(transport.implementation, expected=HiddenStateTransport)(
        options, location
    )
    return opened


def open_reader(transport: HiddenStateTransport, layout: StateLayout) -> HiddenStateReader:
    """A reader of what *transport* holds of *layout*.

    Raises:
        PluginError: the transport returns something else.
        FingerprintMismatch, TransportError: as the transport.
    """
    opened = transport.reader(layout)
    return checked(transport.reader, opened, HiddenStateReader, "a draftsmith.interfaces.HiddenStateReader")


def open_writer(transport: HiddenStateTransport, layout: StateLayout) -> HiddenStateWriter:
    """A writer of samples of *layout*. Raises as :func:`open_reader`."""
    opened = transport.writer(layout)
    return checked(transport.writer, opened, HiddenStateWriter, "a draftsmith.interfaces.HiddenStateWriter")


@frozen(kw_only=True)
class TransportAddress:
    """Names a transport, its options, its place and the layout, in values that JSON can carry.

    Attributes:
        implementation, options_type: ``module:attribute``.
        options: the options' values.
        location: absolute path of the capture.
        layout: :class:`StateLayout` as a mapping.
    """

    implementation: str
    options_type: str
    options: Mapping[str, Any]
    location: str
    layout: Mapping[str, Any]

    @classmethod
    def of(cls, transport: api.Transport, options: Any, location: Path, layout: StateLayout) -> TransportAddress:
        """The address of a transport that this process could open itself."""
        kind = type(options)
        return cls(
            implementation=transport.implementation,
            options_type=f"{kind.__module__}:{kind.__qualname__}",
            options=cattrs.unstructure(options),
            location=str(location.absolute()),
            layout=attrs.asdict(layout),
        )

    def to_json(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TransportAddress:
        return cls(**values)

    def state_layout(self) -> StateLayout:
        return StateLayout(**{**self.layout, "layer_ids": tuple(self.layout["layer_ids"])})

    def open(self) -> HiddenStateTransport:
        """Import and build the transport. Opens nothing yet."""
        module, _, name = self.options_type.partition(":")
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        options = cattrs.structure(dict(self.options), kind)
        implementation: Any = load_reference(self.implementation, expected=HiddenStateTransport)
        opened: HiddenStateTransport = implementation(options, Path(self.location))
        return opened
