"""Models that the checkpoint tests share: every preset, every alternative, and a small one."""

import json
from pathlib import Path

import torch
from awake import awake
from safetensors.torch import load_file, save_file

from k3.model.config import AttnResConfig, K3Config
from k3.model.presets import PRESETS, family, preset
from k3.model.transformer import K3
from k3.ops.spans import Spans

ODD = {
    "no gate": preset("nano", mla__output_gate=False),
    "softplus": preset("nano", kda__lower_bound=None),
    "low-rank gate": preset("nano", kda__full_rank_gate=False),
    "no query latent": preset("nano", mla__q_lora_rank=None),
    "full width": preset("nano", moe__latent_size=None),
    "no latent norm": preset("nano", moe__latent_norm=False),
    "no shared experts": preset("nano", moe__num_shared_experts=0),
    "one shared expert": preset("nano", moe__num_shared_experts=1),
    "plain residual": preset("nano", attnres=AttnResConfig(kind="none")),
    "full residuals": preset("nano", attnres=AttnResConfig(kind="full")),
    "frozen queries": preset("nano", attnres__query="random"),
    "no MTP": preset("nano", num_nextn_predict_layers=0),
    "dense": preset("nano", moe=None),
    "three dense": preset("nano", first_k_dense=3),
    "tied": preset("nano", tie_word_embeddings=True),
    "longer convolution": preset("nano", kda__conv_size=6),
    "no shared key": preset("nano", mla__qk_rope_head_dim=0),
    "swiglu": preset("nano", activation="swiglu"),
    "depth 7": family(7),
}
ALL = {name: preset(name) for name in PRESETS} | ODD

SMALL = preset(
    "nano",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    moe__num_experts=8,
    moe__top_k=2,
)
IDS = torch.arange(3, 40)
LM = "language_model.model."
INDEX = "model.safetensors.index.json"


def made(config: K3Config, seed: int = 0) -> K3:
    """A model in which every tensor, islands and biases too, is drawn at random."""
    torch.manual_seed(seed)
    model = awake(K3(config)).eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data += 0.1 * torch.randn_like(tensor)
    return model


@torch.no_grad()
def logits(model: K3) -> torch.Tensor:
    spans = Spans.from_lengths([20, len(IDS) - 20])
    h_TD = model(IDS, spans).h_TD
    out = [model.logits(h_TD)]
    for index in range(model.config.num_nextn_predict_layers):
        after = model.mtp_forward(index, h_TD, IDS, spans).h_TD
        out.append(model.lm_head(model.mtp[index].head_input(after)).float())
    return torch.cat(out)


def tensors_of(model: K3) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite(folder: Path, change) -> None:
    """Puts all tensors, changed, in a single file without an index."""
    tensors = {n: t for p in folder.glob("*.safetensors") for n, t in load_file(p).items()}
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})
