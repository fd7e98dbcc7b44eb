"""Masked importance sampling, IcePop and off-policy sequence masking, compared with hand-computed values and a loop."""

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.algo.off_policy import Band, Correction, importance_weights, off_policy_mask
from rlscale.algo.ragged import TokenLayout

NAN = float("nan")

# Sample 0 has ratios 0.5, 4 and a masked one; sample 1 has 2 and 0.125; sample 2 has no trainable token.
RATIOS = [0.5, NAN, 4.0, 2.0, 0.125, NAN]
MASK = [True, False, True, True, True, False]
LAYOUT = TokenLayout.from_lengths(torch.tensor(MASK), lengths_S=torch.tensor([3, 2, 1]))
SAMPLES = [[0, 2], [3, 4]]  # trainable tokens by sample


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def compute_weights(correction: Correction) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    old = vector(*(log(r) if r == r else NAN for r in RATIOS))
    weights, sums = importance_weights(
        old, rollout_logprobs_T=torch.zeros(6).double(), layout=LAYOUT, correction=correction
    )
    return weights, {name: (float(total), float(count)) for name, (total, count) in sums.items()}


def reference_weights(correction: Correction) -> list[float]:
    def ratios(level: str) -> dict[int, float]:
        found = {}
        for tokens in SAMPLES:
            product = exp(sum(log(RATIOS[t]) for t in tokens))
            for t in tokens:
                found[t] = {"token": RATIOS[t], "sequence": product, "geometric": product ** (1 / len(tokens))}[level]
        return found

    out = [0.0] * 6
    low, high = correction.band.bounds
    for t, ratio in ratios(correction.band.level).items():
        inside = low <= ratio <= high
        modes = {"truncate": min(ratio, high), "clip": min(max(ratio, low), high), "mask": ratio if inside else 0.0}
        out[t] = modes[correction.mode]
    if correction.reject is not None:
        low, high = correction.reject.bounds
        for t, ratio in ratios(correction.reject.level).items():
            out[t] *= low <= ratio <= high
    for tokens in SAMPLES:
        if correction.veto is not None and any(RATIOS[t] < correction.veto for t in tokens):
            for t in tokens:
                out[t] = 0.0
    return out


def test_icepop_by_hand() -> None:
    # Band [0.5, 2]: 4 and 0.125 are outside and get weight 0; their tokens stay in the denominators.
    weights, sums = compute_weights(Correction(band=Band(low=0.5, high=2.0), mode="mask"))
    torch.testing.assert_close(weights, vector(0.5, 0, 0, 2, 0, 0))
    assert sums["mis_ratio"] == (pytest.approx(6.625), 4.0)
    assert sums["mis_clipfrac"] == (2.0, 4.0)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.5, 0.0, 2.0, 2.0, 0.125, 0.0]),  # 4 is truncated
        ("sequence", [2.0, 0.0, 2.0, 0.25, 0.25, 0.0]),  # 0.5 * 4 and 2 * 0.125
        ("geometric", [2**0.5, 0.0, 2**0.5, 0.5, 0.5, 0.0]),
    ],
)
def test_truncated_levels_by_hand(level: str, expected: list[float]) -> None:
    weights, _ = compute_weights(Correction(band=Band(level=level, high=2.0)))
    torch.testing.assert_close(weights, vector(*expected))


def test_the_lower_bound_is_one_over_the_upper_one() -> None:
    assert Band(high=4.0).bounds == (0.25, 4.0)
    weights, _ = compute_weights(Correction(band=Band(high=4.0), mode="clip"))
    torch.testing.assert_close(weights, vector(0.5, 0, 4, 2, 0.25, 0))


def test_a_veto_drops_the_response() -> None:
    weights, sums = compute_weights(Correction(band=Band(high=10.0), veto=0.2))
    torch.testing.assert_close(weights, vector(0.5, 0, 4, 0, 0, 0))
    assert sums["mis_vetofrac"] == (2.0, 4.0)


def test_rejection_by_hand() -> None:
    # Geometric means are 1.414 and 0.5; only the first is in [0.7, 1.43].
    weights, sums = compute_weights(
        Correction(band=Band(high=10.0), reject=Band(level="geometric", low=0.7, high=1.43))
    )
    torch.testing.assert_close(weights, vector(0.5, 0, 4, 0, 0, 0))
    assert sums["mis_rejectfrac"] == (2.0, 4.0)


