"""The table of arms in docs/train.md says what the code says."""

from pathlib import Path

from k3.checkpoint.params import active_params, flops_per_token, total_params
from k3.recipes.pretrain import ARMS, recipe

PAGE = Path(__file__).parent.parent.parent / "docs" / "train.md"
CONTEXT = 1024


def table() -> list[str]:
    """A row per arm of nano: parameters, active ones, training FLOPs per token, over nano's."""
    lines = [
        "| arm | parameters | active | training MFLOP/token | over nano |",
        "|---|--:|--:|--:|--:|",
    ]
    ours = flops_per_token(recipe("nano").model, CONTEXT)["training"]
    for arm in ("nano", *ARMS):
        model = recipe("nano", [] if arm == "nano" else [arm]).model
        flops = flops_per_token(model, CONTEXT)["training"]
        counts = f"{total_params(model):,} | {round(active_params(model)):,}"
        lines.append(f"| {arm} | {counts} | {flops / 1e6:.2f} | {flops / ours:.3f} |")
    return lines


def test_the_page_holds_the_table():
    expected = "\n".join(table())
    assert expected in PAGE.read_text(), f"docs/train.md needs this table:\n{expected}"
