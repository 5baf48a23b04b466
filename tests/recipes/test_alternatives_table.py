"""docs/model.md lists every arm with its size and cost.

`python tests/recipes/test_alternatives_table.py` rewrites the table.
"""

from pathlib import Path

from k3.checkpoint.params import active_params, flops_per_token, total_params
from k3.recipes.pretrain import ARMS, recipe
from k3.report.tables import markdown

DOCS = Path(__file__).parents[2] / "docs" / "model.md"
MARK = "<!-- alternatives -->\n"
CONTEXT = 256
IDEAS = {
    "softplus-decay": "bounded decay",
    "low-rank-gate": "full-rank output gate of KDA",
    "no-mla-gate": "output gate of MLA",
    "plain-residual": "Attention Residuals",
    "full-attnres": "Block AttnRes",
    "block-attnres": "Full AttnRes",
    "uniform-queries": "learned AttnRes queries",
    "random-queries": "learned AttnRes queries",
    "full-width-moe": "latent experts",
    "no-latent-norm": "norm before the up-projection",
    "swiglu": "SiTU-GLU",
    "sign-rule": "Quantile Balancing",
    "no-balance": "Quantile Balancing",
    "exact-quantile": "its histogram",
    "all-mla": "the hybrid",
    "1:1": "the 3:1 hybrid",
    "7:1": "the 3:1 hybrid",
    "all-kda": "the hybrid",
    "whole-muon": "per-head Muon",
    "adamw": "Muon",
    "k2-like": "all of them",
    "plain": "everything",
}


def table() -> str:
    rows = []
    for arm in (None, *ARMS):
        model = recipe("nano", [arm] if arm else []).model
        rows.append(
            (
                f"`{arm}`" if arm else "nano itself",
                IDEAS[arm] if arm else "",
                total_params(model),
                round(active_params(model)),
                round(flops_per_token(model, CONTEXT)["forward"]),
            )
        )
    head = ("arm", "instead of", "parameters", "active", "forward operations per token")
    return markdown(rows, head) + "\n"


def test_the_table_is_up_to_date():
    assert DOCS.read_text().partition(MARK)[2] == table(), f"run: python {Path(__file__).name}"


if __name__ == "__main__":
    before = DOCS.read_text().partition(MARK)[0]
    DOCS.write_text(before + MARK + table())
