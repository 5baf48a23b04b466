"""Any configuration that can be made can be kept: names one to one, values the same."""

import tempfile
from dataclasses import fields
from pathlib import Path

import torch
from checkpoint_models import logits, made, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.checkpoint.layout import model_shapes, tensor_specs
from k3.checkpoint.released import load_released, save_released
from k3.model.config import AttnResConfig, K3Config, KDAConfig, MHAConfig, MLAConfig, MoEConfig

KDA = st.builds(
    KDAConfig,
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 12, 16]),
    conv_size=st.integers(2, 5),
    lower_bound=st.sampled_from([-5.0, -1.5, None]),
    full_rank_gate=st.booleans(),
)
MLA = st.builds(
    MLAConfig,
    num_heads=st.integers(1, 3),
    q_lora_rank=st.sampled_from([None, 8]),
    kv_lora_rank=st.sampled_from([4, 8]),
    qk_nope_head_dim=st.sampled_from([4, 6]),
    qk_rope_head_dim=st.sampled_from([0, 2]),
    v_head_dim=st.sampled_from([4, 10]),
    output_gate=st.booleans(),
    latent_norm_eps=st.sampled_from([1e-6, 1e-5]),
    rope_theta=st.sampled_from([None, 10000.0, 50000.0]),
)
MHA = st.builds(MHAConfig, num_heads=st.integers(1, 2), head_dim=st.sampled_from([4, 8]))
MOE = st.builds(
    MoEConfig,
    num_experts=st.sampled_from([2, 5]),
    top_k=st.integers(1, 2),
    num_shared_experts=st.integers(0, 2),
    intermediate_size=st.sampled_from([6, 32]),
    latent_size=st.sampled_from([None, 8]),
    latent_norm=st.booleans(),
    routed_scaling_factor=st.sampled_from([1.0, 2.446]),
    renormalize=st.booleans(),
    balance=st.sampled_from(["quantile", "quantile_exact", "sign", "none"]),
    sign_step=st.sampled_from([1e-2, 1e-3]),
    bins=st.sampled_from([1000, 64]),
)
RESIDUALS = st.builds(
    AttnResConfig,
    kind=st.sampled_from(["block", "full", "none"]),
    block_size=st.integers(1, 3),
    query=st.sampled_from(["learned", "uniform", "random"]),
)
KINDS = st.one_of(
    st.lists(st.sampled_from(kinds), min_size=1, max_size=4).map(tuple)
    for kinds in (["kda", "mla"], ["kda", "mha"])
)


@st.composite
def configs(draw) -> K3Config:
    layers = draw(KINDS)
    parts = {"kda": KDA, "mla": MLA, "mha": MHA}
    attention = {
        kind: draw(part if kind in layers else st.none() | part) for kind, part in parts.items()
    }
    moe = draw(st.none() | MOE)
    situ = draw(st.booleans())
    return K3Config(
        vocab_size=draw(st.integers(257, 300)),
        hidden_size=draw(st.sampled_from([6, 16, 20])),
        intermediate_size=draw(st.sampled_from([5, 16])),
        attn_layers=layers,
        **attention,
        moe=moe,
        attnres=draw(RESIDUALS),
        # Without experts, and without SiTU, the fields about them are not kept.
        first_k_dense=draw(st.integers(0, 2)) if moe else 1,
        activation="situ" if situ else "swiglu",
        situ_beta=draw(st.sampled_from([4.0, 2.5])) if situ else 4.0,
        situ_linear_beta=draw(st.sampled_from([25.0, 3.0])) if situ else 25.0,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        tie_word_embeddings=draw(st.booleans()),
        num_nextn_predict_layers=draw(st.integers(0, 1)) if attention["mla"] else 0,
        mtp_loss_weight=draw(st.sampled_from([0.3, 0.1])),
        max_position_embeddings=draw(st.sampled_from([64, 1 << 20])),
        initializer_range=draw(st.sampled_from([None, 0.02, 0.5])),
    )


@given(config=configs(), shard_bytes=st.sampled_from([1, 20_000, 1 << 30]))
@settings(max_examples=40)
def test_save_and_load_are_the_identity(config: K3Config, shard_bytes: int):
    model = made(config)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "hf"
        save_released(model, folder, dtype="float32", shard_bytes=shard_bytes)
        loaded = load_released(folder)
    for field in fields(K3Config):
        assert getattr(loaded.config, field.name) == getattr(config, field.name), field.name
    assert tensors_of(loaded).keys() == tensors_of(model).keys()
    for name, tensor in tensors_of(model).items():
        found = tensors_of(loaded)[name]
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype, name
        assert found.requires_grad == tensor.requires_grad, name
    assert torch.equal(logits(loaded), logits(model))


@given(config=configs())
@settings(max_examples=100)
def test_names_are_one_to_one(config: K3Config):
    specs = list(tensor_specs(config))
    assert len({spec.name for spec in specs}) == len(specs)
    assert len({(spec.source, spec.expert) for spec in specs}) == len(specs)
    shapes = dict(model_shapes(config))
    assert {spec.source for spec in specs} == shapes.keys()
    assert sum(spec.nbytes // (4 if spec.dtype == "F32" else 2) for spec in specs) == sum(
        torch.Size(shape).numel() for shape in shapes.values()
    )
