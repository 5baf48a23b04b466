"""The command line: every command says what it will do, and ends with where its results are.

Nothing heavy is imported here; each command loads what it needs. A user's mistake, a full disk and
too little memory end in one line on stderr and exit code 2.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from k3 import UserError, __version__

if TYPE_CHECKING:
    from k3.model.config import K3Config


def examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n".join(f"- `{line}`" for line in lines)


app = typer.Typer(
    name="k3",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and run models built like Kimi K3, and measure what each of its ideas is worth.",
    epilog="Start with `k3 demo`. `k3 COMMAND --help` has examples.",
)
inspect = typer.Typer(no_args_is_help=True, help="Look at shapes, layouts and logits.")
app.add_typer(inspect, name="inspect")

Model = Annotated[
    str,
    typer.Argument(help="A preset (nano, kimi-k3, ...), a config.json, or a checkpoint folder."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=1", help="Override a field of the configuration; repeatable."
    ),
]


def is_first_rank() -> bool:
    """False in all but one of the processes that torchrun starts."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str = "") -> None:
    if is_first_rank():
        print(text, flush=True)


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        say(f"k3 {__version__}")
        raise typer.Exit()


@app.command(epilog=examples("k3 demo", "k3 demo --minutes 3 --out runs/quick"))
def demo(
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(min=0.5, help="Time for the training.")] = 5.0,
    steps: Annotated[
        int | None,
        typer.Option(min=4, help="A fixed number of steps instead: the same every time."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over where OUT exists.")] = False,
) -> None:
    """Pretrain nano on this machine's Python source, resume it, sample from it, and report.

    Trains a tokenizer, then the smallest K3 and an ordinary transformer of equal active parameters
    on the same tokens; interrupts and resumes the first once on purpose; compares both with gzip
    and xz in bits per byte of held-out files.
    """
    from k3.recipes.demo import demo as run

    run(out, minutes=minutes, steps=steps, fresh=fresh, say=say)


@app.command(
    epilog=examples(
        "k3 train nano --data ~/code",
        "k3 train nano --arm sign-rule --steps 200 --out runs/sign",
        "k3 train nano --set optim.lr=3e-3 --set model.moe.top_k=2 --resume",
        "torchrun --nproc-per-node 4 -m k3 train mini",
    )
)
def train(
    recipe: Annotated[str, typer.Argument(help="A named run: nano, micro, mini, mini-r1, small.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Folder, text file, .jsonl, .parquet or PATH=WEIGHT; repeatable."),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Change one idea of the recipe; repeatable.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder, by default runs/RECIPE[-ARM].")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Insist on going on from a saved step.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the run that OUT holds, start over.")
    ] = False,
) -> None:
    """Pretrain a recipe on the default corpus or on your own text.

    Goes on where OUT holds a saved step of the same run. Ctrl-C saves first.
    """
    from k3.data.loader import SourceConfig
    from k3.recipes.overrides import override
    from k3.recipes.pretrain import recipe as named
    from k3.train.curriculum import tokens_until
    from k3.train.pretrain import pretrain

    if resume and fresh:
        raise UserError("train: --resume and --fresh exclude each other")
    run = named(recipe, arm or ())
    if data:
        sources = tuple(SourceConfig.parse(source) for source in data)
        run = replace(run, data=replace(run.data, sources=sources))
    run = override(replace(run, steps=steps or run.steps), settings or ())
    out = out or Path("runs") / run.name
    if fresh and is_first_rank():
        _clear(out)
    text = ", ".join(source.label for source in run.data.sources)
    size = f"{run.steps} steps, {tokens_until(run, run.steps):,} tokens"
    say(f"train: {run.name} on {text}: {size}, into {out}")
    pretrain(run, out, resume="must" if resume else "auto")
    say(f"results: {out}/report.html, {out}/summary.json, {out}/hf")
    say(f"next: k3 generate {out}/hf --prompt TEXT, or k3 report {out} OTHER_RUN")


