"""Per-head Muon for matrices and AdamW for everything else, in one torch optimizer.

Muon's update is the momentum with its singular values pushed to one. For the query, key and value
projections each head is orthogonalised alone, so a head with small gradients moves as much as its
neighbour (Kimi K3 report §2.5); a stack of experts is a batch of matrices. Which parameter is cut
where is the model's to say, in `ParamFacts`; no name is parsed.

Legend: A, B rows and columns of one block; x any number of blocks.
Sources: Kimi K3 report §2.5; "Muon is scalable for LLM training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from k3 import UserError
from k3.ops.facts import ParamFacts
from k3.ops.orthogonal import orthogonalize

KINDS = ("per_head", "whole", "adamw")
MATRIX_ROLES = ("matrix", "expert")
MAX_BATCH = 1 << 26
"""Elements orthogonalised at once: bounds the temporary memory of a step."""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 3e-3
    """Peak learning rate, shared by Muon and AdamW (the block scale makes their steps alike)."""
    kind: str = "per_head"
    """per_head: K3; whole: each matrix as one block; adamw: no Muon at all."""
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_dtype: str = "auto"
    """Precision of the iterations: float32, bfloat16, or auto (bfloat16 on CUDA only)."""
    update_rms: float = 0.2
    """A block's step has about this RMS times lr, AdamW's own range."""
    weight_decay: float = 0.1
    """Decoupled: weights shrink by lr * weight_decay a step."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    adamw_lr_scale: float = 1.0
    """Learning rate of embedding, head, norms and vectors over that of the matrices."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    qk_clip: float | None = 100.0
    """Largest attention logit; None turns QK-clip off."""

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"optim.kind: one of {KINDS}, got {self.kind!r}")
        _require(self.lr > 0, f"optim.lr must be positive, got {self.lr}")
        _require(0 <= self.momentum < 1, f"optim.momentum must lie in [0, 1), got {self.momentum}")
        _require(self.ns_steps > 0, f"optim.ns_steps must be positive, got {self.ns_steps}")
        _require(
            self.ns_dtype in ("auto", "float32", "bfloat16"),
            f"optim.ns_dtype: auto, float32 or bfloat16, got {self.ns_dtype!r}",
        )
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optim.betas must lie in [0, 1), got {self.betas}",
        )
        _require(self.eps > 0, f"optim.eps must be positive, got {self.eps}")
        _require(
            self.weight_decay >= 0,
            f"optim.weight_decay must not be negative, got {self.weight_decay}",
        )
        _require(self.grad_clip >= 0, f"optim.grad_clip must not be negative, got {self.grad_clip}")
        _require(
            self.qk_clip is None or self.qk_clip > 0,
            f"optim.qk_clip must be positive or None, got {self.qk_clip}",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def blocks(x: Tensor, facts: ParamFacts, per_head: bool = True) -> list[Tensor]:
    """The matrices that Muon orthogonalises apart, as views [x, A, B] of a tensor of the
    parameter's shape.
    """
    if facts.role == "expert":
        return [x]
    if not per_head or not facts.heads:
        return [x[None]]
    rows = facts.head_rows or (x.shape[0] // facts.heads,)
    return list(x.view(facts.heads, sum(rows), x.shape[1]).split(rows, dim=1))


def block_scale(shape: tuple[int, ...], update_rms: float) -> float:
    """From an orthogonal [A, B] block, of RMS 1/sqrt(max(A, B)), to a step of RMS `update_rms`."""
    return update_rms * float(max(shape[-2:])) ** 0.5


def _peak_lr(param: Tensor, facts: ParamFacts, config: OptimConfig) -> float:
    """Matrices take `lr`, whichever rule moves them; everything else `lr * adamw_lr_scale`.

    A pseudo-query is one vector against normalised keys: D equal steps of size lr would move its
    score by lr * D at once and saturate the mix in a few steps, so it takes 1/sqrt(D) of that.
    """
    if facts.role in MATRIX_ROLES:
        return config.lr
    scale = param.shape[-1] ** -0.5 if facts.role == "query" else 1.0
    return config.lr * config.adamw_lr_scale * scale


class Muon(Optimizer):
    """Muon and AdamW side by side; state in float32, keyed by parameter name.

    A parameter without a gradient is left alone, its weight decay and its state too. Parameters of
    lower precision keep a float32 master copy, for a step of 1e-3 vanishes beside a bfloat16 weight
    of 1; if someone else writes the parameter (QK-clip, a loaded checkpoint) the master follows.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        facts: Mapping[str, ParamFacts],
        config: OptimConfig,
    ) -> None:
        named = [(n, p) for n, p in named_params if p.requires_grad and not facts[n].frozen]
        rule = "adamw" if config.kind == "adamw" else "muon"
        self.config = config
        self.facts = {name: facts[name] for name, _ in named}
        self.names = {param: name for name, param in named}
        matrices = [(n, p) for n, p in named if facts[n].role in MATRIX_ROLES]
        if rule == "muon":
            for name, param in matrices:
                _check_cut(name, param, facts[name], config.kind == "per_head")
        groups: dict[tuple[str, float], list[Tensor]] = {}
        for name, param in named:
            own = rule if facts[name].role in MATRIX_ROLES else "adamw"
            groups.setdefault((own, _peak_lr(param, facts[name], config)), []).append(param)
        super().__init__(
            [
                {"params": params, "rule": own, "lr": lr, "initial_lr": lr}
                for (own, lr), params in groups.items()
            ],
            {},
        )
        for group in self.param_groups:
            for param in group["params"]:
                self._make_state(param, group["rule"])

    def _make_state(self, param: Tensor, rule: str) -> None:
        """State exists from the start, so that a checkpoint of any step is complete."""
        state = self.state[param]
        for key in ("momentum",) if rule == "muon" else ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(param, dtype=torch.float32)
        if rule == "adamw":
            state["step"] = torch.zeros((), dtype=torch.int64)
        if param.dtype != torch.float32:
            state["master"] = param.detach().float()

    def set_lr(self, multiplier: float) -> None:
        """Learning rates of the next step: the peaks times `multiplier` (see `schedule.lr_at`)."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * multiplier

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients in place. The learning rate is each group's `lr`."""
        if closure is not None:
            raise ValueError("Muon takes no closure: compute gradients before step()")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            weights = [self._weight(param) for param in params]
            self._decay(params, weights, group["lr"])
            grads = [param.grad.float() for param in params]
            if group["rule"] == "muon":
                self._muon(params, weights, grads, group["lr"])
            else:
                self._adamw(params, weights, grads, group["lr"])
            for param, weight in zip(params, weights, strict=True):
                if weight is not param:
                    param.copy_(weight)

    def _weight(self, param: Tensor) -> Tensor:
        """What to update in float32: the parameter, or its master where nobody else wrote."""
        if param.dtype == torch.float32:
            return param
        master: Tensor = self.state[param]["master"]
        untouched = master.to(param.dtype) == param
        return master.copy_(torch.where(untouched, master, param.float()))

    def _decay(self, params: list[Tensor], weights: list[Tensor], lr: float) -> None:
        shrunk = [
            weight
            for param, weight in zip(params, weights, strict=True)
            if self.facts[self.names[param]].decay
        ]
        if shrunk and self.config.weight_decay:
            torch._foreach_mul_(shrunk, 1.0 - lr * self.config.weight_decay)

    def _muon(
        self, params: list[Tensor], weights: list[Tensor], grads: list[Tensor], lr: float
    ) -> None:
        c = self.config
        momenta = [self.state[param]["momentum"] for param in params]
        torch._foreach_mul_(momenta, c.momentum)
        torch._foreach_add_(momenta, grads)
        updates = momenta
        if c.nesterov:
            updates = list(torch._foreach_add(grads, momenta, alpha=c.momentum))
        # Blocks of equal shape, whatever layer they come from, are one batch; wide and tall ones
        # too.
        piles: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for param, weight, update in zip(params, weights, updates, strict=True):
            facts, per_head = self.facts[self.names[param]], c.kind == "per_head"
            for w, u in zip(
                blocks(weight, facts, per_head), blocks(update, facts, per_head), strict=True
            ):
                if u.shape[1] > u.shape[2]:
                    w, u = w.mT, u.mT
                for pair in _pieces(w, u):
                    piles.setdefault(tuple(u.shape[1:]), []).append(pair)
        for shape, pairs in piles.items():
            alpha = -lr * block_scale(shape, c.update_rms)
            for batch in _batches(pairs):
                self._apply(batch, alpha)

    def _apply(self, pairs: list[tuple[Tensor, Tensor]], alpha: float) -> None:
        u_xAB = torch.cat([update for _, update in pairs])
        o_xAB = orthogonalize(u_xAB, self.config.ns_steps, self._ns_dtype(u_xAB.device))
        parts = o_xAB.float().split([len(update) for _, update in pairs])
        torch._foreach_add_([weight for weight, _ in pairs], list(parts), alpha=alpha)

    def _ns_dtype(self, device: torch.device) -> torch.dtype | None:
        name = self.config.ns_dtype
        if name == "auto":
            return torch.bfloat16 if device.type == "cuda" else None
        return torch.bfloat16 if name == "bfloat16" else torch.float32

    def _adamw(
        self, params: list[Tensor], weights: list[Tensor], grads: list[Tensor], lr: float
    ) -> None:
        beta1, beta2 = self.config.betas
        states = [self.state[param] for param in params]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        steps = [int(state["step"]) for state in states]
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        denominators = list(torch._foreach_sqrt(second))
        torch._foreach_div_(denominators, [(1.0 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(denominators, self.config.eps)
        sizes = [-lr / (1.0 - beta1**step) for step in steps]
        torch._foreach_addcdiv_(weights, first, denominators, sizes)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat: `momentum.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, `master.NAME` (low
        precision only).
        """
        return {
            f"{key}.{self.names[param]}": value
            for group in self.param_groups
            for param in group["params"]
            for key, value in self.state[param].items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copies the values in. UserError names a missing or extra entry, or both shapes of a wrong
        one.
        """
        own = self.state_dict()
        if missing := own.keys() - state_dict.keys():
            raise UserError(f"optimizer state: {min(missing)!r} is missing ({len(missing)} in all)")
        if extra := state_dict.keys() - own.keys():
            raise UserError(
                f"optimizer state: {min(extra)!r} is not expected ({len(extra)} in all)"
            )
        for name, value in own.items():
            if value.shape != state_dict[name].shape:
                raise UserError(
                    f"optimizer state: {name!r} has shape {tuple(state_dict[name].shape)}, "
                    f"expected {tuple(value.shape)}"
                )
        for name, value in own.items():
            value.copy_(state_dict[name])


def _check_cut(name: str, param: Tensor, facts: ParamFacts, per_head: bool) -> None:
    """ValueError where the facts do not make matrices of this parameter."""
    want = 3 if facts.role == "expert" else 2
    if param.ndim != want:
        raise ValueError(f"{name}: role {facts.role!r} needs {want} axes, got {tuple(param.shape)}")
    if facts.role == "expert" and facts.expert_axis != 0:
        raise ValueError(f"{name}: experts must be stacked on axis 0, got {facts.expert_axis}")
    if per_head and facts.heads:
        rows = sum(facts.head_rows) or param.shape[0] // facts.heads
        if rows * facts.heads != param.shape[0]:
            raise ValueError(
                f"{name}: {facts.heads} heads of {rows} rows do not make {param.shape[0]} rows"
            )


def _pieces(weight: Tensor, update: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Cuts a stack that is larger than a batch may be."""
    count = max(1, MAX_BATCH // (update.shape[1] * update.shape[2]))
    return zip(weight.split(count), update.split(count), strict=True)


def _batches(pairs: list[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        if batch and size + pair[1].numel() > MAX_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += pair[1].numel()
    yield batch


def build_optimizer(
    named_params: Iterable[tuple[str, Tensor]],
    facts: Mapping[str, ParamFacts],
    config: OptimConfig,
) -> Muon:
    """The optimizer for a model: `build_optimizer(model.named_parameters(), model.param_facts(),
    config)`.
    """
    return Muon(named_params, facts, config)
