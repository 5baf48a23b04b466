"""KDA on this CPU: our chunks beside a competent token loop and transformers' torch chunks.

    python bench/kda.py [--tokens 2048] [--repeats 7] [--threads 1] [--cpu-time]

Forward and backward in fp32 at T=2048, H=8, D=128, all arms in one process, one after the other in
every round. Nothing is timed unless every arm agrees with the fp64 recurrence first. Prints medians
with the 10th and 90th percentile, the ratios, the time over the operations at the measured sgemm
rate, and causal attention at the same shape. Writes docs/records/kda-cpu. The transformers arm runs
where that package can be imported. On a machine shared with other work, `--threads 1 --cpu-time`
counts this process's processor seconds instead of the wall clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import record
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from checker import assert_close

from k3.ops.kda import kda
from k3.ops.kda_ref import decay, kda_ref, l2norm
from k3.ops.spans import Spans

Arm = Callable[[list[Tensor]], Tensor]
HEADS, WIDTH = 8, 128


def ours(inputs: list[Tensor]) -> Tensor:
    return kda(*inputs, Spans.from_lengths([len(inputs[0])]))[0]


def loop(inputs: list[Tensor]) -> Tensor:
    """The recurrence as one would write it with care: heads in one batch, two fused calls a
    token.
    """
    q, k, v, z, b, A_log, dt_bias = inputs
    q, k = l2norm(q) * WIDTH**-0.5, l2norm(k)
    alpha, beta = decay(z, A_log, dt_bias, -5.0).exp(), b.sigmoid()
    S = q.new_zeros(HEADS, WIDTH, WIDTH)
    outs = []
    rows = zip(*(x.unbind() for x in (q, k, v, alpha, beta)), strict=True)
    for q_HK, k_HK, v_HV, alpha_HK, beta_H in rows:
        S = S * alpha_HK[:, :, None]
        error = torch.baddbmm(v_HV[:, None], k_HK[:, None], S, alpha=-1)
        S = torch.baddbmm(S, (beta_H[:, None] * k_HK)[:, :, None], error)
        outs.append(torch.bmm(q_HK[:, None], S))
    return torch.stack(outs).squeeze(2)


def transformers_arm() -> Arm | None:
    """transformers' torch fallback for Kimi Linear, with K3's bounded decay computed before it."""
    try:
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs
    except ImportError:
        return None
    chunk = theirs.chunk_kimi_delta_attention

    def arm(inputs: list[Tensor]) -> Tensor:
        q, k, v, z, b, A_log, dt_bias = inputs
        g = decay(z, A_log, dt_bias, -5.0)
        batched = [x[None] for x in (q, k, v, g, b.sigmoid())]
        out = chunk(*batched, use_qk_l2norm_in_kernel=True)
        return (out[0] if isinstance(out, tuple) else out)[0]

    return arm


def draw(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    flat = [torch.randn(tokens, HEADS, WIDTH) for _ in range(4)]
    flat += [torch.randn(tokens, HEADS), torch.zeros(HEADS), torch.randn(HEADS, WIDTH)]
    return [x.requires_grad_() for x in flat]


def gate(arms: dict[str, Arm]) -> None:
    """Every arm, outputs and gradients, against the fp64 recurrence at a length that is no
    multiple.
    """
    inputs = draw(77)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, _ = kda_ref(*exact, Spans.from_lengths([77]))
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    for name, arm in arms.items():
        out = arm(inputs)
        assert_close(f"{name} o", out, expected, 2e-5)
        grads = torch.autograd.grad((out * weight.float()).sum(), inputs)
        for i, (actual, grad) in enumerate(zip(grads, wanted, strict=True)):
            assert_close(f"{name} gradient {i}", actual, grad, 1e-4)


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def sgemm_rate(clock: Callable[[], float]) -> float:
    """FLOP/s of a 1024-cubed fp32 product."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / min(seconds(lambda: a @ a, clock) for _ in range(8))


def operations(tokens: int) -> float:
    """Of the chunked form, forward and backward: products with the state, and inside 32-row
    chunks.
    """
    forward = 6 * WIDTH**2 + 10 * 32 * WIDTH
    backward = 12 * WIDTH**2 + 16 * 32 * WIDTH
    return tokens * HEADS * (forward + backward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    arms: dict[str, Arm] = {"ours": ours, "loop": loop}
    if (other := transformers_arm()) is not None:
        arms["transformers"] = other
    gate(arms)
    inputs, weight = draw(args.tokens), torch.randn(args.tokens, HEADS, WIDTH)
    heads_first = [x.detach().transpose(0, 1)[None].requires_grad_() for x in inputs[:3]]

    def step(arm: Arm) -> None:
        torch.autograd.grad((arm(inputs) * weight).sum(), inputs)

    def attention() -> None:
        o = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        torch.autograd.grad(o.sum(), heads_first)

    runs: dict[str, Callable[[], object]] = {n: lambda a=a: step(a) for n, a in arms.items()}
    runs["causal attention"] = attention
    times: dict[str, list[float]] = {name: [] for name in runs}
    rates = []
    for round_ in range(args.repeats + 1):
        rates.append(sgemm_rate(clock))
        for name, run in runs.items():
            elapsed = seconds(run, clock)
            if round_:
                times[name].append(elapsed)
    report(args, times, rates, "transformers" in arms)


def report(
    args: argparse.Namespace, times: dict[str, list[float]], rates: list[float], have: bool
) -> None:
    floor = operations(args.tokens) / max(rates)
    targets = {"loop": ">= 5", "transformers": ">= 1.5"}
    results = [
        record.result(f"{n}, fwd+bwd", [1e3 * t for t in ts], "ms") for n, ts in times.items()
    ]
    for name, ts in times.items():
        if name != "ours":
            ratio = [theirs / our for theirs, our in zip(ts, times["ours"], strict=True)]
            results.append(record.result(f"{name} / ours", ratio, "x", targets.get(name)))
    over = [our / floor for our in times["ours"]]
    results.append(record.result("ours / operations at the sgemm rate", over, "x"))
    results.append(record.result("sgemm", [rate / 1e9 for rate in rates], "GFLOP/s"))
    log = [
        f"T={args.tokens} H={HEADS} D={WIDTH} fp32, {args.repeats} rounds, {args.threads} threads, "
        f"{'processor' if args.cpu_time else 'wall'} time, every arm checked first"
    ]
    if not have:
        log.append("transformers cannot be imported here: its arm was not run")
    for row in results:
        spread = f"{row['p10']:.4g} to {row['p90']:.4g}" if "p10" in row else ""
        aim = row.get("target", "")
        log.append(f"{row['name']:<40} {row['value']:>10.4g} {row['unit']:<8} {spread:<22} {aim}")
    print("\n".join(log))
    record.write("kda-cpu", " ".join(["python", "bench/kda.py", *sys.argv[1:]]), [0], results, log)


if __name__ == "__main__":
    main()
