"""How loss and attention cut their tokens: integers for ops to run, plans to price."""

LOGIT_BYTES = 256 * 2**20
_WIDE_BYTES = 4  # logits are float32
_MIN_CHUNKS = 8
_MIN_CHUNK_TOKENS = 32
_BLOCK_TOKENS = 512
_MAX_BLOCKS = 16


def loss_tokens(
    num_tokens: int, table_rows: int, *, limit_bytes: int = LOGIT_BYTES
) -> int:
    """Tokens whose logits are held at once: a divisor of `num_tokens`.

    The chunk's float32 logits stay within `limit_bytes`, and there are about 8 chunks
    or more, so that skipping those without loss pays for prompts and padding.
    """
    limit = max(1, limit_bytes // (_WIDE_BYTES * table_rows))
    limit = min(limit, max(_MIN_CHUNK_TOKENS, num_tokens // _MIN_CHUNKS))
    if num_tokens <= limit:
        return num_tokens
    return next(size for size in range(limit, 0, -1) if num_tokens % size == 0)


def attention_blocks(num_tokens: int) -> list[tuple[int, int]]:
    """Blocks of queries (start, end) of attention without cuDNN, at most 16.

    A block's queries see no key past `end`.
    """
    block = max(_BLOCK_TOKENS, -(-num_tokens // _MAX_BLOCKS))
    return [
        (start, min(start + block, num_tokens)) for start in range(0, num_tokens, block)
    ]


def padded(size: int, parts: int) -> int:
    """The next multiple of `parts`: rows of an array that is split into so many."""
    return -(-size // parts) * parts
