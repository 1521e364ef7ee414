"""JSON files of a model's folder: `config.json`, a tokenizer's files."""

import json
import pathlib
from typing import Any

from mtuner_jax.configs import UserError


class JsonFileError(UserError):
    """A JSON file that cannot be read, or does not hold an object."""


def read(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      JsonFileError: No such file, no JSON or no object; it names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise JsonFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise JsonFileError(
            f"{path} is not valid JSON ({error}); copy or download it again"
        ) from error
    if not isinstance(content, dict):
        raise JsonFileError(f"{path} holds a {type(content).__name__}, not an object")
    return content
