"""The reward of `trl_step.py` that needs no text; trl_side.py has the same."""


def parity(sample):
    """1 where the sum of the response's ids is even."""
    response = sample.tokens[len(sample.tokens) - sample.response_len :]
    return float(sum(response) % 2 == 0)
