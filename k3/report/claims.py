"""Every claim of the Kimi K3 report, what we have measured of it, and what the rest would cost.

A record is `docs/records/NAME/record.json`: name, date, commit, hardware, command, seeds and
`results`, a list of {name, value, unit, target, p10, p90} with target as ">= 1.5" or "<= 2.0". A
result that speaks to a claim has `claim`, its id here; where its target is missed, `verdict` says
"same direction" or "not seen".
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3 import UserError
from k3.report.tables import markdown, number

REPRODUCED, DIRECTION, UNSEEN = "reproduced", "same direction", "not seen"
NOT_YET, OUT_OF_REACH = "not yet", "out of reach"


@dataclass(frozen=True)
class Claim:
    """One claim: what the report says, its figure, and how it can be tried small."""

    id: str
    says: str
    figure: str
    how: str
    price: str = ""
    """Not empty: out of reach here, and this is what it would take."""


CLAIMS = (
    Claim(
        "scaling-efficiency",
        "The whole recipe scales better than K2's",
        "2.5x (2.45-2.50 over 6e19-1e21 FLOPs)",
        "three-size ladder with our own fits can only say above 1 or not",
        price="about 44 H200-hours for the smallest published point, 31 H200-days for the largest",
    ),
    Claim(
        "qb-no-step-size",
        "Quantile Balancing needs no step size: the bias is the quantile",
        "(2,2,2,2) in the worked example",
        "the example of the report; skewed scores, n=896 k=16, one update beside sign-rule steps",
    ),
    Claim(
        "qb-no-collapse",
        "Quantile Balancing keeps every expert alive in training",
        "no collapse at 896 experts",
        "256 experts, top 6, 120 steps, beside the best sign-rule step",
    ),
    Claim(
        "qb-histograms-add",
        "Histograms of the balancing add across ranks",
        "one all-reduce a step",
        "1, 2 and 8 shards give equal integers; error within one bin",
    ),
    Claim(
        "muon-heads-balanced",
        "Per-head Muon moves every head alike",
        "equal update per head",
        "eight heads with gradients of very different scale, per-head beside whole-matrix",
    ),
    Claim(
        "muon-head-stability",
        "Per-head Muon is more stable at scale",
        "no number given",
        "we only track largest logit and norms",
        price="a run at the scale where whole-matrix Muon becomes unstable: not published",
    ),
    Claim(
        "muon-beats-adamw",
        "Muon needs about half the tokens of AdamW",
        "52% of the tokens",
        "20-60M model on one H200, both tuned",
    ),
    Claim(
        "qk-clip-bounds",
        "QK-clip bounds attention logits",
        "largest logit at most tau",
        "a head with inflated weights",
    ),
    Claim(
        "decay-floor-tiles",
        "A decay bounded at -5 lets BF16 use dense tiles",
        "e^80 below the BF16 maximum",
        "16-token tile at the worst gate beside the recurrence",
    ),
    Claim(
        "hybrid-3-to-1",
        "Three KDA layers to one MLA layer is the best mix",
        "perplexity 5.65 (3:1), 5.66 (1:1), 5.70 (7:1), 5.77 (0:1)",
        "8-16 layers, three seeds: the order only",
    ),
    Claim(
        "kda-synthetic",
        "KDA is strong at recall, stack and palindrome",
        "ahead of Gated DeltaNet and Mamba-2",
        "two layers, two heads, width 128",
    ),
    Claim(
        "hybrid-vs-mla",
        "The hybrid scales better than all-MLA",
        "1.16x",
        "re-derived from the published fits (1.161 at C=4), not re-measured",
        price="a scaling ladder like that of the first row",
    ),
    Claim(
        "decode-at-1m",
        "Faster decoding at a million tokens",
        "6.3x with batch growth, 2.2x at batch 1",
        "tiny hybrid beside full attention: bytes and time per token over length",
    ),
    Claim(
        "constant-state",
        "The state of KDA does not grow with the context",
        "54 MB per rank beside 27 GB of cache",
        "arithmetic on the released shape",
    ),
    Claim(
        "attnres-gain",
        "Attention Residuals save compute; about 8 blocks keep most of it",
        "1.25x, -0.02 to -0.03 nats",
        "16 layers: plain, full and block, three seeds",
    ),
    Claim(
        "attnres-norms",
        "Attention Residuals stop norms from growing with depth",
        "periodic instead of growing",
        "norm of every block's output, beside plain residuals",
    ),
    Claim(
        "attnres-two-phase",
        "Two-phase computation of Attention Residuals is exact",
        "equal",
        "two-phase beside direct, difference below 1e-5",
    ),
    Claim(
        "situ-bound",
        "SiTU-GLU is bounded by 100 and is SwiGLU near zero",
        "at most 100",
        "a sweep of inputs, and the slope at zero",
    ),
    Claim(
        "latent-moe",
        "Latent experts beat full-width ones at equal cost",
        "MMLU-Pro +4.6 to +5.7",
        "a small pair at alpha 4: loss only",
    ),
    Claim(
        "nope-length",
        "Attention without positions extends from 8k to 1M without retuning",
        "no change of parameters",
        "1k to 4k to 16k: loss by position stays flat",
    ),
    Claim(
        "scattered-clues",
        "Data with scattered clues prevents local collapse",
        "no number given",
        "a generator with a window oracle: the oracle at chance, the model above",
    ),
    Claim(
        "vit-from-scratch",
        "A vision tower trained from scratch is smoother than a SigLIP start",
        "figure only",
        "gradient-norm spikes of a toy could be compared",
        price="the pretrained tower is not available to us; both arms at scale are not priced",
    ),
    Claim(
        "partial-rollouts",
        "Partial rollouts with the regulariser tolerate staleness",
        "stable",
        "tiny model, delays 0, 4 and 16: bounded log-ratio",
    ),
    Claim(
        "three-efforts",
        "One budget rule gives three efforts",
        "low, high, max",
        "a policy with a length knob: lengths ordered and within their budgets",
    ),
    Claim(
        "nine-teachers",
        "Nine teachers distil into one model",
        "one model, nine domains",
        "three tabular teachers: KL below 0.01; adapters on a small model",
    ),
    Claim(
        "harness-variety",
        "Variety of harnesses stops over-fitting to one",
        "no number given",
        "train on three, hold one out, beside a single-harness control",
    ),
    Claim(
        "kernel-reward",
        "The kernel reward is 0, 0.5 or towards 1, and cheats are caught",
        "0 / 0.5 / above 0.5",
        "a grader with planted cheats: all caught",
    ),
    Claim(
        "no-pay-for-done",
        "Agents are not paid for saying that they are done",
        "0",
        "a hidden verifier",
    ),
    Claim(
        "moonep-balance",
        "MoonEP balances perfectly within its bound",
        "bound 112 / 56 / 14 at 8 / 16 / 64 ranks",
        "the planner against an adversary",
    ),
    Claim(
        "moonep-speed",
        "MoonEP is faster than DeepEP",
        "no table given",
        "step time on 2 and 4 H200 over imbalance",
    ),
    Claim(
        "kda-context-parallel",
        "Context parallelism of KDA is exact",
        "bytes independent of length",
        "split beside whole in fp64: below 1e-9",
    ),
    Claim(
        "qat-mismatch",
        "Quantisation-aware training removes the mismatch of training and rollout",
        "no mismatch",
        "one shared quantiser beside two: log-prob difference 0",
    ),
    Claim(
        "sandbox-latency",
        "A sandbox starts in 133 ms, resumes in 49 ms and costs nothing paused",
        "133 ms / 49 ms",
        "semantics with a process sandbox: no process and no memory while paused; our own timings",
    ),
    Claim(
        "sandbox-scale",
        "Sandboxes at scale",
        "51M sandboxes, 1.5M images",
        "cited",
        price="a cluster; not priced",
    ),
    Claim(
        "prefix-blocks",
        "Prefix blocks of 512 tokens over a hybrid cache",
        "2560 of 2800 tokens hit",
        "a simulator with an oracle",
    ),
    Claim(
        "replay-drafts",
        "Replaying drafts is cheaper than keeping state snapshots",
        "bytes per draft far below a state",
        "every accepted length: below 1e-6",
    ),
    Claim(
        "cluster-routing",
        "A primary and a secondary cluster per session",
        "about 1/C of sessions move",
        "a consistent-hash simulator",
    ),
    Claim(
        "benchmarks",
        "Benchmarks of table 2 and cost per task",
        "see the report",
        "cited",
        price="the 2.8T model served on at least one node with 1.56 TB for the weights alone",
    ),
)

_SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Finding:
    """One result of a record that speaks to a claim."""

    record: str
    result: dict[str, Any]
    hardware: str
    command: str

    @property
    def met(self) -> bool:
        return meets(self.result["value"], self.result.get("target"))

    @property
    def verdict(self) -> str:
        return REPRODUCED if self.met else self.result.get("verdict", UNSEEN)

    @property
    def text(self) -> str:
        result = self.result
        unit = result.get("unit") or ""
        text = f"{result['name']}: {number(result['value'])}{unit and ' ' + unit}"
        if result.get("p10") is not None and result["p10"] != result.get("p90"):
            text += f" ({number(result['p10'])} to {number(result['p90'])})"
        return text


def meets(value: float, target: str | None) -> bool:
    """Whether a value meets ">= 1.5"; no target is met. UserError on a target of another form."""
    if not target:
        return True
    match = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(\S+)\s*", target)
    if not match:
        raise UserError(f"record: target must look like '>= 1.5', got {target!r}")
    return _SIGNS[match[1]](value, float(match[2]))


def read_findings(records: Path) -> dict[str, list[Finding]]:
    """The results under `records` that have a claim, by its id. UserError names file and field."""
    findings: dict[str, list[Finding]] = {}
    known = {claim.id for claim in CLAIMS}
    for path in sorted(records.glob("*/record.json")):
        record = _read_record(path)
        for result in record["results"]:
            claim = result.get("claim")
            if claim is None:
                continue
            if claim not in known:
                raise UserError(f"{path}: result {result['name']!r} names unknown claim {claim!r}")
            findings.setdefault(claim, []).append(
                Finding(path.parent.name, result, record["hardware"], record["command"])
            )
    return findings


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    for key in ("name", "date", "commit", "hardware", "command", "seeds", "results"):
        if key not in record:
            raise UserError(f"{path}: {key} is missing")
    for result in record["results"]:
        if not isinstance(result.get("value"), int | float) or "name" not in result:
            raise UserError(f"{path}: a result needs a name and a number as value, got {result}")
        if result.get("verdict", UNSEEN) not in (DIRECTION, UNSEEN):
            raise UserError(
                f"{path}: verdict is {DIRECTION!r} or {UNSEEN!r}, got {result['verdict']!r}"
            )
        meets(result["value"], result.get("target"))
    return record


def status(claim: Claim, findings: Sequence[Finding]) -> str:
    """The weakest verdict of its findings; without any, "not yet" or "out of reach"."""
    if not findings:
        return OUT_OF_REACH if claim.price else NOT_YET
    order = [UNSEEN, DIRECTION, REPRODUCED]
    return min((finding.verdict for finding in findings), key=order.index)


def render(records: Path) -> str:
    """docs/claims.md: a row for every claim."""
    findings = read_findings(records)
    rows, counts = [], dict.fromkeys((REPRODUCED, DIRECTION, UNSEEN, NOT_YET, OUT_OF_REACH), 0)
    for claim in CLAIMS:
        found = findings.get(claim.id, [])
        now = status(claim, found)
        counts[now] += 1
        rows.append((claim.says, claim.figure, *_ours(claim, found), now))
    head = ("claim of the report", "its figure", "ours", "hardware", "command", "record", "status")
    tally = ", ".join(f"{count} {name}" for name, count in counts.items())
    return (
        "# Claims\n\n"
        "Written by `k3 claims` from `docs/records/`. Claims and figures are those of the Kimi K3 "
        'technical report; everything under "ours" was measured here, at small scale.\n\n'
        f"{len(CLAIMS)} claims: {tally}.\n\n{markdown(rows, head)}\n"
    )


MARKS = ("<!-- claims -->\n", "<!-- end of claims -->\n")
"""Between these stands the excerpt, in a README that has them."""


def excerpt(records: Path) -> str:
    """The claims that have been measured, as a table of four columns, or a line that says so."""
    findings = read_findings(records)
    rows = [
        (claim.says, claim.figure, _ours(claim, found)[0], status(claim, found))
        for claim in CLAIMS
        if (found := findings.get(claim.id))
    ]
    if not rows:
        return f"None of the report's {len(CLAIMS)} claims has been measured yet.\n"
    rest = f"\n{len(rows)} of the report's {len(CLAIMS)} claims so far; all of them are in "
    head = ("claim of the report", "its figure", "ours, at small scale", "status")
    return f"{markdown(rows, head)}\n{rest}[docs/claims.md](docs/claims.md).\n"


def with_excerpt(text: str, records: Path) -> str:
    """`text` with what stands between `MARKS` replaced by the excerpt; unchanged without them."""
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    return f"{before}{start}{excerpt(records)}{end}{after}" if start and end else text


def _ours(claim: Claim, found: Sequence[Finding]) -> tuple[str, str, str, str]:
    """The columns ours, hardware, command and record."""
    if not found:
        plan = f"would take: {claim.price}" if claim.price else f"plan: {claim.how}"
        return plan, "-", "-", "-"
    return (
        "; ".join(finding.text for finding in found),
        ", ".join(dict.fromkeys(finding.hardware for finding in found)),
        ", ".join(dict.fromkeys(f"`{finding.command}`" for finding in found)),
        ", ".join(dict.fromkeys(f"[{f.record}](records/{f.record}/)" for f in found)),
    )
