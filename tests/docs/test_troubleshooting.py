"""docs/troubleshooting.md is headed by what the programs really say."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    message
    for heading in re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    for message in re.findall(r"`([^`]+)`", heading)
]


@functools.cache
def all_texts():
    """All texts of the source, a placeholder of an f-string as an empty one."""
    texts = []
    for folder in ("mtuner_jax", "models", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                text = "".join(
                    part.value if isinstance(part, ast.Constant) else "\0"
                    for part in parts
                    if not isinstance(part, ast.Constant) or isinstance(part.value, str)
                )
                texts.append(text)
    return "\n".join(texts)


def test_the_page_has_headings():
    assert len(MESSAGES) > 25


@pytest.mark.parametrize("message", MESSAGES)
def test_every_heading_is_a_message_of_the_source(message):
    parts = [part.strip(" ,;:(") for part in message.split("...")]
    for part in parts:
        assert len(part) < 6 or part in all_texts(), part
    assert any(len(part) >= 6 for part in parts)
