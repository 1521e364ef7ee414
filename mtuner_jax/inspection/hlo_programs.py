"""What optimised HLO text (`compiled.as_text()`) says of memory."""

import math
import re

_CUDNN_BACKWARD = '"__cudnn$fmhaSoftmaxBackward"'


def cudnn_workspace_bytes(text: str) -> int:
    """Workspace of cuDNN's attention backward, which XLA takes as 0 without a device.

    An estimate, not measured: the gradient of the queries is summed in float32, and
    with grouped queries those of keys and values are written once per query head.
    Calls run one after the other, so the largest counts.
    """
    sizes = [0]
    for line in text.splitlines():
        if _CUDNN_BACKWARD in line and " custom-call(" in line:
            shape = line.partition(" custom-call(")[0]
            query, key, *_ = re.findall(r"f16\[([\d,]+)\]", shape)
            elements = math.prod(int(size) for size in query.split(","))
            sizes.append(elements * (4 if query == key else 4 + 2 * 2))
    return max(sizes)
