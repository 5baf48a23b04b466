"""Which models other engines can read: those whose forward pass the released keys express."""

from __future__ import annotations

from k3 import UserError
from k3.model.config import K3Config

REASONS = {
    "attn_layers": "its layer kinds are not only KDA and MLA in K3's form",
    "mha": "it has ordinary multi-head attention",
    "latent_norm_eps": "its latent norms have an eps of their own",
    "attn_res": "its Attention Residuals run over every sublayer, not over blocks",
}


def export_check(config: K3Config) -> list[str]:
    """Why other engines can't read this model, one line each naming the key; empty if they can.

    The reasons are the entries of `text_config.openk3` but `training`, which changes no forward
    pass.
    """
    extras = config.to_hf()["text_config"].get("openk3", {})
    return [
        f"text_config.openk3.{key} = {value!r}: {REASONS.get(key, 'no released key says it')}"
        for key, value in extras.items()
        if key != "training"
    ]


def require_exportable(config: K3Config, name: str) -> None:
    """UserError, in one line, with the reasons of `export_check`."""
    if reasons := export_check(config):
        raise UserError(f"{name}: other engines can't read this model: {'; '.join(reasons)}")
