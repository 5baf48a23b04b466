"""Recomputation changes memory and nothing else: losses, gradients and statistics bit for bit."""

import pytest
import torch
from awake import awake

from k3 import UserError
from k3.model.presets import preset
from k3.model.transformer import K3
from k3.ops.spans import Spans
from k3.parallel.remat import apply_remat


def tiny(**changes) -> K3:
    config = preset(
        "nano",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        attn_layers=("kda", "mla", "kda", "mla"),
        kda__head_dim=16,
        mla__q_lora_rank=16,
        moe__num_experts=8,
        moe__latent_size=32,
        **changes,
    )
    torch.manual_seed(0)
    return awake(K3(config, dtype=torch.float32))


def step(model: K3):
    torch.manual_seed(1)
    ids = torch.randint(0, 320, (48,))
    spans = Spans.from_lengths([20, 28])
    out = model(ids, spans)
    ahead = model.mtp_forward(0, out.h_TD, ids, spans)
    loss = model.logits(out.h_TD).logsumexp(-1).sum() + ahead.h_TD.square().sum()
    loss.backward()
    return loss.detach(), out, ahead


@pytest.mark.parametrize("kind", ["block", "full"])
def test_losses_gradients_and_statistics_are_bit_equal(kind):
    straight, recomputed = tiny(attnres__kind=kind), tiny(attnres__kind=kind)
    apply_remat(recomputed, "layer")
    assert list(straight.state_dict()) == list(recomputed.state_dict())
    loss, out, ahead = step(straight)
    again, out_again, ahead_again = step(recomputed)
    assert torch.equal(loss, again)
    for (name, a), b in zip(straight.named_parameters(), recomputed.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for one, other in ((out, out_again), (ahead, ahead_again)):
        assert torch.equal(one.routes, other.routes)
        for key, value in one.stats.items():
            assert torch.equal(value, other.stats[key]), key


def saved_bytes(model: K3) -> int:
    """Bytes that the forward pass keeps for the backward pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(torch.randint(0, 320, (256,)), Spans.from_lengths([256]))
    return sum(kept.values())


def test_less_is_kept_for_the_backward_pass():
    straight, recomputed = tiny(), tiny()
    apply_remat(recomputed, "layer")
    assert saved_bytes(recomputed) < saved_bytes(straight) / 3


def test_the_recomputed_route_is_the_forward_route(monkeypatch):
    """A kernel that breaks near-ties otherwise the second time must not change the gradient's
    route.
    """
    import k3.ops.route as ops

    straight, recomputed = tiny(), tiny()
    apply_remat(recomputed, "layer")
    step(straight)
    plain, calls = ops._top, []

    def drifting(biased_Tn, count):
        # In the recomputation (the calls during backward) the scores have drifted a little.
        calls.append(torch._C._current_graph_task_id() != -1)
        noise_n = torch.linspace(-0.2, 0.2, biased_Tn.shape[1])
        return plain(biased_Tn + noise_n * float(calls[-1]), count)

    monkeypatch.setattr(ops, "_top", drifting)
    step(recomputed)
    assert any(calls) and not all(calls)
    for (name, a), b in zip(straight.named_parameters(), recomputed.parameters(), strict=True):
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_without_gradients_nothing_is_wrapped_and_names_are_checked():
    model = tiny()
    apply_remat(model, "none")
    assert "forward" not in vars(model.layers[0])
    with pytest.raises(UserError, match="remat: one of .* got 'all'"):
        apply_remat(model, "all")
