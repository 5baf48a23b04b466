"""Attention Residuals in a plain GPT: each sublayer chooses which earlier outputs it reads.

    python examples/attention_residuals.py

A residual stream adds everything up and passes on the sum. Here every output is kept, and a
sublayer reads a softmax over them, per token, with a query of its own. Source: Kimi K3 report §2.2.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from k3.ops.attnres import mix

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # a byte-level model of this very file
DEPTH, WIDTH, HEADS, CONTEXT = 4, 64, 4, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class GPT(nn.Module):
    def __init__(self, attention_residuals):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.1)
        self.sublayers = nn.ModuleList(f() for _ in range(DEPTH) for f in (Attention, mlp))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * DEPTH + 1))
        self.attention_residuals = attention_residuals
        # one query and one key-norm weight per reader; queries must start at zero: a plain mean
        self.queries = nn.Parameter(torch.zeros(2 * DEPTH + 1, WIDTH))
        self.gammas = nn.Parameter(torch.ones(2 * DEPTH + 1, WIDTH))

    def read(self, i, outputs):
        if not self.attention_residuals:
            return sum(outputs)
        flat = [y.flatten(0, 1) for y in outputs]
        return mix(flat, self.queries[i], self.gammas[i], 1e-5).view_as(outputs[0])

    def forward(self, ids):
        outputs = [self.embed(ids) + self.place.weight[: ids.shape[1]]]
        for i, sublayer in enumerate(self.sublayers):
            outputs.append(sublayer(self.norms[i](self.read(i, outputs))))
        return self.norms[-1](self.read(-1, outputs)) @ self.embed.weight.T


def train(model, steps=40):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = TEXT[torch.randint(len(TEXT) - CONTEXT, (8, 1)) + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


for name, flag in (("plain residual", False), ("attention residuals", True)):
    torch.manual_seed(0)
    losses = train(GPT(flag))
    print(f"{name:20s} loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
