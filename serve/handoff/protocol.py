"""The control messages of a hand-off, version 2: reserve, commit, abort, their replies, and the names of failures.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, at most MAX_FRAME_BYTES. Version 2 added the
prefix of a reserve and the held_tokens of its reply.
"""

from __future__ import annotations

import json
import struct
from enum import StrEnum
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from serve.handoff.prefix import DIGEST_CHARS, MAX_PREFIX_BLOCKS, PREFIX_BLOCK_TOKENS

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 1 << 20
MAX_TOKENS = 1 << 24
MAX_RANKS = 1024
MAX_BLOCKS = 8192
MAX_DRAFT_TOKENS = 64
MAX_DEADLINE_S = 3600.0

T = TypeVar("T")
_LENGTH = struct.Struct(">I")


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
    """A hand-off failed: ``code`` says how, ``message`` what and where, ``retryable`` if another try may succeed."""

    def __init__(self, code: HandoffCode, message: str, *, retryable: bool = False) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


HandoffId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
RequestId = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,256}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
BlockName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,64}/[0-9]{1,6}$")]
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Reason = Annotated[str, StringConstraints(max_length=2000)]
SessionId = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")]
DigestChain = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]+$", max_length=MAX_PREFIX_BLOCKS * DIGEST_CHARS)]


class Message(BaseModel):
    """Base of all messages: unknown fields and coerced types are protocol errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Prefix(Message):
    """The session that a prompt continues and the digest chain of the prompt's tokens (see prefix.py)."""

    session: SessionId
    digests: DigestChain

    @model_validator(mode="after")
    def _digests_are_whole(self) -> Prefix:
        if len(self.digests) % DIGEST_CHARS:
            raise ValueError(f"a digest chain of {len(self.digests)} digits is not of {DIGEST_CHARS} each")
        return self

    @property
    def blocks(self) -> int:
        """Whole blocks of tokens that the chain covers."""
        return len(self.digests) // DIGEST_CHARS


class Reserve(Message):
    """Asks for a slot. Every rank of a hand-off reserves with the same tokens, layout, ranks and prefix.

    With a prefix decode may answer that it holds the first rows already, and keeps these ones for the next turn.
    """

    type: Literal["reserve"] = "reserve"
    version: int = PROTOCOL_VERSION
    handoff_id: HandoffId
    request_id: RequestId
    tokens: int = Field(ge=1, le=MAX_TOKENS)
    layout: Digest
    rank: int = Field(ge=0, lt=MAX_RANKS)
    ranks: int = Field(ge=1, le=MAX_RANKS)
    deadline_s: float = Field(gt=0, le=MAX_DEADLINE_S)
    prefix: Prefix | None = None

    @model_validator(mode="after")
    def _rank_is_one_of_ranks(self) -> Reserve:
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} is not below ranks {self.ranks}")
        if self.prefix is not None and self.prefix.blocks * PREFIX_BLOCK_TOKENS > self.tokens:
            raise ValueError(f"a prefix of {self.prefix.blocks} blocks is longer than {self.tokens} tokens")
        return self


class Reserved(Message):
    """The slot: write rows to ``address`` + layout offset over transport session ``session``.

    Rows below ``held_tokens`` are there already: they are neither written nor counted nor part of a checksum.
    """

    type: Literal["reserved"] = "reserved"
    generation: int = Field(ge=1)
    session: str = Field(max_length=256)
    address: int = Field(ge=0)
    bytes: int = Field(ge=1)
    held_tokens: int = Field(default=0, ge=0)


class Commit(Message):
    """One rank's rows have all landed. ``bytes`` is this rank's payload, ``checksums`` xxh3_64 by "plane/layer".

    Both are of the rows that were sent: those from the slot's ``held_tokens`` on.
    """

    type: Literal["commit"] = "commit"
    handoff_id: HandoffId
    generation: int = Field(ge=1)
    rank: int = Field(ge=0, lt=MAX_RANKS)
    bytes: int = Field(ge=0)
    checksums: dict[BlockName, Checksum] = Field(max_length=MAX_BLOCKS)
    draft_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MAX_DRAFT_TOKENS)
    timings: dict[str, float] = Field(default_factory=dict, max_length=32)


class Committed(Message):
    """The rank's commit was counted."""

    type: Literal["committed"] = "committed"


class Abort(Message):
    """Gives a hand-off up. With its generation it is a writer's word that none of its bytes can land any more."""

    type: Literal["abort"] = "abort"
    handoff_id: HandoffId
    generation: int | None = Field(default=None, ge=1)
    reason: Reason
    code: Annotated[HandoffCode, Field(strict=False)] = HandoffCode.ABORTED


class Aborted(Message):
    """The abort was taken note of, whether or not there was anything to abort."""

    type: Literal["aborted"] = "aborted"


class ErrorReply(Message):
    """Any request can be answered by this instead."""

    type: Literal["error"] = "error"
    code: Annotated[HandoffCode, Field(strict=False)]
    message: Reason
    retryable: bool = False

    @classmethod
    def of(cls, error: HandoffError) -> ErrorReply:
        """The reply that carries ``error``."""
        return cls(code=error.code, message=error.message[:2000], retryable=error.retryable)

    def error(self) -> HandoffError:
        """The exception that the reply stands for."""
        return HandoffError(self.code, self.message, retryable=self.retryable)


Request = Reserve | Commit | Abort
Reply = Reserved | Committed | Aborted | ErrorReply
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="type")])
_REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="type")])


def encode(message: Request | Reply) -> bytes:
    """The frame of a message. Raises HandoffError(too_large) when it exceeds MAX_FRAME_BYTES."""
    body = message.model_dump_json().encode()
    if len(body) > MAX_FRAME_BYTES:
        raise HandoffError(HandoffCode.TOO_LARGE, f"a {message.type} frame of {len(body)} bytes is above 1 MiB")
    return _LENGTH.pack(len(body)) + body


def body_bytes(header: bytes) -> int:
    """Length of the body that follows a 4-byte header. Raises HandoffError(protocol_error) when out of bounds."""
    length = int(_LENGTH.unpack(header)[0])
    if not 0 < length <= MAX_FRAME_BYTES:
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"frame of {length} bytes; allowed are 1 to {MAX_FRAME_BYTES}")
    return length


def parse_request(body: bytes) -> Request:
    """The request in a frame's body. Raises HandoffError: version_mismatch, protocol_error."""
    document = _json_object(body)
    if document.get("type") == "reserve" and document.get("version") != PROTOCOL_VERSION:
        raise HandoffError(
            HandoffCode.VERSION_MISMATCH,
            f"peer speaks hand-off version {document.get('version')!r:.20}, this side {PROTOCOL_VERSION}: "
            "run the same release on prefill and decode",
        )
    return _validate(_REQUEST, document)


def parse_reply(body: bytes) -> Reply:
    """The reply in a frame's body. Raises HandoffError(protocol_error)."""
    return _validate(_REPLY, _json_object(body))


def _json_object(body: bytes) -> dict[str, object]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, "frame body is not JSON in UTF-8") from error
    if not isinstance(document, dict):
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, "frame body is not a JSON object")
    return document


def _validate(adapter: TypeAdapter[T], document: dict[str, object]) -> T:
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part)[:64] for part in first["loc"]) or "message"
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"{where}: {first['msg']}"[:500]) from error
