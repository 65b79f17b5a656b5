"""The decode server's inside: requests on the event loop, the engine on a thread of its own."""
