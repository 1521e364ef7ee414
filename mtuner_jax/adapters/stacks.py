"""Many adapters on one model, side by side: one stack of columns per linear.

A column of A [D] and the row of B [F] that belongs to it are of one adapter; a token
uses the columns of its own adapter and no other (grouped LoRA, LoRAFusion,
EuroSys'26). Shapes: L layers, D input features, F output features, A adapters, S the
ranks of all adapters on a linear, one after the other.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.adapters.lora import AdapterSpec, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One of many adapters.

    Attributes:
      name: What it is called.
      specs: Which linears it sits on, with which ranks, as in a run of its own.
      dropout_rate: Its lora_dropout.
      seed: Of its start and its dropout.
    """

    name: str
    specs: tuple[AdapterSpec, ...]
    dropout_rate: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Adapters that train together.

    Attributes:
      members: The adapters; tokens name them by their place here.
    """

    members: tuple[Member, ...]

    @functools.cached_property
    def columns(self) -> dict[str, dict[int, slice]]:
        """{module: {adapter: its columns}}."""
        found: dict[str, dict[int, slice]] = {}
        for number, member in enumerate(self.members):
            for spec in member.specs:
                taken = found.setdefault(spec.module, {})
                start = max((place.stop for place in taken.values()), default=0)
                taken[number] = slice(start, start + spec.max_rank)
        return found

    @functools.cached_property
    def specs(self) -> tuple[AdapterSpec, ...]:
        """The stack as if it were one adapter, of all ranks together."""
        shapes = {spec.module: spec for one in self.members for spec in one.specs}
        return tuple(
            dataclasses.replace(
                shapes[module],
                ranks=(max(place.stop for place in taken.values()),)
                * len(shapes[module].ranks),
                alphas=(0.0,) * len(shapes[module].ranks),
                use_rslora=False,
            )
            for module, taken in self.columns.items()
        )

    def owners(self) -> dict[str, np.ndarray]:
        """{module: int32 [S], the adapter of each column}."""
        return {
            module: np.concatenate(
                [
                    np.full(place.stop - place.start, number, np.int32)
                    for number, place in taken.items()
                ]
            )
            for module, taken in self.columns.items()
        }

    def scalings(self) -> dict[str, jax.Array]:
        """{module: float32 [L, S], what each column's part is multiplied by}."""
        return {
            module: jnp.concatenate(
                [
                    jnp.repeat(
                        jnp.asarray(spec.scalings, jnp.float32)[:, None],
                        spec.max_rank,
                        axis=1,
                    )
                    for spec in self._on(module)
                ],
                axis=1,
            )
            for module in self.columns
        }

    def init(self) -> Params:
        """Fresh adapters, each as a run of its own starts, side by side."""
        return self.join(
            [lora.init(one.specs, lora.init_key(one.seed)) for one in self.members]
        )

    def join(self, adapters: Sequence[Params]) -> Params:
        """Trees of single adapters, side by side: [L, D, S] and [L, S, F]."""
        return {
            module: {
                leaf: jnp.concatenate(
                    [adapters[number][module][leaf] for number in taken], axis=dim
                )
                for leaf, dim in (("lora_a", 2), ("lora_b", 1))
            }
            for module, taken in self.columns.items()
        }

    def split(self, params: Mapping[str, Mapping[str, jax.Array]]) -> list[Params]:
        """The inverse of `join`."""
        return [
            {
                module: {
                    "lora_a": params[module]["lora_a"][:, :, taken[number]],
                    "lora_b": params[module]["lora_b"][:, taken[number]],
                }
                for module, taken in self.columns.items()
                if number in taken
            }
            for number in range(len(self.members))
        ]

    def _on(self, module: str) -> list[AdapterSpec]:
        """The adapters on a linear, in the order of their columns."""
        return [
            next(s for s in self.members[number].specs if s.module == module)
            for number in self.columns[module]
        ]
