"""The collectives of a program: which, among whom, how many bytes, how often.

Three views of one step, each a list of `Collective`: `traced` (the jaxpr, which knows
loop lengths and directions), `lowered` (the StableHLO that XLA receives) and
`compiled` (what XLA made of it: small collectives merged, loops peeled, so that only
sums of bytes compare).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_KINDS = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}
_STABLEHLO = tuple(f"stablehlo.{kind}" for kind in sorted(set(_KINDS.values())))


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Collective:
    """One collective operation of a program.

    Attributes:
      kind: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all` or
        `collective_permute`.
      groups: Devices that take part together, as places in the mesh (row-major), in
        the order in which their parts are joined.
      result_bytes: What one device holds afterwards.
      loops: Trip counts of the loops around it, outermost first.
      backward: Whether one of these loops runs in reverse; only a trace knows.
    """

    kind: str
    groups: Groups
    result_bytes: int
    loops: tuple[int, ...] = ()
    backward: bool = False

    @property
    def times(self) -> int:
        """How often it runs in a step."""
        return math.prod(self.loops)

    @property
    def total_bytes(self) -> int:
        """Result bytes of all its runs in a step."""
        return self.times * self.result_bytes


def total_bytes(collectives: Iterable[Collective]) -> dict[str, int]:
    """Result bytes of a step by kind, on one device."""
    totals: dict[str, int] = {}
    for collective in collectives:
        totals.setdefault(collective.kind, 0)
        totals[collective.kind] += collective.total_bytes
    return totals


def groups_of(axes: tuple[str, ...], mesh_shape: dict[str, int]) -> Groups:
    """Devices that a collective over `axes` joins, the first axis slowest.

    Args:
      axes: Mesh axes in the order of the collective.
      mesh_shape: Size of each axis of the mesh, in its order.
    """
    names = tuple(mesh_shape)
    places = np.arange(math.prod(mesh_shape.values())).reshape(*mesh_shape.values())
    others = tuple(name for name in names if name not in axes)
    order = [names.index(name) for name in (*others, *axes)]
    size = math.prod(mesh_shape[axis] for axis in axes)
    rows = places.transpose(order).reshape(-1, size)
    return tuple(tuple(int(place) for place in row) for row in rows)


def traced(jaxpr: Any) -> list[Collective]:
    """Collectives of a jaxpr (`jitted.trace(...).jaxpr`) in program order.

    Every branch of a conditional counts as taken.

    Raises:
      ValueError: A collective in a loop of unknown length.
    """
    return list(_traced(jaxpr, {}, ()))


def lowered(module: Any) -> list[Collective]:
    """Collectives of StableHLO (`lowered.compiler_ir("stablehlo")`), as `traced`."""
    named = {
        op.attributes["sym_name"].value: op.operation
        for op in module.body.operations
        if "sym_name" in op.attributes
    }
    return list(_lowered(named["main"], named, ()))


def _traced(jaxpr, mesh_shape, loops) -> Iterator[Collective]:
    """`loops` holds (trip count or None, reverse) of each loop around."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        kind = _KINDS.get(name)
        if kind is not None:
            axes = params["axes"] if "axes" in params else params["axis_name"]
            groups = groups_of(axes if isinstance(axes, tuple) else (axes,), mesh_shape)
            yield from _traced_outputs(eqn, kind, groups, loops)
            continue
        shape, inner = mesh_shape, loops
        if name == "shard_map":
            shape = dict(params["mesh"].shape)
        elif name == "scan":
            inner = (*loops, (params["length"], params["reverse"]))
        elif name == "while":
            inner = (*loops, (None, False))
        for child in _children(params):
            yield from _traced(child, shape, inner)


def _traced_outputs(eqn, kind, groups, loops):
    trips = tuple(trip for trip, _ in loops)
    if None in trips:
        raise ValueError(f"{eqn.primitive.name} in a loop of unknown length")
    for var in eqn.outvars:
        yield Collective(
            kind=kind,
            groups=groups,
            result_bytes=math.prod(var.aval.shape) * var.aval.dtype.itemsize,
            loops=trips,
            backward=any(reverse for _, reverse in loops),
        )


def _children(params):
    """Jaxprs among an equation's parameters."""
    values = itertools.chain.from_iterable(
        value if isinstance(value, tuple | list) else (value,)
        for value in params.values()
    )
    for value in values:
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value


def _lowered(operation, named, loops) -> Iterator[Collective]:
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield from _lowered_op(op.operation, named, loops)


def _lowered_op(op, named, loops):
    if op.name in _STABLEHLO:
        for result in op.results:
            yield Collective(
                kind=op.name.removeprefix("stablehlo."),
                groups=_groups(op, named),
                result_bytes=_tensor_bytes(result.type),
                loops=loops,
            )
    elif op.name == "func.call":
        callee = named[op.attributes["callee"].value]
        yield from _lowered(callee, named, loops)
    elif op.name == "stablehlo.while":
        inside = list(_lowered(op, named, ()))
        if inside:
            trips = _trip_count(op)
            for found in inside:
                yield dataclasses.replace(found, loops=(*loops, trips, *found.loops))
    else:
        yield from _lowered(op, named, loops)


def _groups(op, named) -> Groups:
    """Device lists in jax 0.10; in 0.11 the name of a mesh and of its axes."""
    permutes = op.name == "stablehlo.collective_permute"
    attribute = op.attributes["source_target_pairs" if permutes else "replica_groups"]
    mesh = re.search(r"mesh = @(\w+)", str(attribute))
    if mesh:
        sizes = re.findall(r'"(\w+)"=(\d+)', str(named[mesh[1]]).partition("{")[0])
        axes = tuple(re.findall(r'axis_ref<name = "(\w+)">', str(attribute)))
        return groups_of(axes, {axis: int(size) for axis, size in sizes})
    return tuple(tuple(int(place) for place in row) for row in np.asarray(attribute))


def _trip_count(loop) -> int:
    """Trips of a loop that counts from 0 to a constant, as scans are lowered."""
    *_, test, end = (op.operation for op in loop.regions[0].blocks[0].operations)
    counts = test.name == "stablehlo.compare" and end.operands[0].owner == test
    place = getattr(test.operands[0], "arg_number", None) if counts else None
    if place is None or "LT" not in str(test.attributes["comparison_direction"]):
        raise ValueError(f"a collective in a loop of unknown length: {test}")
    return _constant(test.operands[1].owner) - _constant(loop.operands[place].owner)


def _constant(op) -> int:
    if getattr(op, "name", "") != "stablehlo.constant":
        raise ValueError(f"a collective in a loop whose bounds are computed: {op}")
    return int(np.asarray(op.attributes["value"]))


def _tensor_bytes(tensor_type) -> int:
    bits = tensor_type.element_type.width * math.prod(tensor_type.shape)
    return -(-bits // 8)
