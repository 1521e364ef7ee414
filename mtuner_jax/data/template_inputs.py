"""What chat templates are given: messages in the form they expect, and a date.

Templates print today's date in two ways, by the variable `date_string` or a call of
`strftime_now`. They are told a fixed one, so that a run has the same tokens on the next
day.
"""

import datetime
import json
from collections.abc import Mapping
from typing import Any

_FIELDS = "aAbBcdDeFGHIjklmMpPrRsSTuUVwWxXyYzZ"


def with_date(source: str, date: datetime.date) -> str:
    """A template in which `strftime_now` tells that date, at midnight in UTC."""
    if "strftime_now" not in source:
        return source
    clock = datetime.datetime(date.year, date.month, date.day, tzinfo=datetime.UTC)
    codes = [f"%{pad}{field}" for pad in ("", "-") for field in _FIELDS]
    filters = "".join(
        f" | replace({code!r}, {clock.strftime(code)!r})" for code in codes
    )
    # No globals reach a template from outside; a macro of that name goes before.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"
        f"{{{{ '' }}}}{source}"
    )


def message(given: Mapping[str, Any], arguments: type) -> dict[str, Any]:
    """A message as templates expect it.

    Templates ask whether a key is there, as in `message.tool_calls is defined`; only
    `content` may be null.

    Args:
      given: The message as it was read.
      arguments: What those of calls become: `dict`, objects, or `str`, JSON text.
    """
    shown = {
        key: value
        for key, value in given.items()
        if value is not None or key == "content"
    }
    if given.get("tool_calls"):
        shown["tool_calls"] = [_call(call, arguments) for call in given["tool_calls"]]
    return shown


def _call(call: Any, arguments: type) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"], arguments)}
    given = call.get("arguments")
    if arguments is str and isinstance(given, dict):
        return call | {"arguments": json.dumps(given, ensure_ascii=False)}
    if arguments is dict and isinstance(given, str):
        try:
            parsed = json.loads(given)
        except ValueError:
            return call
        return call | {"arguments": parsed} if isinstance(parsed, dict) else call
    return call
