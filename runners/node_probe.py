"""Runs on one node of an allocation before anything is started there: free ports, the shared folder, free disk.

Standard library only, started as a file by ``srun``; one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import sys
from pathlib import Path


def free_ports(count: int, first: int, last: int, host: str) -> list[int]:
    """Up to ``count`` ports that can be bound now, searched from a random one on."""
    size = last - first + 1
    start = random.randrange(size)
    found: list[int] = []
    for offset in range(size):
        if len(found) == count:
            break
        port = first + (start + offset) % size
        if all(can_bind(port, address) for address in {host, "0.0.0.0"}):
            found.append(port)
    return found


def can_bind(port: int, host: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_bytes(folder: Path) -> int | None:
    """Of the disk that the folder, or the nearest one above it that exists, is on."""
    while not folder.exists():
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--ports", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--token", type=Path, required=True, help="file that the job wrote into its run folder")
    parser.add_argument("--disk", action="append", default=[], type=Path)
    options = parser.parse_args()
    answer = {
        "hostname": socket.gethostname(),
        "sees_token": options.token.is_file(),
        "ports": free_ports(options.ports, options.first, options.last, options.address),
        "free_bytes": {str(folder): free_bytes(folder) for folder in options.disk},
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