@app.command(
    epilog=examples(
        'k3 generate runs/demo/hf --prompt "def main("',
        'k3 generate runs/demo/hf --prompt "class " --temperature 0.7 --top-p 0.9 --seed 1',
    )
)
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder in the released layout.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tokens.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Same as --temperature 0.")] = False,
    stream: Annotated[bool, typer.Option(help="Print tokens as they come.")] = True,
) -> None:
    """Continue a text, token by token on cached state."""
    from k3.checkpoint.released import load_released
    from k3.model.generate import generate as continue_
    from k3.text.tokenizer import Tokenizer

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UserError("generate: the prompt is empty")
    model = load_released(checkpoint, device=_device())
    tokenizer = Tokenizer.load(checkpoint, model.config.vocab_size)
    pieces, began = tokenizer.stream(), time.perf_counter()

    def show(_: int, token: int) -> None:
        if stream:
            print(pieces.push(token), end="", flush=True)

    print(text, end="", flush=True)
    (ids,) = continue_(
        model,
        [tokenizer.encode(text)],
        max_new_tokens=max_new_tokens,
        temperature=0.0 if greedy else temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        on_token=show,
    )
    print(pieces.flush() if stream else tokenizer.decode(ids))
    seconds = time.perf_counter() - began
    print(f"{len(ids)} tokens, {len(ids) / seconds:.1f} per second", file=sys.stderr)


@inspect.command(
    epilog=examples("k3 inspect config nano", "k3 inspect config nano --set moe.top_k=2")
)
def config(model: Model, settings: Settings = None) -> None:
    """Print a model's configuration as its released config.json."""
    say(json.dumps(_config(model, settings).to_hf(), indent=2))


@inspect.command(epilog=examples("k3 inspect params kimi-k3", "k3 inspect params runs/demo/hf"))
def params(
    model: Model,
    settings: Settings = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
) -> None:
    """Count parameters by part, all of them and those of one token, and operations per token."""
    from k3.checkpoint.params import flops_rows, param_rows
    from k3.report.tables import render_rows

    shape = _config(model, settings)
    say(render_rows(param_rows(shape)))
    say(
        f"\nactive: what a token multiplies, the head but not the embedding\n\nat {context} tokens:"
    )
    say(render_rows(flops_rows(shape, context)))


@inspect.command(
    epilog=examples("k3 inspect layout kimi-k3", "k3 inspect layout runs/demo/hf --experts mxfp4")
)
def layout(
    model: Model,
    settings: Settings = None,
    experts: Annotated[
        str | None,
        typer.Option(help="bf16 or mxfp4; by default as the model is released."),
    ] = None,
) -> None:
    """List the tensors of a model's checkpoint by name pattern: count, shape, dtype, bytes."""
    from k3.checkpoint.layout import layout_rows
    from k3.report.tables import render_rows

    if experts is None:
        experts = "mxfp4" if _released_packed(model) else "bf16"
    say(render_rows(layout_rows(_config(model, settings), experts)))
    say("\n~ is language_model.model.layers.{L}.; {E} an expert, {B} a vision block")


@inspect.command(
    epilog=examples("k3 inspect logits runs/demo/hf --ids 1,2,3 --out logits.safetensors")
)
def logits(
    checkpoint: Annotated[Path, typer.Argument(help="A folder in the released layout.")],
    ids: Annotated[str, typer.Option(help="Token ids, separated by commas.")],
    out: Annotated[Path, typer.Option(help="A safetensors file.")],
) -> None:
    """Write the logits of every position: key `logits`, fp32 [T, V]."""
    from k3.checkpoint.logits import inspect_logits

    try:
        numbers = [int(part) for part in ids.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"logits: --ids takes whole numbers and commas, got {ids!r}") from None
    for name, value in inspect_logits(checkpoint, numbers, out, device=_device()).items():
        say(f"{name}: {value}")


