"""The two ways in which a backend fails; what the client is told is a ``serve.openai.RequestError``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.router.fleet import Backend


class BackendFailure(Exception):
    """``backend`` is set by the backend whose call failed."""

    backend: Backend

    @property
    def where(self) -> str:
        return f"{self.backend.role} {self.backend.url}: {self}"


class BackendLost(BackendFailure):
    """The backend refused the connection, closed it before its response was complete, or broke the protocol."""


class BackendSilent(BackendFailure):
    """The backend kept the connection and sent nothing for the hop's deadline."""
