"""8-bit AdamW state that follows the original parameters under PyTorch FSDP1.

    layouts = refimpl.read_layouts(model)  # after FSDP wrapping
    optimizer = refimpl.ShardedAdamW8bit(model.parameters(), layouts=layouts, lr=1e-3)

Read the core in this order: `layout`, `fsdp`, `update`, `named_state`, `stock`, `base`, `edges`, `sharded`,
`shadow`, `convert`, `checkpoint`.
"""

import logging

# bitsandbytes 0.50 warns on import, on CPUs with AVX512-BF16, that an optional package with a
# 4-bit matrix product is missing. No optimizer uses it; drop that one record and no other.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)

from .fsdp import read_layouts  # noqa: E402
from .shadow import ShadowAdamW8bit  # noqa: E402
from .sharded import ShardedAdamW8bit  # noqa: E402

__all__ = ["ShadowAdamW8bit", "ShardedAdamW8bit", "read_layouts"]
