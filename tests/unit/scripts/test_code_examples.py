"""Examples in docstrings become blocks of code on the site, and other sections stay as they are."""

from scripts.docs.code_examples import fence_examples


def test_an_example_becomes_a_block_of_code() -> None:
    text = "Adds.\n\nExample:\n    x = add(\n        1,\n    )\n\n    print(x)\n\nArgs:\n    a: a number\n"
    code = "**Example**\n\n```python\nx = add(\n    1,\n)\n\nprint(x)\n```\n\n"
    assert fence_examples(text) == f"Adds.\n\n{code}Args:\n    a: a number\n"


def test_an_example_at_the_end_and_a_text_without_one() -> None:
    assert fence_examples("Adds.\n\nExample:\n    add(1)") == "Adds.\n\n**Example**\n\n```python\nadd(1)\n```\n\n"
    assert fence_examples("Example: 3 of 4.\n\nMore.") == "Example: 3 of 4.\n\nMore."
