"""Causal grouped-query attention that never lets one document see another.

Each back end returns the output and its softmax statistics, so that a plan can save
the two and skip attention's forward run in the backward pass.
"""

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mtuner_jax.configs import ConfigError
from mtuner_jax.ops.attention import cudnn, flash, reference
from mtuner_jax.ops.attention.operands import Attended, Documents, Qkv, Residuals

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What a step is to run on.

    Attributes:
      on_gpu: Whether it is a GPU.
      capability: The GPU's compute capability, such as 9.0; 0 where nobody knows.
      elsewhere: Whether it is another machine's, whose packages nobody can look for.
    """

    on_gpu: bool
    capability: float = 0.0
    elsewhere: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackEnd:
    """One implementation of attention and where it may be used.

    Attributes:
      forward: (qkv, documents, *, window) -> attended.
      backward: (residuals, gradient of the output, *, window) -> gradients; it runs
        no forward.
      on_gpu_only: Whether it runs on GPUs alone.
      hopper_only: Whether it runs on GPUs of compute capability 9 alone, not on newer.
      package: Python package that has its kernels; empty for none.
      bounded: Whether it has to know how many documents a row has at most.
      packed_rows: Whether it keeps the documents of a row apart; one that does not
        takes rows of one document, padded at the end.
      dtypes: Names of the dtypes that it takes; empty means all floats.
      head_dims: Widths of a head that it takes on GPUs before Hopper; empty means all.
      hopper_head_dims: Those that it takes from Hopper on.
    """

    forward: Callable[..., Attended]
    backward: Callable[..., Qkv]
    on_gpu_only: bool = False
    hopper_only: bool = False
    package: str = ""
    bounded: bool = False
    packed_rows: bool = True
    dtypes: tuple[str, ...] = ()
    head_dims: Sequence[int] = ()
    hopper_head_dims: Sequence[int] = ()

    def obstacle(
        self,
        *,
        device: Device,
        packing: bool,
        dtype: str,
        head_dim: int,
    ) -> str:
        """Says what is in the way of using it, and what to change; empty if nothing."""
        if packing and not self.packed_rows:
            return "packing=true (it ignores document borders); set packing=false"
        if self.on_gpu_only and not device.on_gpu:
            return "no GPU; set attention=xla"
        if self.hopper_only and not 9 <= device.capability < 10:
            return "GPUs other than Hopper; set attention=auto"
        if self.package and not device.elsewhere and not _installed(self.package):
            name = self.package.replace("_", "-")
            return (
                f"no package {name}; pip install 'mtuner-jax[flash12]' or "
                "'mtuner-jax[flash13]', by the CUDA version of jax, on Python 3.12"
            )
        if self.dtypes and dtype not in self.dtypes:
            return f"dtype={dtype}; set dtype={' or '.join(self.dtypes)}"
        widths = self.hopper_head_dims if device.capability >= 9 else self.head_dims
        if widths and head_dim and head_dim not in widths:
            return (
                f"the model's head_dim={head_dim} (multiples of {widths[0]} up to "
                f"{widths[-1]} on these GPUs); set attention=xla"
            )
        return ""


# The fastest first: `auto` takes the first one that nothing is in the way of. Plans and
# the planner's constants fitted to XLA's buffers are keyed by these names.
BACK_ENDS = {
    "cudnn": BackEnd(
        forward=cudnn.forward,
        backward=cudnn.backward,
        on_gpu_only=True,
        packed_rows=False,
        dtypes=("bfloat16",),
        head_dims=range(8, 129, 8),
        # On an H200 with cuDNN 9.19 and jax 0.11.2 each one that was tried was exact to
        # rounding, forward and backward, with and without a window, at 256 and at 131
        # tokens: 8, 16, 40, 64, 72, 80, 96, 104, ..., 136, 160, 192, 224, 256.
        hopper_head_dims=range(8, 257, 8),
    ),
    # By itself 14 % faster than cuDNN for rows of one document too (H200, 4 x 4096,
    # 32 heads of 128, ms: 0.91 + 2.67 against 1.02 + 3.13), but a step of such rows was
    # 1.7 % slower with it: its operands have one layout, for which XLA copies.
    "flash": BackEnd(
        forward=flash.forward,
        backward=flash.backward,
        on_gpu_only=True,
        hopper_only=True,
        package=flash.PACKAGE,
        bounded=True,
        dtypes=("bfloat16",),
        head_dims=range(8, 257, 8),
        hopper_head_dims=range(8, 257, 8),
    ),
    "xla": BackEnd(forward=reference.forward, backward=reference.backward),
}


_SLOWEST = "xla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Which attention runs.

    Attributes:
      implementation: A key of `BACK_ENDS`.
      window: Tokens a position may look back over, itself included; 0 means all.
      most_documents: Documents that a row has at most, its padding counted as one; 0
        where nobody knows. A row with more would be computed wrongly.
    """

    implementation: str = "xla"
    window: int = 0
    most_documents: int = 0

    def __post_init__(self):
        if self.back_end.bounded and self.most_documents < 1:
            raise ConfigError(
                f"attention={self.implementation} has to know how many documents a "
                "row has at most; set attention=xla"
            )

    @property
    def back_end(self) -> BackEnd:
        """The row of the table."""
        return BACK_ENDS[self.implementation]


