"""The router's parts: HTTP on both sides, the fleet of backends, the splice between them."""
