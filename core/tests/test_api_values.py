"""Values that plugins register, where the value itself knows what is wrong with it."""

from __future__ import annotations

import pytest
from attrs import frozen

from draftsmith import api


@frozen(kw_only=True)
class Options:
    encoding: str = "plain"


def transport(**changes: object) -> api.Transport:
    return api.Transport(
        name="shelf",
        summary="keeps",
        implementation="nowhere:Shelf",
        options=Options,
        guarantees=api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True),
        **changes,  # type: ignore[arg-type]
    )


def test_what_loses_something_is_an_option_of_the_transport() -> None:
    assert transport(lossy=("encoding",)).lossy == ("encoding",)
    with pytest.raises(ValueError, match="options that 'shelf' does not have: codec, width"):
        transport(lossy=("width", "encoding", "codec"))
