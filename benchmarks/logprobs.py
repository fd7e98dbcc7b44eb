"""Logprobs and entropy from hidden states, forward and backward, compared with full logits, TRL and verl.

The tiles of `rlscale.algo.linear_logprobs` against five other implementations, written here as formulas:

    plain           logits = h W^T in full; log softmax of them; the logprob is gathered, the entropy is -sum p log p
    plain, oneDNN   the same with the matrix product that rlscale uses on a CPU
    TRL             logits in full; logsumexp sequence by sequence, entropy by 128 rows (trl/trainer/utils.py)
    verl            logits in full; logsumexp token by token, entropy from a softmax (verl/utils/torch_functional.py)
    verl, fused     512 tokens at a time, softmax and log softmax in both passes (verl/utils/experimental/...)

All have the same inputs, and their results are compared before they are timed; in each round every implementation runs
once. The entropy is a metric, without gradient, as in all three. Extra memory is the peak of forward and backward in
addition to inputs, results and gradients, by torch's profiler, in a separate round. Writes `results/logprobs.md` and
`.json`.

    python benchmarks/logprobs.py [--hidden 256 1024] [--dtype float32] [--rounds 3] [--ways rlscale plain] [--add]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import machine, sentence
from memory_probe import peak_bytes
from torch import Tensor

from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden
from rlscale.algo.logprobs import logprobs_and_entropy
from rlscale.training.cpu.onednn_linear import OneDnnLinear, product
from rlscale.training.modules.logprob_head import TILE_ELEMENTS

RESULTS = Path(__file__).parent / "results"
VOCABULARY, TOKENS, SEQUENCES = 151_936, 4_096, 8
FULL_BYTES = 4 * VOCABULARY * TOKENS
MEMORY_LIMIT, TIME_LIMIT = 0.05, 1.0

Both = tuple[Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor], Both]
"""hidden [T, H], weight [V, H], targets [T] -> logprobs [T], entropies [T]"""


def rlscale(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    options = HeadOptions(chunk_tokens=TILE_ELEMENTS["cpu"] // VOCABULARY, product=product)
    return logprobs_from_hidden(hidden, weight, targets_T=targets, options=options)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    return logprobs_and_entropy(hidden @ weight.t(), targets_T=targets)


def plain_onednn(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    layer = OneDnnLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    logits = torch.func.functional_call(layer, {"weight": weight}, hidden)
    return logprobs_and_entropy(logits, targets_T=targets)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    logits_TV = hidden @ weight.t()
    by_sequence, of_targets = logits_TV.view(SEQUENCES, -1, VOCABULARY), targets.view(SEQUENCES, -1)
    if logits_TV.dtype == torch.float32:
        norms = torch.stack([sequence.logsumexp(-1) for sequence in by_sequence])
        logprobs = by_sequence.gather(-1, of_targets[..., None]).squeeze(-1) - norms
    else:
        rows = [(x.log_softmax(-1), y) for x, y in zip(by_sequence, of_targets, strict=True)]
        logprobs = torch.stack([x.gather(-1, y[:, None]).squeeze(-1) for x, y in rows])
    with torch.no_grad():
        parts = [_entropy_by_logarithm(x) for x in logits_TV.split(128)]
    return logprobs.flatten(), torch.cat(parts)


def _entropy_by_logarithm(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def verl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    logits_TV = hidden @ weight.t()
    if logits_TV.dtype == torch.float32:
        norms = torch.stack([row.logsumexp(-1) for row in logits_TV])
        logprobs = logits_TV.gather(-1, targets[:, None]).squeeze(-1) - norms
    else:
        rows = zip(logits_TV, targets, strict=True)
        logprobs = torch.stack([row.log_softmax(-1)[target] for row, target in rows])
    with torch.no_grad():
        entropy = logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1)
    return logprobs, entropy


def verl_fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    logprobs, entropy = _ByTokens.apply(hidden, weight, targets)
    return logprobs, entropy.detach()


class _ByTokens(torch.autograd.Function):
    """512 tokens at a time: each pass recomputes their logits, softmax (and log softmax)."""

    ROWS = 512

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.set_materialize_grads(False)
        logprobs, entropy = torch.zeros(len(targets)), hidden.new_zeros(len(targets))
        for start in range(0, len(targets), _ByTokens.ROWS):
            rows = slice(start, start + _ByTokens.ROWS)
            x = (hidden[rows] @ weight.t() / 1.0).float()
            p = x.softmax(-1)
            entropy[rows] = (x.logsumexp(-1) - (p * x).sum(-1)).to(entropy.dtype)
            logprobs[rows] = x.log_softmax(-1).gather(-1, targets[rows, None]).squeeze(-1)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        of_logprobs = grads[0]
        assert of_logprobs is not None
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(targets), _ByTokens.ROWS):
            rows = slice(start, start + _ByTokens.ROWS)
            x = (hidden[rows] @ weight.t() / 1.0).float()
            one_hot = torch.zeros_like(x).scatter_(-1, targets[rows, None], 1)
            d = 0 + of_logprobs[rows, None] * (one_hot - x.softmax(-1))
            d = d.to(weight.dtype) / 1.0
            of_hidden[rows] += d @ weight
            of_weight += d.t() @ hidden[rows]
        return of_hidden, of_weight, None


WAYS: dict[str, Way] = {
    "rlscale": rlscale,
    "plain": plain,
    "plain, oneDNN": plain_onednn,
    "TRL": trl,
    "verl": verl,
    "verl, fused": verl_fused,
}


def inputs(hidden: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and the gradient of the logprobs; logits have a deviation of about 2."""
    torch.manual_seed(0)
    h, w = torch.randn(tokens, hidden), torch.randn(VOCABULARY, hidden) * 2 / hidden**0.5
    targets, grad = torch.randint(VOCABULARY, (tokens,)), torch.randn(tokens)
    return h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), targets, grad


