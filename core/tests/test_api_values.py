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


def test_a_network_for_vllm_says_which_method_drives_it() -> None:
    values = {
        **{name: name for name in ("name", "summary", "architecture", "loss", "mask", "schema")},
        "implementation": "nowhere:Algorithm",
        "options": Options,
        "requirements": lambda options, verifier: api.CaptureRequirements(layer_ids=()),
        "max_speculative_tokens": lambda options: 1,
    }
    assert api.Algorithm(**values, vllm_network="nowhere:Network", vllm_methods=("one",)).vllm_methods == ("one",)
    with pytest.raises(ValueError, match="vllm_network needs vllm_methods"):
        api.Algorithm(**values, vllm_network="nowhere:Network")
    with pytest.raises(ValueError, match=r"must read 'package.module:attribute'"):
        api.Algorithm(**values, vllm_network="nowhere", vllm_methods=("one",))


def test_what_loses_something_is_an_option_of_the_transport() -> None:
    assert transport(lossy=("encoding",)).lossy == ("encoding",)
    with pytest.raises(ValueError, match="options that 'shelf' does not have: codec, width"):
        transport(lossy=("width", "encoding", "codec"))
