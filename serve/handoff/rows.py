"""The byte layout of a quantized row: pure arithmetic, the one owner of it for the wire, the caches and the planner.

A row is ``values`` e4m3 numbers, then one float32 scale for each started block of BLOCK_VALUES of them, then ``plain``
bfloat16 numbers that are kept as they are. The KV row of an MLA layer is vLLM's ``fp8_ds_mla``: 512 latents, 4 scales
and 64 rotated key dims are 656 bytes. An indexer key of 128 dims has one scale and nothing plain: 132 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

FP8 = "fp8"
"""What command lines and recipes call a KV cache of such rows."""
LATENT_DTYPE = "fp8_ds_mla"
INDEX_DTYPE = "fp8_index"
BLOCK_VALUES = 128
SCALE_BYTES = 4
PLAIN_BYTES = 2


@dataclass(frozen=True)
class Fp8Row:
    """Where the parts of one row lie, in bytes from its start. Raises ValueError for parts that would not align."""

    values: int
    plain: int = 0

    def __post_init__(self) -> None:
        if self.values < 1 or self.values % SCALE_BYTES or self.plain < 0 or self.plain % 2:
            raise ValueError(
                f"an fp8 row of {self.values} values and {self.plain} plain ones: the first must be a positive "
                f"multiple of {SCALE_BYTES} and the second even, or scales would lie across words"
            )

    @property
    def blocks(self) -> int:
        """Scales of a row; the last block may be cut short."""
        return -(-self.values // BLOCK_VALUES)

    @property
    def plain_at(self) -> int:
        return self.values + SCALE_BYTES * self.blocks

    @property
    def nbytes(self) -> int:
        return self.plain_at + PLAIN_BYTES * self.plain