def run(way: Way, h: Tensor, w: Tensor, targets: Tensor, grad: Tensor) -> tuple[float, float]:
    """Seconds of the forward and the backward pass."""
    h.grad = w.grad = None
    began = time.perf_counter()
    logprobs, _ = way(h, w, targets)
    middle = time.perf_counter()
    logprobs.backward(grad.to(logprobs.dtype))
    return middle - began, time.perf_counter() - middle


def check(hidden: int, dtype: torch.dtype) -> None:
    """Checks that all implementations give the same numbers."""
    h, w, targets, grad = inputs(hidden, dtype, tokens=64)
    found = {}
    for name, way in WAYS.items():
        h.grad = w.grad = None
        logprobs, entropy = way(h, w, targets)
        logprobs.backward(grad.to(logprobs.dtype))
        found[name] = tuple(each.detach().float() for each in (logprobs, entropy, h.grad, w.grad))
    atol = 1e-4 if dtype == torch.float32 else 0.1
    for name, values in found.items():
        for value, expected in zip(values, found["plain"], strict=True):
            torch.testing.assert_close(value, expected, atol=atol, rtol=atol, msg=lambda text, n=name: f"{n}: {text}")


def extra_bytes(way: Way, hidden: int, dtype: torch.dtype) -> int:
    """Peak memory in addition to inputs, results and gradients."""
    h, w, targets, grad = inputs(hidden, dtype)
    peak = peak_bytes(lambda: run(way, h, w, targets, grad))
    return peak - h.nbytes - w.nbytes - 2 * grad.nbytes


