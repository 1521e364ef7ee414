"""What attention's back ends take and give.

Letters: B batch, T tokens, N query heads, K key/value heads, H head dim.
"""

from typing import NamedTuple

import jax


class Qkv(NamedTuple):
    """Queries, keys and values, or the gradient of each.

    Attributes:
      q_BTNH: [B, T, N, H]; N is a multiple of K.
      k_BTKH: [B, T, K, H].
      v_BTKH: [B, T, K, H].
    """

    q_BTNH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array


class Documents(NamedTuple):
    """Where the documents of a batch lie.

    Attributes:
      segment_ids_BT: The document of each token, int32 [B, T].
      starts: First token of each document in the flattened batch, then its end, B * T,
        as often as there are fewer documents than may be: int32 [B * M + 1] for at most
        M a row. None where the back end asks for no bound.
    """

    segment_ids_BT: jax.Array
    starts: jax.Array | None = None


class Attended(NamedTuple):
    """What a forward run gives.

    Attributes:
      out_BTNH: The attended values, [B, T, N, H], in the dtype of the values.
      stats: Softmax statistics for the backward run, laid out as the back end likes;
        no gradient flows through them.
    """

    out_BTNH: jax.Array
    stats: jax.Array


class Residuals(NamedTuple):
    """What a backward run needs.

    Attributes:
      qkv: The forward run's input.
      documents: Likewise.
      attended: The forward run's result.
    """

    qkv: Qkv
    documents: Documents
    attended: Attended
