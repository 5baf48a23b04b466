"""Token by token on cached state: the plain loop that everything faster is compared with.

Legend: N prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k3.model.state import DenseState
from k3.model.transformer import K3
from k3.ops.sample import sample
from k3.ops.spans import Spans


@torch.no_grad()
def generate(
    model: K3,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continues each prompt by at most `max_new_tokens` ids (the stop id included). Temperature 0
    is greedy.

    Row i of seed s draws from counter stream s + i, so a row's ids don't depend on the other
    prompts.
    on_token(row, id) is called as ids arrive. stop_ids defaults to the model's only stop id.
    ValueError on an empty prompt or an id outside the vocabulary.
    """
    _check(prompts, model.config.vocab_size)
    stops = {model.config.eos_token_id} if stop_ids is None else set(stop_ids)
    device = model.embed_tokens.weight.device
    dtype = model.compute_dtype or model.embed_tokens.weight.dtype
    longest = max((len(prompt) for prompt in prompts), default=0)
    state = DenseState(model.config, len(prompts), longest + max_new_tokens, device, dtype)
    was_training, _ = model.training, model.eval()
    outputs: list[list[int]] = [[] for _ in prompts]
    seeds = torch.arange(len(prompts), device=device) + seed
    pending = [list(prompt) for prompt in prompts]
    live = [True] * len(prompts)
    for _ in range(max_new_tokens if prompts else 0):
        spans = Spans.from_lengths([len(ids) for ids in pending], device)
        flat = torch.tensor([i for ids in pending for i in ids], dtype=torch.int64, device=device)
        logits = _last_logits(model, flat, spans, state)
        position = torch.tensor(state.lengths, dtype=torch.int64, device=device)
        chosen, _ = sample(
            logits,
            seed_N=seeds,
            position_N=position,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        pending = [[] for _ in prompts]
        for row, token in enumerate(chosen.tolist()):
            if not live[row]:
                continue
            outputs[row].append(token)
            if on_token is not None:
                on_token(row, token)
            live[row] = token not in stops
            pending[row] = [token] if live[row] else []
        if not any(live):
            break
    model.train(was_training)
    return outputs


def _last_logits(model: K3, ids_T: Tensor, spans: Spans, state: DenseState) -> Tensor:
    """Logits [N, V] of each span's last token.

    A finished row has an empty span; its logits are never used.
    """
    h_TD = model(ids_T, spans, state).h_TD
    last = (spans.cu_seqlens[1:].long() - 1).clamp_min(0)
    return model.logits(h_TD[last])


def _check(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompt {row} holds id {token}, the vocabulary has {vocab_size}")
