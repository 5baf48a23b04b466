"""The whole network: embedding, decoder layers over depth, output mix, head (report §2; released
forward order).

`K3` knows nothing of optimizers, devices or servers. It publishes facts about its parameters and
returns, with its output,
the integers and maxima that others act on.

Legend: T tokens, D hidden, R rows whose logits are wanted, V vocabulary, k chosen experts, L
decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.model.attnres import Depth, DepthMixing, DepthQuery
from k3.model.block import DecoderLayer, LayerOut
from k3.model.config import K3Config
from k3.model.facts import facts_of, is_fp32_island
from k3.model.initialize import initialize
from k3.model.layers import Linear, RMSNorm, Weight
from k3.model.mtp import MTPLayer
from k3.model.router import Router
from k3.model.state import State
from k3.ops.facts import ParamFacts
from k3.ops.spans import Spans


class Out(NamedTuple):
    h_TD: Tensor
    """The output mix, before the final norm."""
    routes: Tensor | None
    """Chosen experts int64 [T, MoE layers, k]; None in a dense model."""
    taps: list[Tensor]
    """The un-mixed block outputs [T, D] that `taps` asked for."""
    stats: dict[str, Any]
    """expert_load int64 [MoE layers, n]; in training, for balancing, histogram int64
    [MoE layers, n, B] or a list `margins` of (scores, cutoff); max_logit fp32
    [layers with a softmax, H]; output_norm fp32 [L+1], RMS of the running sum by depth."""


class K3(DepthMixing):
    """The text network of a `K3Config`.

    Weights are made in `dtype`, the fp32 islands always in fp32.
    """

    compute_dtype: torch.dtype | None = None
    """Dtype of the activations; None is that of the embedding. Set bfloat16 to train fp32
    weights in bf16.
    """

    def __init__(
        self,
        config: K3Config,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(config)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size, **factory)
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, **factory) for layer in count)
        self.add_query("output_attn_res", config, **factory)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, **factory)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        extra = range(config.num_nextn_predict_layers)
        self.mtp = nn.ModuleList(MTPLayer(config, index, **factory) for index in extra)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every weight anew (see `initialize`)."""
        for name, facts in self.param_facts().items():
            initialize(name, self.get_parameter(name), facts, self.config)

    def param_facts(self) -> dict[str, ParamFacts]:
        """What others need to know of each parameter, by name."""
        return {name: facts_of(name, p, self.config) for name, p in self.named_parameters()}

    def routers(self) -> list[Router]:
        """Every router, backbone first, then MTP: the order of `stats["expert_load"]`."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> K3:
        """Moves and casts like any module, but never narrows an fp32 island."""
        tensors = [*self.named_parameters(), *self.named_buffers()]
        islands = {name: t.detach() for name, t in tensors if is_fp32_island(name)}
        super()._apply(fn, recurse)
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if (
                name in islands
                and tensor.dtype != islands[name].dtype
                and tensor.dtype.itemsize < 4
            ):
                tensor.data = islands[name].to(tensor.device)
        return self

    def embed(self, ids_T: Tensor) -> Tensor:
        """ids [T] -> rows [T, D] in the compute dtype."""
        x_TD = F.embedding(ids_T, self.embed_tokens.weight)
        return x_TD if self.compute_dtype is None else x_TD.to(self.compute_dtype)

    def forward(
        self,
        ids_T: Tensor,
        spans: Spans,
        state: State | None = None,
        *,
        embeds: Tensor | None = None,
        routes: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Out:
        """ids [T] packed as `spans` -> `Out`. One function for training, prefill and decode.

        state: the sequences' state, read and advanced in place; span i continues sequence i.
        embeds [T, D]: replace the embedding (media).  routes int64 [T, MoE layers, k]: force the
        experts.
        taps: AttnRes blocks whose output is wanted, negative from the end.
        ValueError when ids and spans disagree in length.
        """
        if ids_T.shape != (spans.num_tokens,):
            raise ValueError(f"{tuple(ids_T.shape)} ids for spans of {spans.num_tokens} tokens")
        if state is not None:
            state.reserve(spans)
        depth = Depth((), self.embed(ids_T) if embeds is None else embeds)
        two_phase = self.config.attnres.kind == "block" and not torch.is_grad_enabled()
        outs: list[LayerOut] = []
        norms = [_rms(depth)]
        moe_layer = 0
        for layer in self._layers():
            if layer.starts_block:
                queries = self._block_queries(layer.layer) if two_phase else ()
                depth = depth.close(queries, 2 * layer.layer)
            forced = None
            if routes is not None and hasattr(layer, "block_sparse_moe"):
                forced, moe_layer = routes[:, moe_layer], moe_layer + 1
            out = layer(depth, spans, state, forced)
            depth = out.depth
            outs.append(out)
            norms.append(_rms(depth))
        h_TD = depth.read(self.query("output_attn_res"), 2 * len(self.layers))
        if state is not None:
            state.advance(spans)
        assert depth.prefix is not None
        blocks = [*depth.blocks[1:], depth.prefix]
        return Out(h_TD, _stack_routes(outs), [blocks[tap] for tap in taps], gather(outs, norms))

    def _layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.layers]

    def _block_queries(self, layer: int) -> list[DepthQuery]:
        """Queries of every sublayer of the block that starts at `layer`, and the output's after
        the last block.
        """
        stop = layer + self.config.attnres.block_size
        queries = []
        for inside in self._layers()[layer:stop]:
            queries += [inside.query("self_attention_res"), inside.query("mlp_res")]
        if stop >= len(self.layers):
            queries.append(self.query("output_attn_res"))
        return [query for query in queries if query is not None]

    def mtp_forward(
        self,
        index: int,
        h_TD: Tensor,
        next_ids_T: Tensor,
        spans: Spans,
        state: State | None = None,
        *,
        routes: Tensor | None = None,
    ) -> Out:
        """h [T, D] from `forward` and the id after each token -> features of the token after that.

        Multiply `mtp[index].head_input(h)` with the shared head. The state is not advanced.
        """
        forced = None if routes is None else routes[:, 0]
        out = self.mtp[index](h_TD, self.embed(next_ids_T), spans, state, forced)
        assert out.depth.prefix is not None
        return Out(out.depth.prefix, _stack_routes([out]), [], gather([out], [_rms(out.depth)]))

    def head_input(self, h_RD: Tensor) -> Tensor:
        """The final norm: what the head multiplies."""
        return self.norm(h_RD)

    def logits(self, h_RD: Tensor) -> Tensor:
        """Rows of `Out.h_TD` [R, D] -> logits [R, V], at least fp32."""
        logits_RV = self.lm_head(self.norm(h_RD))
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()


def gather(outs: Sequence[LayerOut], norms: Sequence[Tensor]) -> dict[str, Any]:
    """Per-layer statistics as stacked tensors; the ragged `margins` as a list."""
    stats: dict[str, Any] = {"output_norm": torch.stack(list(norms))}
    for key in ("expert_load", "histogram"):
        if rows := [out.stats[key] for out in outs if key in out.stats]:
            stats[key] = torch.stack(rows)
    if margins := [out.stats["margins"] for out in outs if "margins" in out.stats]:
        stats["margins"] = margins
    if logits := [out.max_logit_H for out in outs if out.max_logit_H is not None]:
        stats["max_logit"] = torch.stack(logits)
    return stats


def _stack_routes(outs: Sequence[LayerOut]) -> Tensor | None:
    rows = [out.routes_Tk for out in outs if out.routes_Tk is not None]
    return torch.stack(rows, dim=1) if rows else None


@torch.no_grad()
def _rms(depth: Depth) -> Tensor:
    assert depth.prefix is not None
    return depth.prefix.float().square().mean().sqrt()
