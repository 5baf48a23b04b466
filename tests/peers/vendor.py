"""The released K3 text code on a CPU, at test time, from the wheel that ships it.

Nothing of it is copied here: its files (Kimi K3 License) are imported where the package manager put
them, past the package's own `__init__`, which wants data sets and quantisers. Four things it takes
from `fla` need a GPU; the stand-ins below are written from their documented behaviour, but for the
recurrence itself, which is fla's own naive file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

PREFIX = "language_model."


def package_folder(name: str) -> Path:
    """Where a package lies, without importing it; skips the test when it isn't installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed: make peers")
    return Path(next(iter(spec.submodule_search_locations)))


def load_file_module(name: str, path: Path) -> ModuleType:
    """One source file as a module of the given name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def fla_naive(op: str) -> ModuleType:
    """fla's plain reference of an op: "kda" or "attnres"."""
    package_folder("einops")
    return load_file_module(f"fla_naive_{op}", package_folder("fla") / "ops" / op / "naive.py")


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution, then SiLU; the cache holds the last inputs, [B, D, W]."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str) -> None:
        assert activation == "silu"
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, cache: Tensor | None, output_final_state: bool, **_: Any
    ) -> tuple[Tensor, Tensor]:
        width = self.kernel_size[0]
        u = x.transpose(1, 2)
        past = u.new_zeros(*u.shape[:2], width) if cache is None else cache
        u = torch.cat([past, u], dim=-1)
        y = F.conv1d(u[..., 1:], self.weight, groups=self.groups)
        return F.silu(y).transpose(1, 2), u[..., -width:]


class FusedRMSNormGated(nn.Module):
    def __init__(self, width: int, eps: float, activation: str) -> None:
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * gate.sigmoid()


def _kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    lower_bound: float | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Gates and normalisation as fla's kernels do them inside; the state is kept as [V, K]."""
    slope = A_log.exp().view(-1, 1)
    z = g + dt_bias.view(g.shape[-2:])
    g = -slope * F.softplus(z) if lower_bound is None else lower_bound * (slope * z).sigmoid()
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = fla_naive("kda").naive_recurrent_kda(
        q, k, v, g, beta.sigmoid(), initial_state=initial_state, output_final_state=True
    )
    return o, state.transpose(-1, -2)


class Calibration:
    """Whether the experts run on their differentiable path."""

    on = False


def _stubs() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "llmcompressor": {},
        "llmcompressor.modeling": {},
        "llmcompressor.modeling.moe": {},
        "llmcompressor.modeling.moe.context": {
            "get_calibrate_all_experts_flag": lambda: Calibration.on
        },
        "fla": {},
        "fla.modules": {
            "ShortConvolution": ShortConvolution,
            "FusedRMSNormGated": FusedRMSNormGated,
        },
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": _kda, "fused_recurrent_kda": _kda},
        "fla.ops.utils": {},
        "fla.ops.utils.index": {
            "prepare_cu_seqlens_from_mask": None,
            "prepare_lens_from_mask": None,
        },
        "fla.utils": {"tensor_cache": lambda function: function},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = ModuleType(name)
        modules[name].__path__ = []
        vars(modules[name]).update(content)
    return modules


@contextmanager
def _in_sys_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    kept = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@cache
def released_code() -> ModuleType:
    """The module that defines the released text model; imported once, some ten seconds."""
    folder = package_folder("llmcompressor") / "modeling" / "kimi_k3"
    package_folder("transformers")
    fla_naive("kda")
    package = ModuleType("released_k3")
    package.__path__ = [str(folder)]
    sys.modules["released_k3"] = package
    with _in_sys_modules(_stubs()):
        load_file_module("released_k3.configuration_kimi_k3", folder / "configuration_kimi_k3.py")
        return load_file_module(
            "released_k3.modeling_kimi_linear", folder / "modeling_kimi_linear.py"
        )


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, by released name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


class Vendor:
    """The released model with the weights of a folder."""

    def __init__(self, folder: Path) -> None:
        code = released_code()
        text = json.loads((folder / "config.json").read_text())["text_config"]
        # The released constructor makes empty shared experts of 0 and none of null.
        text["num_shared_experts"] = text.get("num_shared_experts") or None
        config = code.KimiLinearConfig(**text)
        config._attn_implementation = "eager"
        self.model: nn.Module = code.KimiLinearForCausalLM(config).eval()
        weights = {name.removeprefix(PREFIX): value for name, value in stored(folder).items()}
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        extra = f"model.layers.{config.num_hidden_layers}."
        weights = {n: w for n, w in weights.items() if not n.startswith(extra)}
        self.model.load_state_dict(weights, strict=True)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[T, V] from one pass."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def decode(self, ids: list[int], prefill: int) -> Tensor:
        """[T, V] from `prefill` tokens at once and the rest one by one on the cache."""
        rows, cache = [], None
        for chunk in ([*ids[:prefill]], *([token] for token in ids[prefill:])):
            out = self.model(torch.tensor([chunk]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0])
            cache = out.past_key_values
        return torch.cat(rows)

    def loss_and_gradients(
        self, ids: list[int], loss: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss of next-token prediction, and gradients by released name."""
        Calibration.on = True
        try:
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
            value = loss(logits[:-1], torch.tensor(ids[1:]))
            self.model.zero_grad()
            value.backward()
        finally:
            Calibration.on = False
        named = self.model.named_parameters()
        return value.item(), {PREFIX + n: p.grad for n, p in named if p.grad is not None}
