"""KL estimators, compared with hand-computed values."""

import math

import pytest
import torch

from rlscale.algo.kl import KL_ESTIMATORS, kl_estimate

# r = lp - ref. e^1 - 1 - 1 = 0.7183; e^-14 - 1 + 14 = 13.0000008; e^-29 - 1 + 29 = 28.
R = torch.tensor([-1.0, 14.0, 29.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [-1.0, 14.0, 29.0]),
        ("k2", [0.5, 98.0, 420.5]),
        ("k3", [0.71828, 13.0, 28.0]),
        ("low_var_kl", [0.71828, 10.0, 10.0]),
    ],
)
def test_estimators(kind: str, expected: list[float]) -> None:
    kl = kl_estimate(R, ref_logprobs_T=torch.zeros(3), kind=kind)
    torch.testing.assert_close(kl, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_unbiased_multiplies_by_the_importance_ratio_before_the_clamp() -> None:
    # r = 2: k3 = e^-2 + 1 = 1.135335; lp - old = ln 4, so 4.541341. r = 6: 5.002479 * 4 = 20.0, clamped to 10.
    lp, ref = torch.tensor([2.0, 6.0]), torch.zeros(2)
    old = lp - torch.log(torch.tensor(4.0))
    torch.testing.assert_close(
        kl_estimate(lp, ref_logprobs_T=ref, kind="k3", old_logprobs_T=old), torch.tensor([4.541341, 20.009915])
    )
    torch.testing.assert_close(
        kl_estimate(lp, ref_logprobs_T=ref, kind="low_var_kl", old_logprobs_T=old), torch.tensor([4.541341, 10.0])
    )


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_are_finite_for_huge_differences(kind: str, unbiased: bool) -> None:
    lp = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    kl = kl_estimate(lp, ref_logprobs_T=torch.zeros(5), kind=kind, old_logprobs_T=torch.zeros(5) if unbiased else None)
    kl.sum().backward()
    assert lp.grad is not None
    assert torch.isfinite(kl).all() and torch.isfinite(lp.grad).all()


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_k3_has_no_gradient_below_a_log_ratio_of_minus_twenty(kind: str) -> None:
    # r = -19: d k3 / dr = 1 - e^19; r = -25 is clamped to -20 in both terms: e^20 - 21, gradient 0.
    lp = torch.tensor([-19.0, -25.0, -1e4], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(lp, ref_logprobs_T=torch.zeros(3).double(), kind=kind)
    kl.sum().backward()
    assert lp.grad is not None and lp.grad[1:].tolist() == [0.0, 0.0]
    if kind == "k3":
        assert kl[0].item() == pytest.approx(math.exp(19) - 20) and lp.grad[0].item() == pytest.approx(1 - math.exp(19))
        assert kl[1:].tolist() == pytest.approx([math.exp(20) - 21] * 2)
    else:
        assert kl.tolist() == [10.0] * 3


def test_k1_and_k3_agree_on_average() -> None:
    # Two distributions over three tokens; the expectation under p is exact, so no sampling noise.
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        estimate = (p * kl_estimate(p.log(), ref_logprobs_T=q.log(), kind=kind)).sum()
        torch.testing.assert_close(estimate, exact)


def test_rejects_other_shapes_and_kinds() -> None:
    with pytest.raises(ValueError, match="ref_logprobs_T must be a vector as long as logprobs_T"):
        kl_estimate(R, ref_logprobs_T=torch.zeros(4), kind="k1")
    with pytest.raises(ValueError, match="kind must be one of k1, k2, k3, low_var_kl, got 'k4'"):
        kl_estimate(R, ref_logprobs_T=R, kind="k4")
