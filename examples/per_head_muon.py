"""Per-head Muon in a plain GPT: each head of Q, K and V is orthogonalised by itself.

    python examples/per_head_muon.py

Muon replaces a gradient matrix by one with equal singular values. Done on a whole Q, K or V matrix,
a head with small gradients may get almost no update; cut along the heads, every head moves alike,
at a fraction of the cost. The step is scaled by the size of the block. Source: Kimi K3 report §2.5.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from k3.ops.orthogonal import orthogonalize

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # a byte-level model of this very file
DEPTH, WIDTH, HEADS, CONTEXT = 3, 64, 4, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        # heads that speak ever more quietly, so that their gradients differ as in a trained model
        volume = 10.0 ** -(torch.arange(HEADS) / 2)
        self.out.weight.data *= volume.repeat_interleave(WIDTH // HEADS)

    def forward(self, x):
        heads = (HEADS, WIDTH // HEADS)
        q, k, v = (f(x).unflatten(-1, heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp():
    wide = 4 * WIDTH
    return nn.Sequential(
        nn.Linear(WIDTH, wide, bias=False), nn.GELU(), nn.Linear(wide, WIDTH, bias=False)
    )


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.1)
        self.sublayers = nn.ModuleList(f() for _ in range(DEPTH) for f in (Attention, mlp))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * DEPTH + 1))

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for norm, sublayer in zip(self.norms, self.sublayers, strict=False):
            x = x + sublayer(norm(x))
        return self.norms[-1](x) @ self.embed.weight.T


class Muon(torch.optim.Optimizer):
    """Matrices only; `heads` is the number of blocks along axis 0."""

    def __init__(self, groups, lr=0.02, momentum=0.95):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "heads": 1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                blocks = p.grad.add(m, alpha=group["momentum"]).unflatten(0, (group["heads"], -1))
                update = orthogonalize(blocks) * 0.2 * max(blocks.shape[1:]) ** 0.5
                self.state[p]["update"] = update
                p.sub_(update.flatten(0, 1), alpha=group["lr"])


def train(model, heads, steps=40):
    matrices = {n: p for n, p in model.sublayers.named_parameters() if p.dim() == 2}
    qkv = [p for n, p in matrices.items() if n.split(".")[1] in "qkv"]
    rest = [p for n, p in matrices.items() if n.split(".")[1] not in "qkv"]
    muon = Muon([{"params": qkv, "heads": heads}, {"params": rest}])
    own = {id(p) for p in matrices.values()}
    adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in own], lr=3e-3)
    losses, spread = [], 0.0
    for _ in range(steps):
        ids = TEXT[torch.randint(len(TEXT) - CONTEXT, (8, 1)) + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
        losses.append(loss.item())
        for p in qkv:
            rms = muon.state[p]["update"].reshape(HEADS, -1).square().mean(1).sqrt()
            spread = max(spread, float(rms.max() / rms.min()))
    return losses, spread


for name, heads in (("whole-matrix Muon", 1), ("per-head Muon", HEADS)):
    torch.manual_seed(0)
    losses, spread = train(GPT(), heads)
    print(
        f"{name:20s} loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}, "
        f"largest / smallest head update {spread:.2f}"
    )
