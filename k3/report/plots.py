"""Curves of one or several runs as SVG for a page whose CSS variables give the colours."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib wants colours: these stand for the page's variables, and are replaced in its SVG.
INK, FAINT = "#010203", "#010204"
SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")
VARIABLES = {INK: "--ink", FAINT: "--faint"} | {
    colour: f"--s{number}" for number, colour in enumerate(SERIES, start=1)
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "k3",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
}
POINTS = 600
"""A curve keeps at most this many points: more cannot be seen and only make the page heavy."""


@dataclass(frozen=True)
class Plot:
    """One figure of the page: a title, how to read it, and what draws it on the axes."""

    title: str
    caption: str
    draw: Callable[[Axes, Sequence[Run]], bool]


def available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def svg(plot: Plot, runs: Sequence[Run]) -> str | None:
    """The figure as an `<svg>` that fills its container, or None where no run has the data."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.3, 2.7), layout="constrained")
        axes = figure.add_subplot()
        if not plot.draw(axes, runs):
            return None
        return _inline(_text(figure), re.sub(r"\W+", "-", plot.title.lower()))


def _text(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _inline(text: str, prefix: str) -> str:
    """Makes an SVG file an element of a page: ids of its own, the page's colours and width."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', text, count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def thin(xs: Sequence[float], ys: Sequence[Any], points: int = POINTS) -> tuple[list, list]:
    """Every n-th point, and the last, so that at most about `points` remain."""
    stride = max(1, len(xs) // points)
    places = list(range(0, len(xs), stride))
    if places and places[-1] != len(xs) - 1:
        places.append(len(xs) - 1)
    return [xs[i] for i in places], [ys[i] for i in places]


def smooth(ys: Sequence[float], window: int) -> list[float]:
    """Mean over `window` neighbours on either side, fewer at the ends, so that nothing lags."""
    sums = [0.0, *itertools.accumulate(ys)]
    out = []
    for i in range(len(ys)):
        reach = min(window, i, len(ys) - 1 - i)
        out.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return out


def scalar(value: Any) -> float:
    """A step's value as one number; of a list (a layer or head each) its maximum."""
    if isinstance(value, list):
        return max((scalar(item) for item in value), default=float("nan"))
    return float(value)


def curve(
    key: str, *, log: bool = False, smoothed: bool = False, percent: bool = False
) -> Callable:
    """A drawer of one recorded quantity against tokens, a line per run."""

    def draw(axes: Axes, runs: Sequence[Run]) -> bool:
        drawn = False
        for index, run in enumerate(runs):
            xs, raw = run.series(key)
            ys = [scalar(value) * (100 if percent else 1) for value in raw]
            if not xs:
                continue
            drawn = True
            if smoothed and len(ys) > 20:
                axes.plot(*thin(xs, ys), color=colour(index), alpha=0.25, linewidth=0.7)
                ys = smooth(ys, len(ys) // 60)
            axes.plot(*thin(xs, ys), color=colour(index))
        if drawn:
            _finish(axes, log)
            if percent:
                axes.set_ylim(bottom=0, top=max(1, axes.get_ylim()[1]))
        return drawn

    return draw


def draw_loss(axes: Axes, runs: Sequence[Run]) -> bool:
    drawn = curve("loss", smoothed=True)(axes, runs)
    if drawn:
        for tokens, context in stage_switches(runs[0]):
            axes.axvline(tokens, color=INK, linestyle=":", linewidth=0.8, alpha=0.7)
            axes.text(
                tokens,
                0.99,
                f" {context}",
                transform=axes.get_xaxis_transform(),
                va="top",
                fontsize=7,
            )
    return drawn


def stage_switches(run: Run) -> list[tuple[float, int]]:
    """Where the context length changes: tokens seen, and the new length."""
    xs, contexts = run.series("context")
    pairs = zip(xs, contexts, [None, *contexts], strict=False)
    return [(x, context) for x, context, before in pairs if before not in (None, context)]


def draw_held_out(axes: Axes, runs: Sequence[Run]) -> bool:
    drawn = False
    for index, run in enumerate(runs):
        same, others = comparable(run)
        style: Any = {"color": colour(index), "markersize": 3}
        for points, kind in ((same, "o-"), (others, "D")):
            if points:
                drawn = True
                axes.plot(*zip(*points, strict=True), kind, **style)
    if drawn:
        _baseline_lines(axes, baselines(runs))
        _finish(axes)
    return drawn


Points = list[tuple[float, float]]


def comparable(run: Run) -> tuple[Points, Points]:
    """Evaluations (tokens, bits per byte) of about as much text as the first one, and the others.

    A short look on the way and all of the held-out text at the end are different texts: a line
    through both would show a jump that no training made.
    """
    sizes = [row.get("eval_bytes") for row in run.evals if row.get("eval_bpb") is not None]
    points = list(zip(*run.eval_series("eval_bpb"), strict=True))
    same: Points = []
    others: Points = []
    for point, size in zip(points, sizes, strict=False):
        alike = size is None or sizes[0] is None or 0.8 < size / max(1, sizes[0]) < 1.25
        (same if alike else others).append(point)
    return same, others


def _baseline_lines(axes: Axes, known: dict[str, float]) -> None:
    """A dashed line each; where two lines nearly touch, the upper label goes to the left."""
    bottom, top = axes.get_ylim()
    span, before, left = max(top, *known.values(), bottom) - bottom, float("-inf"), False
    for name, bits in sorted(known.items(), key=lambda item: item[1]):
        left = not left and bits - before < 0.07 * span
        axes.axhline(bits, color=INK, linestyle="--", linewidth=0.8, alpha=0.6)
        axes.text(
            0.01 if left else 0.99,
            bits,
            name,
            transform=axes.get_yaxis_transform(),
            ha="left" if left else "right",
            va="bottom",
            fontsize=7,
        )
        before = bits


def baselines(runs: Sequence[Run]) -> dict[str, float]:
    """Bits per byte of gzip and the like on the held-out text, from the first run that has them."""
    return next((run.summary["baselines"] for run in runs if run.summary.get("baselines")), {})


def draw_norm_map(axes: Axes, runs: Sequence[Run]) -> bool:
    """One run: depth against tokens as a heat map. Several: depth profiles at the end of each."""
    profiles = [run.series("output_norm") for run in runs]
    if not any(rows for _, rows in profiles):
        return False
    if len(runs) > 1:
        return _norm_profiles(axes, runs)
    xs, rows = thin(*profiles[0], points=120)
    depth = len(rows[-1])
    grid = [[row[layer] for row in rows if len(row) == depth] for layer in range(depth)]
    image = axes.imshow(
        grid,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        extent=(xs[0], max(xs[-1], xs[0] + 1), -0.5, depth - 0.5),
    )
    axes.figure.colorbar(image, ax=axes, label="RMS")
    axes.set_ylabel("layer output")
    axes.grid(False)
    _tokens_axis(axes)
    return True


def _norm_profiles(axes: Axes, runs: Sequence[Run]) -> bool:
    for index, run in enumerate(runs):
        rows = run.series("output_norm")[1]
        if rows:
            axes.plot(rows[-1], color=colour(index), marker="o", markersize=2.5)
    axes.set_xlabel("layer output")
    axes.set_ylabel("RMS at the last step")
    return True


def _finish(axes: Axes, log: bool = False) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    _tokens_axis(axes)


def _tokens_axis(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("tokens")


PLOTS = (
    Plot(
        "Held-out bits per byte",
        "Lower is better. Line: the same part each time. Diamond: all of the held-out text, which "
        "the dashed compressors had too.",
        draw_held_out,
    ),
    Plot(
        "Training loss",
        "Nats per token, smoothed over the raw curve; dotted lines mark a longer context.",
        draw_loss,
    ),
    Plot(
        "Expert load, max over mean",
        "1 is perfect balance; the busiest expert of the worst layer.",
        curve("load_max_over_mean"),
    ),
    Plot(
        "Idle experts, %",
        "Share of experts that no token of the step went to.",
        curve("idle_share", percent=True),
    ),
    Plot(
        "Largest attention logit",
        "The greatest scaled score of any MLA head; QK-clip acts above its threshold.",
        curve("max_logit"),
    ),
    Plot(
        "Output norm by depth",
        "RMS of what each layer hands on: growth with depth is what Attention Residuals prevent.",
        draw_norm_map,
    ),
    Plot("Learning rate", "Warm-up, then the schedule of the run.", curve("lr")),
    Plot(
        "Gradient norm",
        "Before clipping, over all parameters.",
        curve("grad_norm", log=True, smoothed=True),
    ),
    Plot(
        "Tokens per second",
        "Training throughput of the whole step.",
        curve("tokens_per_s", smoothed=True),
    ),
    Plot(
        "Memory, MB",
        "Peak of the process (CPU) or of the device (CUDA).",
        curve("memory_mb"),
    ),
)
