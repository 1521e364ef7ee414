"""What XLA made of a program: the collectives of optimised HLO text.

`compiled.as_text()` lists instructions in the order they run. XLA merges small
collectives, peels loops and unrolls loops of one trip, so that counts differ from
the lowered program; bytes times trips stay.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from tests.inspection.collectives import Collective, Groups

_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?"
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str


def collectives(text: str) -> list[Collective]:
    """Collectives in the order they start; `backward` is not known here.

    Raises:
      ValueError: A collective in a loop whose trip count XLA does not know.
    """
    computations, entry = _parse(text)
    return list(_collectives(computations, entry))


def shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape such as `(bf16[4,8]{1,0}, f32[])`."""
    total = 0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
        total += -(
            -bits * math.prod(int(size) for size in sizes.split(",") if size) // 8
        )
    return total


def _parse(text):
    computations: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.endswith("{"):
            current = re.sub(r"^(ENTRY )?%?", "", line).partition(" ")[0]
            computations[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current and line.startswith("  "):
            computations[current].append(_instruction(line))
    return computations, entry


def _instruction(line):
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _shape_end(rest)
    opcode, _, rest_of = rest[end:].lstrip().partition("(")
    return _Instruction(
        name=name.lstrip("%"), shape=rest[:end], opcode=opcode, rest=rest_of
    )


def _shape_end(text):
    """Where the result shape ends: a word, or parentheses that balance."""
    if not text.startswith("("):
        return text.find(" ")
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"not an HLO shape: {text[:80]}")


def _collectives(computations, name) -> Iterator[Collective]:
    done = {
        instruction.rest.split(",")[0].split(")")[0].strip().split("%")[-1]: instruction
        for instruction in computations[name]
        if instruction.opcode.endswith("-done")
    }
    for instruction in computations[name]:
        match = _COLLECTIVE.fullmatch(instruction.opcode)
        if match:
            result = done[instruction.name] if match[2] else instruction
            yield Collective(
                kind=match[1].replace("-", "_"),
                groups=_groups(instruction.rest),
                result_bytes=shape_bytes(result.shape),
            )
            continue
        for called in _called(instruction.rest, computations):
            yield from _inside(computations, called, instruction)


def _inside(computations, called, instruction):
    for found in _collectives(computations, called):
        if instruction.opcode != "while":
            yield found
            continue
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest)
        if not trips:
            raise ValueError(f"{found.kind} in a loop of unknown length")
        yield dataclasses.replace(found, loops=(int(trips[1]), *found.loops))


def _called(rest, computations):
    for one, several in _CALLED.findall(rest):
        for name in re.findall(r"[\w.\-]+", one or several):
            if name in computations:
                yield name


def _groups(rest) -> Groups:
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", rest)
    if listed:
        rows = re.findall(r"\{([\d,]*)\}", listed[1])
        return tuple(tuple(_integers(row)) for row in rows)
    counted = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest
    )
    if not counted:
        return ()
    shape, dims = (_integers(counted[part]) for part in (1, 2))
    order = _integers(counted[3]) if counted[3] else None
    places = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)
    return tuple(tuple(int(place) for place in row) for row in places)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