@app.command(
    epilog=examples("k3 report runs/demo", "k3 report runs/nano runs/sign --out compare.html")
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are overlaid.")],
    out: Annotated[Path | None, typer.Option(help="By default report.html in the first.")] = None,
) -> None:
    """Write one self-contained HTML page with the curves and samples of runs."""
    from k3.report.page import write_page

    say(f"report: {write_page(runs, out or runs[0] / 'report.html')}")


@app.command(epilog=examples("k3 claims", "k3 claims --docs docs"))
def claims(
    docs: Annotated[Path, typer.Option(help="Folder with records/; gets claims.md.")] = Path(
        "docs"
    ),
) -> None:
    """Write claims.md: every claim of the report, and what the records say of it."""
    from k3.report.claims import render, with_excerpt

    if not docs.is_dir():
        raise UserError(f"claims: no folder {docs} (run it in a checkout, or give --docs)")
    (docs / "claims.md").write_text(render(docs / "records"))
    say(f"claims: {docs / 'claims.md'}")
    readme = docs.parent / "README.md"
    if readme.exists():
        readme.write_text(with_excerpt(readme.read_text(), docs / "records"))
        say(f"excerpt: {readme}")


@app.command()
def doctor() -> None:
    """Show what this machine has, and which way each operation takes on it and why."""
    from k3.recipes.doctor import machine, paths

    for title, rows in (("machine", machine(Path.cwd())), ("operations", paths())):
        say(f"{title}:")
        for name, finding in rows:
            say(f"  {name:14} {finding}")


RUN_FILES = (
    *("run.json", "metrics.jsonl", "samples.jsonl", "summary.json", "report.html"),
    *("steps", "hf", "tensorboard"),
)


def _clear(out: Path) -> None:
    """Deletes a run's own files. UserError where `out` is something else."""
    if out.exists() and not (out / "run.json").exists() and any(out.iterdir()):
        raise UserError(f"{out}: not a run folder (no run.json), so --fresh leaves it alone")
    for name in RUN_FILES:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _config(model: str, settings: Sequence[str] | None = None) -> K3Config:
    """A preset by name, or the configuration in a file or checkpoint folder."""
    from k3.model.config import K3Config
    from k3.model.presets import PRESETS, preset
    from k3.recipes.overrides import override

    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if model in PRESETS:
        shape = preset(model)
    elif path.is_file():
        from k3.report.runs import read_json

        shape = K3Config.from_hf(read_json(path))
    else:
        known = ", ".join(PRESETS)
        raise UserError(f"{model}: no such preset, config.json or checkpoint; presets: {known}")
    return override(shape, settings or ())


def _released_packed(model: str) -> bool:
    """Whether the routed experts of a preset or configuration are released in MXFP4."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        return model == "kimi-k3"
    from k3.report.runs import read_json

    content = read_json(path)
    return "quantization_config" in content.get("text_config", {}) | content


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 2 a mistake or a full machine, 130 interrupted."""
    try:
        code = app(args=arguments, prog_name="k3", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        # A group without a command has shown its help, and has nothing to add.
        sys.exit(2) if not line else _fail(f"error: {line}", 2)
    if code == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str, code: int) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(code)


INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EDQUOT)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


def explain(error: BaseException) -> str | None:
    """One line for what a user can put right; None for a fault of ours."""
    # typer brings its own click or uses the installed one: both have these two.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context, message = getattr(error, "ctx", None), " ".join(error.format_message().split())
        return f"{message} (see {context.command_path} --help)" if context and message else message
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in FULL:
        return f"no space left on the disk{_where(error)}; what was complete before is kept"
    if isinstance(error, OSError) and error.errno in DENIED:
        return f"{(error.strerror or str(error)).lower()}{_where(error)}"
    if _out_of_memory(error):
        return "out of memory; use fewer tokens_per_micro_batch or a smaller model (--set)"
    return None


def _where(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""


def _out_of_memory(error: BaseException) -> bool:
    """Python's own, CUDA's (torch.OutOfMemoryError), and that of torch's CPU allocator."""
    names = {kind.__name__ for kind in type(error).__mro__}
    cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return cpu or bool(names & {"MemoryError", "OutOfMemoryError"})
