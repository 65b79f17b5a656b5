"""Downloads a pinned checkpoint from a model hub.

    python -m serve.weights.hub --repository OWNER/NAME --revision COMMIT --out DIR

The folder appears whole or not at all, every file with the hash that the hub has for it (sha256 of large files, git's
blob id of small ones). A download that was cut short goes on where it ended, inside a file and in another process too,
which huggingface_hub's own does not (1.33 gives every process a temporary file of its own). HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE mean what they always mean; a folder that is complete needs no network.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serve.weights.atomic_dir import StagingError, build_directory

# What engines read. Other formats of the same weights would double the size.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
MARGIN_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
WORKERS = 8
TRIES = 5  # without a single new byte


def fetch(repository: str, revision: str, out: Path, *, file: str | None = None) -> Path:
    """``out``, which holds the repository's files at that commit, or the one ``file``.

    Raises StagingError: the hub is not reached or refuses, no room, a file that is not what the hub says."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    wanted: dict[str, Any] = {}

    def needed_bytes() -> int:
        wanted.update(_listing(repository, revision, file))
        return sum(entry.size or 0 for entry in wanted.values()) + MARGIN_BYTES

    def build(partial: Path) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda entry: _fetch_file(repository, revision, entry, partial), wanted.values()))

    identity = {"repository": repository, "revision": revision, "file": file}
    try:
        return build_directory(out, identity, build, needed_bytes=needed_bytes, resumable=True)
    except OfflineModeIsEnabled as error:
        raise StagingError(
            f"{repository}: HF_HUB_OFFLINE is set and {out} is not complete; unset it where there is a network, or put "
            "the checkpoint there by hand and use source: path"
        ) from error
    except HfHubHTTPError as error:
        said = " ".join(str(error).split())[:400]
        raise StagingError(
            f"{repository} at {revision}: the hub refuses it: {said}; see weights.repository and weights.revision of "
            "the model's file, and HF_TOKEN for a gated one"
        ) from error
    except httpx.TransportError as error:
        raise StagingError(
            f"{repository}: {constants.ENDPOINT} is not reached ({type(error).__name__}: {error}); what is there "
            "already is kept, so try again, or stage the checkpoint where there is a network"
        ) from error


def _listing(repository: str, revision: str, file: str | None) -> dict[str, Any]:
    """Name -> what the hub knows of a file that is wanted."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    found = {
        entry.rfilename: entry
        for entry in info.siblings or []
        if (entry.rfilename == file if file else any(fnmatch.fnmatch(entry.rfilename, p) for p in PATTERNS))
    }
    if not found:
        raise StagingError(f"{repository} at {revision}: has no {file or 'weights'}; see weights of the model's file")
    return found


def _fetch_file(repository: str, revision: str, entry: Any, folder: Path) -> None:
    """One file, from where an earlier try ended; its hash is checked when it is whole."""
    import httpx
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repository, entry.rfilename, revision=revision)
    path = folder / entry.rfilename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    tries = TRIES
    while (before := path.stat().st_size) < (entry.size or 0):
        problem: Exception = StagingError(f"{entry.rfilename}: the hub has {entry.size} bytes of it and sends {before}")
        try:
            _continue(url, path)
        except httpx.TransportError as error:
            print(f"{entry.rfilename}: {error}; going on", file=sys.stderr)
            problem = error
        tries = TRIES if path.stat().st_size > before else tries - 1
        if not tries:
            raise problem
    _verify(path, entry)


def _continue(url: str, path: Path) -> None:
    """Appends what the server has beyond the file's end; from the start when it does not know ranges."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    offset = path.stat().st_size
    headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with (
        get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer,
        path.open("r+b") as file,
    ):
        hf_raise_for_status(answer)
        file.seek(offset if answer.status_code == 206 else 0)
        file.truncate()
        for chunk in answer.iter_raw():
            file.write(chunk)


def _verify(path: Path, entry: Any) -> None:
    """Removes a file that is not what the hub says, so that the next try fetches it again. Raises StagingError."""
    if entry.lfs is not None:
        kind, wanted, digest = "sha256", entry.lfs.sha256, hashlib.sha256()
    else:
        kind, wanted, digest = "git blob id", entry.blob_id, hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != wanted:
        path.unlink()
        raise StagingError(
            f"{entry.rfilename}: its {kind} is {digest.hexdigest()}, the hub says {wanted}; it was removed, try again"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repository", required=True)
    parser.add_argument("--revision", required=True, help="commit, 40 hex digits")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--file", help="one file of the repository; all weight files otherwise")
    options = parser.parse_args()
    try:
        print(fetch(options.repository, options.revision, options.out, file=options.file))
    except (StagingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
