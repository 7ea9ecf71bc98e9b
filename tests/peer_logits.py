"""The peer's side of `test_peer_checkpoints.py`. Run with the Python of an environment that has speculators 0.9.0.

    python peer_logits.py FOLDER

FOLDER/request.json says which checkpoints to load, and which to make with random weights; FOLDER/inputs.safetensors
holds one document. For each, FOLDER/NAME.safetensors is written: the logits of the tokens that are drafted after the
given starts, [starts, K, V_d]. Checkpoints that are made go to FOLDER/NAME.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

KINDS = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "peagle": (PEagleSpeculatorConfig, peagle.PEagleDraftModel),
}


def made(config: dict[str, Any], verifier: str, folder: Path, seed: int, count: int) -> None:
    """A checkpoint with random weights that drafts *count* tokens, by the peer's own classes."""
    config_kind, model_kind = KINDS[config["speculators_model_type"]]
    layers = dict(config["transformer_layer_config"])
    layer_config = AutoConfig.for_model(layers.pop("model_type"), **layers)
    layer_config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = model_kind(
        config_kind(
            **{**config, "transformer_layer_config": layer_config},
            speculators_config=SpeculatorsConfig(
                algorithm=config["speculators_model_type"],
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
def logits(folder: Path, inputs: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """[starts, K, V_d] of the checkpoint in *folder*, as the peer's training forward computes them."""
    model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
    if model._attn_impl != "sdpa":
        # The peer's own default cannot run on a CPU; its choice is made when the model is built.
        config = model.config
        config.transformer_layer_config._attn_implementation = "sdpa"
        model = type(model).from_pretrained(folder, config=config, dtype=torch.float32)
    if isinstance(model, peagle.PEagleDraftModel):
        # What a file leaves out is the verifier's, as in vLLM; this class leaves it uninitialised.
        stored = load_file(folder / "model.safetensors").keys()
        left_out = {name: f"{name}.weight" not in stored for name in ("embed_tokens", "lm_head")}
        model._load_verifier_weights(**{f"overwrite_{name}": missing for name, missing in left_out.items()})
    model.eval()
    return (of_depths if isinstance(model, peagle.PEagleDraftModel) else of_blocks)(model, inputs, count)


def of_blocks(model: DFlashDraftModel, inputs: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Of the rows of the blocks at the starts, but for the first ones, which predict nothing."""
    starts = inputs["starts"].shape[0]
    chosen = torch.zeros(1, inputs["input_ids"].shape[0], dtype=torch.bool)
    chosen[0, inputs["starts"]] = True
    hidden, found, *_ = model._backbone_forward(
        inputs["taps"][None],
        inputs["input_ids"][None],
        chosen,
        inputs["last_hidden"][None],
        torch.zeros_like(chosen, dtype=torch.int64),
        max_anchors=starts,
    )
    assert hidden.shape[1] == found.shape[1]
    assert model.block_size == count + 1
    return found.view(starts, model.block_size, -1)[:, 1:].contiguous()


def of_depths(model: peagle.PEagleDraftModel, inputs: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Of the elements of every depth that continue the starts: its sampling is replaced by this choice."""
    rows, anchors = inputs["input_ids"].shape[0] - 1, inputs["starts"] - 1  # its rows read the token after their own
    anchor = torch.cat([torch.arange(rows), *[anchors] * (count - 1)])
    depth = torch.cat([torch.zeros(rows, dtype=torch.int64)] + [torch.full_like(anchors, d) for d in range(1, count)])
    peagle.generate_cod_sample_indices = lambda **_: (anchor, depth)
    found: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, output: found.append(output[0]))
    model(
        hidden_states=inputs["taps"][None, :-1],
        input_ids=inputs["input_ids"][None, 1:],
        document_ids=torch.zeros(1, rows, dtype=torch.int64),
        loss_mask=torch.ones(1, rows),
        verifier_last_hidden_states=inputs["last_hidden"][None, 1:],
        num_depths=count,
        loss_config=resolve_loss_config("kl_div", "eager"),  # its own choice needs Triton
    )
    handle.remove()
    (everything,) = found
    later = everything[rows:].view(count - 1, anchors.shape[0], -1)
    return torch.cat((everything[anchors][None], later)).transpose(0, 1).contiguous()


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    inputs = load_file(folder / "inputs.safetensors")
    for seed, (name, config) in enumerate(request["make"].items()):
        made(config, request["verifier"], folder / name, seed, request["drafted"])
    for name in [*request["load"], *request["make"]]:
        where = Path(request["load"].get(name, folder / name))
        save_file({"logits": logits(where, inputs, request["drafted"])}, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
