"""Makes the instruction set that ships, from the standard library's docstrings.

    python scripts/make_dataset.py [--output FILE]

Questions about functions, methods and classes of Python's standard library, answered
by the first sentences of their docstrings, as JSONL in the `messages` format. The
same Python version gives the same file byte for byte; the licence note beside the
file says which version it was made with.
"""

import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax import data
from mtuner_jax.settings import programs

MODULES = (
    "builtins abc argparse array ast asyncio base64 bisect calendar cmath codecs "
    "collections concurrent.futures configparser contextlib copy csv dataclasses "
    "datetime decimal difflib enum fnmatch fractions functools gc getpass glob gzip "
    "hashlib heapq hmac html http.client inspect io ipaddress itertools json keyword "
    "linecache locale logging math mimetypes operator os os.path pathlib pickle "
    "pprint queue random re sched secrets shelve shlex shutil signal socket "
    "sqlite3 statistics string subprocess sys tempfile textwrap threading time "
    "timeit tokenize traceback types typing unicodedata urllib.parse urllib.request "
    "uuid warnings weakref xml.etree.ElementTree zipfile zlib"
).split()

QUESTIONS = {
    "function": (
        "What does `{name}` do in Python?",
        "What is `{name}` for?",
        "Explain Python's `{name}` function briefly.",
        "How would you describe `{name}` from the Python standard library?",
        "In Python, what happens when I call `{name}`?",
        "I came across `{name}` in some Python code. What does it do?",
    ),
    "method": (
        "What does `{name}` do in Python?",
        "What does the method `{name}` do?",
        "Explain Python's `{name}` method briefly.",
        "In Python, what happens when I call `{name}`?",
        "When would I use `{name}`?",
    ),
    "class": (
        "What is `{name}` in Python?",
        "What is Python's `{name}` class for?",
        "Explain `{name}` from the Python standard library.",
        "What does `{name}` represent?",
    ),
}

MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 40, 260
MAX_PER_OWNER = 8
NUM_SAMPLES = 480

# Docstrings that tell about their implementation, their signature or nothing at all.
BOILERPLATE = re.compile(
    r"^(Helper for pickle|Return self|Implement |Initialize self|Create and return a "
    r"new|See help\(type|Concrete implementation|Internal|Private|Deprecated|"
    r"Undocumented|Same as|Like |Alias|See |Not implemented|XXX|TODO|"
    r"This method is called)|"
    r"deprecated|docstring|https?://|__\w+__|>>>|\bPEP \d|@|\\|[^\x20-\x7e]"
)

