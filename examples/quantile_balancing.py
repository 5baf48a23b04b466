"""Quantile Balancing in a plain MoE GPT: the router bias is a quantile, so there is no step size.

    python examples/quantile_balancing.py

With k of n experts per token, an expert's share of m tokens is m k / n. The bias that would have
let exactly that many in is a quantile of (cutoff - score) over the step's tokens; it serves from
the next step on, and only selects: the mixing weights never see it. Source: Kimi K3 report §2.3.3.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from k3.ops.experts import experts
from k3.ops.quantile import bias_from_histogram, histogram
from k3.ops.route import route
from k3.ops.situ import swiglu

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # a byte-level model of this very file
DEPTH, WIDTH, HEADS, CONTEXT, EXPERTS, TOP_K = 3, 64, 4, 64, 16, 4


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1, self.w3, self.w2 = (
            nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in range(3)
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.load = torch.zeros(EXPERTS)

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat).sigmoid()
        chosen = route(scores, self.bias, TOP_K)
        load = torch.bincount(chosen.indices_Tk.flatten(), minlength=EXPERTS)
        self.load = 0.9 * self.load + 0.1 * load  # for the report below: a step's loads are noisy
        self.counts = histogram(scores, chosen.cutoff_T, self.bias)  # integers: add them over ranks
        y = experts(flat, chosen.indices_Tk, chosen.weights_Tk, self.w1, self.w3, self.w2, swiglu)
        return y.view_as(x)

    def balance(self):
        tokens = int(self.counts[0].sum())
        self.bias.copy_(bias_from_histogram(self.counts, self.bias, TOP_K, tokens))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.1)
        self.sublayers = nn.ModuleList(f() for _ in range(DEPTH) for f in (Attention, MoE))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * DEPTH + 1))

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for norm, sublayer in zip(self.norms, self.sublayers, strict=False):
            x = x + sublayer(norm(x))
        return self.norms[-1](x) @ self.embed.weight.T


def train(model, balanced, steps=40):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = TEXT[torch.randint(len(TEXT) - CONTEXT, (8, 1)) + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for layer in model.sublayers[1::2] if balanced else ():
            layer.balance()
        losses.append(loss.item())
    return losses


for name, flag in (("no balancing", False), ("quantile balancing", True)):
    torch.manual_seed(0)
    losses = train(model := GPT(), flag)
    load = torch.stack([layer.load for layer in model.sublayers[1::2]])
    load /= load.mean(1, keepdim=True)
    print(
        f"{name:20s} loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}, "
        f"load / mean load from {load.min():.2f} to {load.max():.2f}"
    )
