"""The control messages of a hand-off, version 1: reserve, commit, abort, their replies, and the names of failures.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, at most MAX_FRAME_BYTES.
"""

from __future__ import annotations

from enum import StrEnum

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20


class HandoffCode(StrEnum):
    """Every way a hand-off can fail, as it is written on the wire, in logs and in stage records."""

    VERSION_MISMATCH = "version_mismatch"
    LAYOUT_MISMATCH = "layout_mismatch"
    POOL_EXHAUSTED = "pool_exhausted"
    DUPLICATE_HANDOFF = "duplicate_handoff"
    UNKNOWN_HANDOFF = "unknown_handoff"
    STALE_GENERATION = "stale_generation"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    SHORT_WRITE = "short_write"
    ABORTED = "aborted"
    TRANSPORT_FAILED = "transport_failed"
    PEER_UNREACHABLE = "peer_unreachable"
    PROTOCOL_ERROR = "protocol_error"
    TOO_LARGE = "too_large"
    STAGING_EXHAUSTED = "staging_exhausted"


class HandoffError(RuntimeError):
    """A hand-off failed: ``code`` says how, ``message`` what and where, ``retryable`` whether another try may succeed."""

    def __init__(self, code: HandoffCode, message: str, *, retryable: bool = False) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable
