"""A draft without attention: h_0 = fc(g_t), h_{k+1} = h_k + mix(h_k, embed(x_{t+1+k})), logits = head(norm(h_{k+1})).

Slot k of start t has read x_{t+1+k} and so predicts what the teacher predicts at row t + 1 + k. It has what resume
tests need: matrices and vectors, an embedding and a head that are the verifier's, a random draw per row (from the
generator given) and dropout (from torch's global generator).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.api import CaptureRequirements, ServingPlan
from draftsmith.interfaces import (
    CheckpointFormat,
    DraftAlgorithm,
    DraftArchitecture,
    Drafter,
    DraftSlots,
    TensorSpec,
)


class TinyDraft(DraftArchitecture, nn.Module):
    def __init__(self, setup):
        nn.Module.__init__(self)
        weights, hidden, width = setup.weights, setup.verifier.hidden_size, setup.options.width
        self.fc = nn.Linear(len(setup.capture.layer_ids) * hidden, hidden, bias=False)
        self.mix_in = nn.Linear(2 * hidden, width)
        self.mix_out = nn.Linear(width, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.dropout = nn.Dropout(setup.options.dropout)
        self.embed = nn.Embedding.from_pretrained(weights.embed_tokens.float().cpu().clone(), freeze=True)
        self.head = nn.Linear(hidden, setup.vocabulary.draft_size, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(weights.lm_head.float()[setup.vocabulary.t2d])
        self.head.requires_grad_(False)

    def shared_tensors(self):
        return {"embed.weight": self.embed.weight, "head.weight": self.head.weight}

    def step(self, hidden, token_ids):
        read = torch.cat([hidden, self.embed(token_ids)], -1)
        return hidden + self.dropout(self.mix_out(F.silu(self.mix_in(read))))


class Tiny(DraftAlgorithm):
    def build_model(self):
        return self.setup.architecture(self.setup)

    def make_batch(self, row, generator):
        T, K = len(row.input_ids), self.setup.options.steps
        drawn = (torch.rand(T, generator=generator) < self.setup.options.starts).to(row.input_ids.device)
        slots = []
        for k in range(K):
            # Start t, step k: reads x_{t+1+k}, and what it predicts, x_{t+2+k}, must be there and supervised.
            t = torch.arange(max(T - 2 - k, 0), device=row.input_ids.device)
            last = t + 2 + k
            good = drawn[t] & row.loss_mask[last] & (row.document_ids[t] == row.document_ids[last])
            slots.append(good & (row.document_ids[t] >= 0))
        return row, slots

    def forward(self, model, batch):
        row, supervised = batch
        T, K = len(row.input_ids), self.setup.options.steps
        hidden = model.fc(row.taps)
        rows, steps, chains, states = [], [], [], []
        for k in range(K):
            # Rows near the end have no token to read; they read any, and no slot uses them.
            tokens = row.input_ids.roll(-(1 + k))
            hidden = model.step(hidden, tokens)
            t = supervised[k].nonzero().squeeze(-1)
            states.append(model.norm(hidden[t]))
            rows.append(t + 1 + k)
            steps.append(torch.full_like(t, k))
            chains.append(t)
        return DraftSlots(
            terms=[(torch.cat(states), model.head.weight)],
            teacher_row=torch.cat(rows),
            step=torch.cat(steps),
            chain=torch.cat(chains),
            weight=torch.ones(sum(map(len, rows)), device=row.taps.device),
            total_positions=T * K,
            num_steps=K,
        )

    def drafter(self, model):
        return TinyDrafter(self, model)


class TinyDrafter(Drafter):
    def __init__(self, algorithm, model):
        self.vocabulary, self.model = algorithm.setup.vocabulary, model

    def propose(self, token_ids, taps, num_tokens, *, forced=None):
        hidden, token = self.model.fc(taps[-1:].float()), token_ids[-1:]
        logits = []
        for k in range(num_tokens):
            hidden = self.model.step(hidden, token)
            logits.append(self.model.head(self.model.norm(hidden))[0])
            draft = logits[-1].argmax()
            token = forced[k : k + 1] if forced is not None else (draft + self.vocabulary.d2t[draft])[None]
        return torch.stack(logits)


class TinyFormat(CheckpointFormat):
    def config(self, context):
        return {"model_type": "tiny", "steps": context.setup.options.steps, "width": context.setup.options.width}

    def tensors(self, model, context):
        shared = model.shared_tensors()
        return {name: value for name, value in model.state_dict().items() if name not in shared}

    def expected_tensors(self, config):
        return {"norm.weight": TensorSpec(shape=(64,))}

    def lint(self, config, present, verifier):
        return []

    def load(self, model, tensors, config):
        model.load_state_dict(dict(tensors), strict=False)

    def options(self, config):
        return {"steps": config["steps"], "width": config["width"]}

    def capture(self, config, verifier):
        return CaptureRequirements(layer_ids=(1, verifier.num_layers - 1))

    def serving(self, config):
        return ServingPlan(method="tiny", num_speculative_tokens=config["steps"])
