"""Placeholders of images among token ids."""

import pytest

from rlscale.images import Image, collapse_placeholders

TOKEN = 7


def image(num_tokens: int) -> Image:
    return Image(uri="data:,", digest=str(num_tokens), grid=(1, 2, 2 * num_tokens), token=TOKEN, num_tokens=num_tokens)


def test_each_image_keeps_one_placeholder() -> None:
    # Two images without a token between them, and one after text.
    ids = [1, *[TOKEN] * 2, *[TOKEN] * 3, 4, 5, TOKEN, 9]
    assert collapse_placeholders(ids, [image(2), image(3), image(1)]) == [1, TOKEN, TOKEN, 4, 5, TOKEN, 9]
    assert collapse_placeholders([1, 2], []) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, TOKEN, 2], "must have 2 placeholder tokens at token 1, got fewer"),
        ([1, TOKEN], "must have 2 placeholder tokens at token 1, got fewer"),
        ([1, TOKEN, TOKEN, TOKEN], "no placeholder but those of its 1 images, got one more"),
        ([1, TOKEN, TOKEN, 3, TOKEN], "no placeholder but those of its 1 images, got one more"),
        ([1, 2], "must have 2 placeholder tokens, got none"),
    ],
)
def test_other_placeholders_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collapse_placeholders(ids, [image(2)])
