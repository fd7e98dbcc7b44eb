"""A script of the scripted engine: an answer that depends on prompt and seed alone."""

import hashlib
import string

from rlscale.engines.scripted.script import ScriptRequest


def answer(text: str, request: ScriptRequest) -> str:
    """Made-up letters, as many as the request may have, so that it can be interrupted."""
    seed = 0 if request.temperature == 0 else request.seed
    digits = hashlib.shake_128(f"{seed} {text}".encode()).digest(max(1, request.max_new_tokens))
    letters = "".join(string.ascii_letters[digit % 52] for digit in digits)
    # Hot samples of a model contain special tokens, too.
    return letters if request.temperature < 2 else f"{letters[:20]}<|eos|>{letters[20:]}"