NOTICE = """# Licence of {file}

The answers in `{file}` are excerpts of docstrings
of the Python standard library, version {version}; the questions were made by
`scripts/make_dataset.py`. Changes: docstrings were cut to their first sentences, and
their line breaks were joined.

Python and its docstrings are Copyright (c) Python Software Foundation; All Rights
Reserved, under the Python Software Foundation License Version 2 (SPDX: PSF-2.0),
which follows. Everything else in this repository is under the licence in the file
LICENSE.

```
{licence}
```
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """Where the instruction set goes.

    Attributes:
      output: The JSONL; its licence note is written beside it.
    """

    output: str = str(
        pathlib.Path(data.__file__).with_name("python_stdlib_qa.jsonl").resolve()
    )


def main(argv: list[str]) -> int:
    """Writes the dataset and its licence note; returns the exit code."""
    return programs.run(argv, MakeConfig, write, description=__doc__)


def write(config: MakeConfig) -> None:
    """Writes the dataset and its licence note."""
    output, rows = pathlib.Path(config.output), make_rows()
    with output.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    version = ".".join(map(str, sys.version_info[:3]))
    note = output.with_suffix(".LICENSE.md")
    note.write_text(
        NOTICE.format(file=output.name, version=version, licence=python_licence()),
        encoding="utf-8",
    )
    print(f"{output}: {len(rows)} samples from Python {version}; {note}")


def make_rows() -> list[dict[str, list[dict[str, str]]]]:
    """Returns the samples, in an order that mixes the modules."""
    by_answer: dict[str, list[tuple[str, str]]] = {}
    for name, kind, doc in named_docs():
        if answer := clean_answer(doc, name):
            by_answer.setdefault(answer, []).append((name, kind))
    # An answer that serves several names says too little about each.
    unique = [
        (names[0][0], names[0][1], answer)
        for answer, names in by_answer.items()
        if len(names) == 1
    ]
    unique.sort(key=lambda entry: _hash(entry[0]))
    per_owner: dict[str, int] = {}
    rows = []
    for name, kind, answer in unique:
        owner = name.rpartition(".")[0]
        per_owner[owner] = per_owner.get(owner, 0) + 1
        if per_owner[owner] <= (MAX_PER_OWNER if owner else 30):
            rows.append(_row(name, kind, answer))
    return rows[:NUM_SAMPLES]


def python_licence() -> str:
    """Returns PSF-2.0 as it comes with the Python that runs this."""
    text = (pathlib.Path(os.__file__).parent / "LICENSE.txt").read_text("utf-8")
    start = text.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2")
    return text[start : text.index("BEOPEN.COM LICENSE", start)].strip()


def named_docs() -> Iterator[tuple[str, str, str]]:
    """Yields name, kind and docstring of the public parts of `MODULES`."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        names = getattr(module, "__all__", None) or sorted(vars(module))
        for name in sorted(names):
            member = getattr(module, name, None)
            if name.startswith("_") or not _belongs(member, module_name):
                continue
            kind = "class" if inspect.isclass(member) else "function"
            if inspect.isclass(member) and issubclass(member, BaseException):
                continue
            yield f"{prefix}{name}", kind, _doc(member)
            if inspect.isclass(member):
                for method in _methods(member):
                    doc = _doc(vars(member)[method])
                    yield f"{prefix}{name}.{method}", "method", doc


def clean_answer(doc: str, name: str) -> str:
    """Returns the first sentences of a docstring, or "" if they are no answer."""
    lines = inspect.cleandoc(doc).splitlines()
    short = name.rpartition(".")[2]
    signature = re.compile(rf"([\w.]+\.)?{re.escape(short)}\(.*\)|\w+\(.*->|\s*$")
    while lines and signature.match(lines[0]):
        lines = lines[1:]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    text = ""
    for paragraph in paragraphs:
        if re.search(r"^\s{2,}\S|^\s*[-*:]|::$|^\w+:$|:\s*$", paragraph, re.MULTILINE):
            break
        for sentence in _sentences(paragraph):
            if len(text) + 1 + len(sentence) > MAX_ANSWER_CHARS:
                return _checked(text)
            text = f"{text} {sentence}".strip()
    return _checked(text)


def _checked(text: str) -> str:
    usable = (
        MIN_ANSWER_CHARS <= len(text)
        and text[0].isupper()
        and text.endswith((".", "!"))
        and not BOILERPLATE.search(text)
        and text.count("(") == text.count(")")
        and text.count("`") % 2 == 0
    )
    return text if usable else ""


def _sentences(paragraph: str) -> list[str]:
    text = " ".join(paragraph.split())
    text = text if text.endswith((".", "!", "?")) else f"{text}."
    return re.split(r"(?<=[a-z0-9)`'\"][.!]) (?=[A-Z])", text)


def _belongs(member: object, module_name: str) -> bool:
    if not (inspect.isclass(member) or inspect.isroutine(member)):
        return False
    home = getattr(member, "__module__", None) or module_name
    root = module_name.partition(".")[0]
    return home.lstrip("_").partition(".")[0] in (root, "posixpath", "genericpath")


def _methods(owner: type) -> list[str]:
    return sorted(
        name
        for name, member in vars(owner).items()
        if not name.startswith("_") and inspect.isroutine(member)
    )


def _doc(member: object) -> str:
    doc = getattr(member, "__doc__", None)
    return doc if isinstance(doc, str) else ""


def _row(name: str, kind: str, answer: str) -> dict[str, list[dict[str, str]]]:
    wordings = QUESTIONS[kind]
    question = wordings[_hash(f"question {name}") % len(wordings)].format(name=name)
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