def measure(hidden: int, dtype: torch.dtype, rounds: int, ways: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds of one case by implementation, as rows."""
    check(hidden, dtype)
    case = inputs(hidden, dtype)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            taken[name].append(run(WAYS[name], *case))
    return [
        {"hidden": hidden, "dtype": str(dtype).removeprefix("torch."), "way": name, "seconds": seconds}
        for name, seconds in taken.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| hidden | dtype | implementation | extra MB | of full logits | rounds | forward s | backward s "
        "| both s | of plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        forward, backward = (statistics.median(each[i] for each in row["seconds"]) for i in (0, 1))
        both, extra = total(row), row.get("extra_bytes")
        memory = "| " if extra is None else f"{extra / 1e6:.0f} | {100 * extra / FULL_BYTES:.1f} %"
        lines.append(
            f"| {row['hidden']} | {row['dtype']} | {row['way']} | {memory} | {len(row['seconds'])} | {forward:.1f} "
            f"| {backward:.1f} | {both:.1f} | {both / total(find(rows, row, 'plain')):.2f} |"
        )
    return "\n".join(lines)


def total(row: dict[str, Any]) -> float:
    return statistics.median(sum(each) for each in row["seconds"])


def find(rows: list[dict[str, Any]], like: dict[str, Any], way: str) -> dict[str, Any]:
    return next(r for r in rows if (r["hidden"], r["dtype"], r["way"]) == (like["hidden"], like["dtype"], way))


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges rounds of the same case and implementation."""
    rows = {(r["hidden"], r["dtype"], r["way"]): dict(r) for r in old}
    for row in new:
        key = (row["hidden"], row["dtype"], row["way"])
        known = rows.setdefault(key, {**row, "seconds": []})
        known |= {**row, "seconds": known["seconds"] + row["seconds"]}
    return list(rows.values())


def write(rows: list[dict[str, Any]], loads: list[float]) -> None:
    text = (
        f"# Logprobs without the logits\n\n{sentence(loads)} Vocabulary {VOCABULARY:,}, {TOKENS:,} tokens. "
        "Forward and backward, medians of the rounds; every implementation runs once a round. Full "
        f"logits in float32 are {FULL_BYTES / 1e6:.0f} MB. Extra memory is the peak in addition to inputs, results "
        "and gradients. Limits for rlscale: 5 % of full logits, 1.0 times plain. TRL and verl stand for their "
        "formulas without CUDA kernels. Made by `python benchmarks/logprobs.py`.\n\n"
        f"{table(rows)}\n\n"
        "The plain implementation allocates four tensors of the size of the logits. First access to memory is slow on "
        "this virtual machine, so the ratios will be larger elsewhere. `plain, oneDNN` uses the matrix product of "
        "rlscale.\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "logprobs.md").write_text(text)
    content = {"machine": machine(), "loads": loads, "cases": rows}
    (RESULTS / "logprobs.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(text)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Limits that rlscale exceeds."""
    found = []
    for row in (row for row in rows if row["way"] == "rlscale"):
        case = f"hidden {row['hidden']}, {row['dtype']}"
        if row.get("extra_bytes", 0) > MEMORY_LIMIT * FULL_BYTES:
            found.append(f"{case}: extra memory is {row['extra_bytes'] / FULL_BYTES:.1%} of full logits")
        if row["seconds"] and total(row) > TIME_LIMIT * total(find(rows, row, "plain")):
            found.append(f"{case}: slower than the plain implementation")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--add", action="store_true", help="to the rounds that are recorded already")
    parser.add_argument("--memory", choices=["too", "only", "no"], default="too")
    arguments = parser.parse_args()
    path = RESULTS / "logprobs.json"
    known = json.loads(path.read_text()) if arguments.add and path.exists() else {"cases": [], "loads": []}
    rows, loads = known["cases"], known["loads"]
    rounds = 0 if arguments.memory == "only" else arguments.rounds
    for dtype in (getattr(torch, name) for name in arguments.dtype):
        for hidden in arguments.hidden:
            loads += [os.getloadavg()[0]] if rounds else []
            new = measure(hidden, dtype, rounds, arguments.ways)
            for row in new if arguments.memory != "no" else ():
                row["extra_bytes"] = extra_bytes(WAYS[row["way"]], hidden, dtype)
            rows = merged(rows, new)
            if all(row["seconds"] for row in rows):
                write(rows, loads)
            else:
                path.write_text(json.dumps({"cases": rows, "loads": loads}, indent=1) + "\n")
    sys.exit("; ".join(failures(rows)) or 0)


if __name__ == "__main__":
    main()
