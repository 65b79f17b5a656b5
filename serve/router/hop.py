"""A request to a backend: the client's end-to-end headers, the request id, and the body of that hop."""

from __future__ import annotations

from serve.router.exchange import Request
from serve.router.fleet import Backend

# Of one connection (RFC 9110 7.6.1), or written anew. Accept-Encoding goes too: the router reads hop 1's answer.
_OWN_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings host content-length content-type expect accept-encoding x-request-id".split()
)


def hop_request(request: Request, request_id: str, backend: Backend, body: bytes) -> list[bytes]:
    """The head and body to write to ``backend``."""
    named = {name.strip().lower() for name in (request.header(b"connection") or b"").split(b",")}
    lines = [
        b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
        % (request.path.encode(), backend.authority, len(body), request_id.encode())
    ]
    lines += [b"%b: %b\r\n" % pair for pair in request.headers if pair[0] not in _OWN_HEADERS and pair[0] not in named]
    lines.append(b"\r\n")
    return [b"".join(lines), body]