@pytest.mark.parametrize(
    ("correction", "kept"),
    [
        (Correction(band=Band(high=10.0), veto=1e-12), [True, False]),  # e^-30 is 9e-14
        (Correction(band=Band(high=10.0), reject=Band(low=1e-12, high=1e14)), [True, False]),
        (Correction(band=Band(high=1e10, low=0.0), reject=Band(level="sequence", low=0.0, high=1e10)), [False, True]),
        (Correction(band=Band(high=1e10, low=0.0), mode="mask"), [False, True]),  # e^30 is 1e13
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_beyond_the_largest_weight_apply(
    correction: Correction, kept: list[bool], dtype: torch.dtype
) -> None:
    layout = TokenLayout.from_lengths(torch.ones(2, dtype=torch.bool), lengths_S=torch.tensor([1, 1]))
    old = torch.tensor([30.0, -30.0], dtype=dtype)
    weights, _ = importance_weights(old, rollout_logprobs_T=torch.zeros(2), layout=layout, correction=correction)
    assert (weights > 0).tolist() == kept


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("reject", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize("veto", [None, 0.3])
def test_every_level_and_mode_equals_the_loop(level: str, mode: str, reject: str | None, veto: float | None) -> None:
    correction = Correction(
        band=Band(level=level, low=0.4, high=1.8),
        mode=mode,
        reject=None if reject is None else Band(level=reject, high=3.0),
        veto=veto,
    )
    torch.testing.assert_close(compute_weights(correction)[0], vector(*reference_weights(correction)))


def test_divisor_of_the_normalisation() -> None:
    # Tokens: 0.5 + 2 + 2 + 0.125 over 4. Sequences: 2 + 0.25 over 2 samples that have tokens.
    assert compute_weights(Correction(band=Band(high=2.0)))[1]["mis_weight"] == (pytest.approx(4.625), 4.0)
    assert compute_weights(Correction(band=Band(level="sequence", high=2.0)))[1]["mis_weight"] == (
        pytest.approx(2.25),
        2.0,
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_log_ratios_are_clamped_and_have_no_gradient(level: str) -> None:
    old = torch.tensor([500.0, -500.0], requires_grad=True)
    layout = TokenLayout.from_lengths(torch.ones(2, dtype=torch.bool), lengths_S=torch.tensor([1, 1]))
    weights, _ = importance_weights(
        old,
        rollout_logprobs_T=torch.zeros(2),
        layout=layout,
        correction=Correction(band=Band(level=level, low=0.0, high=1e30)),
    )
    assert not weights.requires_grad
    assert weights.tolist() == [pytest.approx(exp(20)), pytest.approx(exp(-20))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Band(level="turn", high=2.0), "level must be one of token, sequence, geometric, got 'turn'"),
        (lambda: Band(low=3.0, high=2.0), "low and high must satisfy 0 <= low <= high, got 3.0 and 2.0"),
        (lambda: Correction(band=Band(high=2.0), mode="drop"), "mode must be one of truncate, clip, mask, got 'drop'"),
    ],
)
def test_invalid_settings_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_off_policy_masking_by_hand() -> None:
    # Means of b - lp over trainable tokens: (0.3 + 0.5) / 2 = 0.4 and 0.1; the third sample drifts but was good.
    layout = TokenLayout.from_lengths(torch.tensor([True, False, True, True, True]), lengths_S=torch.tensor([3, 1, 1]))
    kept, sums = off_policy_mask(
        vector(-1.3, NAN, -1.5, -1.1, -9.0),
        behaviour_T=vector(-1, NAN, -1, -1, -1),
        advantages_T=vector(-1, NAN, -2, -1, 1),
        layout=layout,
        delta=0.2,
    )
    assert kept.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert tuple(map(float, sums["opsm_maskfrac"])) == (2.0, 4.0)


def test_off_policy_masking_keeps_samples_at_the_threshold() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True]), lengths_S=torch.tensor([1]))
    columns = {"behaviour_T": vector(-1.0), "advantages_T": vector(-1.0), "layout": layout}
    assert off_policy_mask(vector(-1.5), **columns, delta=0.5)[0].tolist() == [1.0]
    assert off_policy_mask(vector(-1.5), **columns, delta=0.49)[0].tolist() == [0.0]
