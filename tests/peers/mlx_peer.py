"""mlx-lm's K3 on a CPU: opened by its own loader from a folder of ours, read back through numpy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vendor import package_folder


@cache
def _mlx() -> Any:
    for name in ("mlx", "mlx_lm", "transformers"):
        package_folder(name)
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    return mx


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array.astype(_mlx().float32)))


class MLX:
    """The model that `mlx_lm` makes of a folder."""

    def __init__(self, folder: Path) -> None:
        self.mx = _mlx()
        from mlx_lm.utils import load_model

        self.model, self.config = load_model(folder)
        self.model.eval()

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V] from one pass."""
        return _tensor(self.model(self.mx.array([ids]))[0])

    def decode(self, ids: list[int], prefill: int) -> Tensor:
        """[T, V] from `prefill` tokens at once and the rest one by one on the cache."""
        state, rows = self.model.make_cache(), []
        for chunk in ([*ids[:prefill]], *([token] for token in ids[prefill:])):
            rows.append(_tensor(self.model(self.mx.array([chunk]), cache=state)[0]))
        return torch.cat(rows)

    def loss_and_gradients(self, ids: list[int]) -> tuple[float, dict[str, Tensor]]:
        """The loss of next-token prediction, and gradients by mlx-lm's own names."""
        import mlx.nn as nn
        from mlx.utils import tree_flatten

        inputs, targets = self.mx.array([ids[:-1]]), self.mx.array([ids[1:]])

        def loss(model: Any) -> Any:
            return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")

        self.model.train()
        value, gradients = nn.value_and_grad(self.model, loss)(self.model)
        return value.item(), {name: _tensor(g) for name, g in tree_flatten(gradients)}

    def renamed(self, released: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the released layout as mlx-lm holds them: stacked, split and transposed, all
        of it linear, so gradients may pass as well as weights.
        """
        arrays = {name: self.mx.array(value.numpy()) for name, value in released.items()}
        return {name: _tensor(a) for name, a in self.model.sanitize(arrays).items()}