def locate(segment_ids_BT: jax.Array, spec: Spec) -> Documents:
    """Where documents begin, once for all layers, if the back end wants to know.

    Args:
      segment_ids_BT: The document of each token, int32 [B, T]; a document's tokens
        stand together, and of two neighbours each has an id of its own.
      spec: Which attention.
    """
    if not spec.back_end.bounded:
        return Documents(segment_ids_BT)
    batch, tokens = segment_ids_BT.shape
    begins_BT = jnp.ones_like(segment_ids_BT, dtype=bool)
    here, before = segment_ids_BT[:, 1:], segment_ids_BT[:, :-1]
    begins_BT = begins_BT.at[:, 1:].set(here != before)
    size, end = batch * spec.most_documents, batch * tokens
    (starts,) = jnp.nonzero(begins_BT.reshape(-1), size=size, fill_value=end)
    last = jnp.full_like(starts[:1], end)
    starts = jnp.concatenate([starts, last]).astype(jnp.int32)
    return Documents(segment_ids_BT, starts)


def choose(
    requested: str,
    *,
    device: Device,
    packing: bool,
    dtype: str,
    head_dim: int = 0,
) -> str:
    """Resolves `attention: auto` and refuses what would leak or cannot run.

    Args:
      requested: `auto` or a key of `BACK_ENDS`.
      device: What the step runs on.
      packing: Whether a row may hold several documents.
      dtype: Name of the activations' dtype.
      head_dim: Width of the model's heads (H); 0 where nobody knows.

    Returns:
      A key of `BACK_ENDS`.

    Raises:
      ConfigError: The back end asked for cannot be used here; says why.
    """
    obstacles = {
        name: back_end.obstacle(
            device=device,
            packing=packing,
            dtype=dtype,
            head_dim=head_dim,
        )
        for name, back_end in BACK_ENDS.items()
    }
    if requested == "auto":
        chosen = next(name for name, obstacle in obstacles.items() if not obstacle)
        for name, obstacle in obstacles.items():
            if chosen == _SLOWEST and name != chosen and obstacle and device.on_gpu:
                _logger.info(
                    "attention: %s, because %s cannot be used with %s",
                    chosen,
                    name,
                    obstacle,
                )
        return chosen
    if obstacles[requested]:
        raise ConfigError(
            f"attention={requested} cannot be used with {obstacles[requested]}"
        )
    return requested


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def attend(qkv: Qkv, documents: Documents, spec: Spec) -> Attended:
    """Attention within documents.

    Args:
      qkv: Queries [B, T, N, H], keys and values [B, T, K, H].
      documents: What `locate` gives.
      spec: Which attention.

    Returns:
      The output [B, T, N, H], and statistics for `attend_saved`.
    """
    return spec.back_end.forward(qkv, documents, window=spec.window)


def _attend_fwd(
    qkv: Qkv, documents: Documents, spec: Spec
) -> tuple[Attended, Residuals]:
    attended = spec.back_end.forward(qkv, documents, window=spec.window)
    return attended, Residuals(qkv, documents, attended)


def _attend_bwd(
    spec: Spec, residuals: Residuals, cotangent: Attended
) -> tuple[Qkv, None]:
    backward = spec.back_end.backward
    return backward(residuals, cotangent.out_BTNH, window=spec.window), None


attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend_saved(
    qkv: Qkv, documents: Documents, saved: Attended, spec: Spec
) -> jax.Array:
    """Has the value of a saved output and attention's gradient; runs nothing.

    Args:
      qkv: The input that `attend` was given.
      documents: What `locate` gives.
      saved: What `attend` returned.
      spec: Which attention it was.

    Returns:
      [B, T, N, H].
    """
    del qkv, documents, spec
    return saved.out_BTNH


def _attend_saved_fwd(
    qkv: Qkv, documents: Documents, saved: Attended, spec: Spec
) -> tuple[jax.Array, Residuals]:
    del spec
    return saved.out_BTNH, Residuals(qkv, documents, saved)


def _attend_saved_bwd(
    spec: Spec, residuals: Residuals, cotangent_BTNH: jax.Array
) -> tuple[Qkv, None, Attended]:
    d_qkv = spec.back_end.backward(residuals, cotangent_BTNH, window=spec.window)
    return d_qkv, None, jax.tree.map(jnp.zeros_like, residuals.attended)


attend_saved.defvjp(_attend_saved_fwd, _attend_saved_bwd)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
