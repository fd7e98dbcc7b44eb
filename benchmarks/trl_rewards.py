"""Reward of `trl_step.py` that needs no text. trl_side.py has the same."""


def parity(sample):
    """Returns 1 if the sum of the response's token ids is even, else 0."""
    response = sample.tokens[len(sample.tokens) - sample.response_len :]
    return float(sum(response) % 2 == 0)
