"""One self-contained HTML page for one run or several: no script, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from k3 import UserError
from k3.report import plots
from k3.report.runs import Row, Run, read_run
from k3.report.tables import number, size


def write_page(folders: Sequence[Path], out: Path, names: Sequence[str] = ()) -> Path:
    """Reads run folders and writes one page with all of them overlaid; returns `out`.

    Runs are called as their folders, or by `names`.
    UserError if a folder is no run, a file in it is corrupt, or two runs cannot be told apart.
    """
    if not folders:
        raise UserError("report: at least one run folder is needed")
    runs = [read_run(Path(folder)) for folder in folders]
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise UserError("report: the same run folder is given twice")
    _distinguish(runs)
    for run, name in zip(runs, names, strict=False):
        run.name = name
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".part")
    partial.write_text(render(runs))
    partial.replace(out)
    return out


def _distinguish(runs: Sequence[Run]) -> None:
    """Runs of one name get their parent folder's name in front."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    title = " · ".join(run.name for run in runs)
    style = Path(__file__).with_name("page.css").read_text()
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_lead(runs[0]))}</p>',
        *(
            f'<p class="note">{escape(run.name)}: {escape(note)}</p>'
            for run in runs
            for note in run.notes
        ),
        *_tiles(runs[0]),
        *_comparison(runs),
        *_side_by_side(runs),
        *_curves(runs),
        *_samples(runs),
        *_settings(runs),
        "<footer>Made by <code>k3 report</code>. OpenK3 is an independent project, "
        "not affiliated with Moonshot AI.</footer></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _lead(run: Run) -> str:
    facts: list[tuple[Any, Callable[[Any], str]]] = [
        (run.last("params"), lambda value: f"{size(value)} parameters"),
        (run.last("active_params"), lambda value: f"{size(value)} active"),
        (run.last("tokens"), lambda value: f"{size(value)} tokens"),
        (run.last("step"), lambda value: f"{number(value)} steps"),
        (run.last("seconds"), lambda value: f"{value / 60:.1f} minutes"),
        (run.last("device"), str),
    ]
    return ", ".join(say(value) for value, say in facts if value is not None)


def _tiles(run: Run) -> Iterator[str]:
    idle, load = run.last("idle_share"), run.last("load_max_over_mean")
    tiles = [
        ("held-out bits per byte", number(run.last("eval_bpb"))),
        ("training loss", number(run.last("loss"))),
        ("idle experts", "-" if idle is None else f"{100 * idle:.1f}%"),
        ("expert load, max/mean", "-" if load is None else number(plots.scalar(load))),
        ("tokens per second", number(run.last("tokens_per_s"))),
        ("memory, MB", number(run.last("memory_mb"))),
    ]
    yield '<div class="tiles">'
    yield from (
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>'
        for name, value in tiles
        if value != "-"
    )
    yield "</div>"


def _comparison(runs: Sequence[Run]) -> Iterator[str]:
    """Bits per byte of every run and of the compressors, best first, each with a bar."""
    ours = [
        (run.name, run.last("eval_bpb"), f"--s{i % len(plots.SERIES) + 1}")
        for i, run in enumerate(runs)
    ]
    others = [(name, bits, "") for name, bits in plots.baselines(runs).items()]
    known = [row for row in [*ours, *others] if row[1] is not None]
    if len(known) < 2:
        return
    worst = max(bits for _, bits, _ in known)
    yield '<h2>Bits per byte of text not trained on</h2><div class="scroll"><table>'
    for name, bits, variable in sorted(known, key=lambda row: row[1]):
        fill = f"background: var({variable})" if variable else ""
        kind = "bar" if variable else "bar other"
        bar = f'<span class="{kind}" style="width: {100 * bits / worst:.0f}%; {fill}"></span>'
        value = f'<td class="n">{bits:.3f}</td>'
        yield f'<tr><th>{escape(name)}</th>{value}<td class="wide">{bar}</td></tr>'
    yield "</table></div>"


def _side_by_side(runs: Sequence[Run]) -> Iterator[str]:
    if len(runs) < 2:
        return
    rows = [
        ("tokens", "tokens"),
        ("parameters", "params"),
        ("active parameters", "active_params"),
        ("training loss", "loss"),
        ("held-out bits per byte", "eval_bpb"),
        ("expert load, max/mean", "load_max_over_mean"),
        ("idle experts", "idle_share"),
        ("largest attention logit", "max_logit"),
        ("tokens per second", "tokens_per_s"),
    ]
    yield '<h2>Side by side</h2><div class="scroll"><table><tr><th></th>'
    yield from (
        f'<th class="n">{_dot(index)}{escape(run.name)}</th>' for index, run in enumerate(runs)
    )
    yield "</tr>"
    for name, key in rows:
        values = [run.last(key) for run in runs]
        if any(value is not None for value in values):
            cells = (None if value is None else plots.scalar(value) for value in values)
            tds = "".join(f'<td class="n">{number(cell)}</td>' for cell in cells)
            yield f"<tr><td>{name}</td>{tds}</tr>"
    yield "</table></div>"


def _dot(index: int) -> str:
    return f'<i class="dot" style="background: var(--s{index % len(plots.SERIES) + 1})"></i>'


def _curves(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>Curves</h2>"
    if not plots.available():
        yield '<p class="note">No curves: they need matplotlib (pip install "openk3[plots]").</p>'
        return
    if len(runs) > 1:
        yield '<p class="key">'
        yield from (
            f"<span>{_dot(index)}{escape(run.name)}</span>" for index, run in enumerate(runs)
        )
        yield "</p>"
    drawn = [(plot, plots.svg(plot, runs)) for plot in plots.PLOTS]
    if not any(picture for _, picture in drawn):
        yield '<p class="note">Nothing to draw yet.</p>'
    yield '<div class="plots">'
    for plot, picture in drawn:
        if picture:
            caption = f"<h3>{plot.title}</h3><figcaption>{plot.caption}</figcaption>"
            yield f"<figure>{caption}{picture}</figure>"
    yield "</div>"


def _samples(runs: Sequence[Run]) -> Iterator[str]:
    if not any(run.samples for run in runs):
        return
    yield "<h2>Samples</h2>"
    for run in runs:
        steps = list(dict.fromkeys(row.get("step") for row in reversed(run.samples)))
        for step in steps:
            opened = " open" if step == steps[0] else ""
            texts = "".join(_sample(row) for row in run.samples if row.get("step") == step)
            title = f"{escape(run.name)}, step {number(step)}"
            yield f"<details{opened}><summary>{title}</summary>{texts}</details>"


def _sample(row: Row) -> str:
    """The prompt in colour, then the continuation, which may or may not repeat the prompt."""
    prompt = str(row.get("prompt", ""))
    text = str(row.get("text", "")).removeprefix(prompt)
    return f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>"


def _settings(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    for run in runs:
        environment = run.config.get("environment") or run.summary.get("environment") or {}
        config = {key: value for key, value in run.config.items() if key != "environment"}
        for name, content in (("environment", environment), ("configuration", config)):
            if content:
                rows = "".join(
                    f"<tr><td><code>{escape(key)}</code></td><td>{escape(value)}</td></tr>"
                    for key, value in flatten(content)
                )
                yield (
                    f"<details><summary>{escape(run.name)}: {name}</summary>"
                    f'<div class="scroll"><table>{rows}</table></div></details>'
                )


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested dicts under dotted names, the way `--set` names them; lists stay whole."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
