"""The peer's side of `test_peer_checkpoints.py`. Run with the Python of an environment that has speculators 0.9.0.

    python peer_logits.py FOLDER

FOLDER/request.json says which checkpoints to load, and which to make with random weights; FOLDER/inputs.safetensors
holds one document. For each, FOLDER/NAME.safetensors is written: the logits of every row of the blocks at the given
anchors, [anchors, B, V_d]. Checkpoints that are made go to FOLDER/NAME.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig


def made(config: dict[str, Any], verifier: str, folder: Path, seed: int) -> None:
    """A checkpoint with random weights, by the peer's own classes."""
    layers = dict(config["transformer_layer_config"])
    layer_config = AutoConfig.for_model(layers.pop("model_type"), **layers)
    layer_config._attn_implementation = "sdpa"
    count = config["block_size"] - 1
    torch.manual_seed(seed)
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            **{**config, "transformer_layer_config": layer_config},
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=count)],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(verifier),
            ),
        )
    )
    size, draft_size = layer_config.vocab_size, config["draft_vocab_size"]
    if draft_size != size:
        # Every other token, from the end: neighbours and gaps.
        kept = torch.arange(size - 2 * draft_size, size, 2) if 2 * draft_size <= size else torch.arange(draft_size)
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(draft_size))
    model.load_verifier_weights()
    with torch.no_grad():  # norms begin as ones, which tells nothing about where they go
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.startswith("verifier"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2 and parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


@torch.no_grad()
def logits(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[anchors, B, V_d] of the checkpoint in *folder*, as the peer's training forward computes them."""
    model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
    if model._attn_impl != "sdpa":
        # The peer's own default cannot run on a CPU; its choice is made when the model is built.
        config = model.config
        config.transformer_layer_config._attn_implementation = "sdpa"
        model = type(model).from_pretrained(folder, config=config, dtype=torch.float32)
    model.eval()
    chosen = torch.zeros(1, inputs["input_ids"].shape[0], dtype=torch.bool)
    chosen[0, inputs["anchors"]] = True
    hidden, found, *_ = model._backbone_forward(
        inputs["taps"][None],
        inputs["input_ids"][None],
        chosen,
        inputs["last_hidden"][None],
        torch.zeros_like(chosen, dtype=torch.int64),
        max_anchors=int(inputs["anchors"].shape[0]),
    )
    assert hidden.shape[1] == found.shape[1]
    return found.view(inputs["anchors"].shape[0], model.block_size, -1).contiguous()


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    inputs = load_file(folder / "inputs.safetensors")
    for seed, (name, config) in enumerate(request["make"].items()):
        made(config, request["verifier"], folder / name, seed)
    for name in [*request["load"], *request["make"]]:
        where = Path(request["load"].get(name, folder / name))
        save_file({"logits": logits(where, inputs)}, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
