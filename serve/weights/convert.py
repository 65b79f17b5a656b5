"""A Hugging Face checkpoint, cut into one checkpoint a tensor-parallel rank.

    python -m serve.weights.convert --model DIR --out DIR --ranks 8 [--append-mtp]

Bytes are copied, never computed with, in blocks of BLOCK_BYTES: memory does not grow with the checkpoint. Every tensor
comes from the file that the index names. Shards are fsynced, renamed into place and noted in a journal with their
sha256, so that a run that was killed goes on where it stopped; the result is the same byte for byte. provenance.json
is written last and marks completion. Without --append-mtp the MTP layers are left out; a later run with it adds them
in files of their own and leaves the others alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from serve.weights.atomic_dir import PROVENANCE, StagingError, _locked, _sync
from serve.weights.index import INDEX_FILE, SINGLE_FILE, Checkpoint, CheckpointError
from serve.weights.shards import cut_of, rank_of_expert

VERSION = 1
BLOCK_BYTES = 8 << 20
SHARD_BYTES = 4 << 30
JOURNAL = "conversion.journal"
IDENTITY = "conversion.json"
MTP = "mtp"
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Source:
    """Where a tensor's bytes lie."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: rows [row, row + rows) and columns [column, column + columns) of its 2-D view."""

    name: str
    source: Source
    shape: tuple[int, ...]
    row: int
    rows: int
    column: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * DTYPE_BYTES[self.source.dtype]


@dataclass(frozen=True)
class Shard:
    """One output file."""

    rank: int
    file: str
    pieces: tuple[Piece, ...]

    @property
    def path(self) -> str:
        return f"rank{self.rank}/{self.file}"

    def header(self) -> bytes:
        """The safetensors header: length, then JSON padded to 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for piece in self.pieces:
            end = position + piece.nbytes
            entries[piece.name] = {
                "dtype": piece.source.dtype,
                "shape": list(piece.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def convert(
    model_dir: Path,
    out: Path,
    ranks: int,
    *,
    append_mtp: bool = False,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Converts, or goes on with a conversion that was interrupted; returns ``out``.

    ``dtype`` (float32, bfloat16, float16) demands that every tensor is stored so. Raises CheckpointError for a source
    that is not what it says, StagingError for an ``out`` that holds something else or a disk that is too small.
    """
    config = _config(model_dir)
    sources = _sources(model_dir, dtype)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    identity = {
        "converter": VERSION,
        "source_config_sha256": _sha256(model_dir / "config.json"),
        "source_tensors_sha256": _described(sources),
        "ranks": ranks,
        "shard_bytes": shard_bytes,
    }
    with _locked(out.parent / f".{out.name}.lock", 600.0):
        done = _begin(out, identity)
        append_mtp = append_mtp or any(Path(file).name.startswith(MTP) for file in done)
        shards = plan(config, sources, ranks, append_mtp=append_mtp, shard_bytes=shard_bytes)
        missing = [shard for shard in shards if done.get(shard.path, {}).get("header") != _digest(shard.header())]
        needed = sum(piece.nbytes for shard in missing for piece in shard.pieces)
        if shutil.disk_usage(out).free < needed:
            raise StagingError(f"{out}: {needed / 2**30:.1f} GiB needed; free some or name another disk")
        for shard in missing:
            done[shard.path] = _write_shard(out, shard)
            _note(out, shard.path, done[shard.path])
        _finish(out, model_dir, identity, shards, done)
    return out


def plan(
    config: Mapping[str, Any],
    sources: Mapping[str, Source],
    ranks: int,
    *,
    append_mtp: bool,
    shard_bytes: int = SHARD_BYTES,
) -> list[Shard]:
    """Every output file in writing order; the same for the same source. Raises CheckpointError for an uneven split."""
    layers = config["num_hidden_layers"]
    names = sorted(sources, key=_natural_order)
    main = [name for name in names if (_layer(name) or 0) < layers]
    parts = [("model", main)]
    if append_mtp:
        mtp = [name for name in names if (_layer(name) or 0) >= layers]
        if not mtp:
            raise CheckpointError(f"--append-mtp: the checkpoint has no layer {layers}")
        parts.append((MTP, mtp))
    shards = []
    for rank in range(ranks):
        for prefix, wanted in parts:
            pieces = [piece for name in wanted if (piece := _piece(name, sources[name], config, rank, ranks))]
            for number, group in enumerate(_grouped(pieces, shard_bytes), 1):
                shards.append(Shard(rank, f"{prefix}-{number:05d}.safetensors", tuple(group)))
    return shards


def _piece(name: str, source: Source, config: Mapping[str, Any], rank: int, ranks: int) -> Piece | None:
    shape = source.shape
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // columns if columns else 0
    owner = rank_of_expert(name, config, ranks)
    if owner is not None and owner != rank:
        return None
    cut = cut_of(name, shape, source.dtype, rank, ranks)
    if cut is None:
        return Piece(name, source, shape, 0, rows, 0, columns)
    share = cut.stop - cut.start
    part = tuple(share if place == cut.axis else size for place, size in enumerate(shape))
    if cut.axis == 0:
        height = rows // ranks
        return Piece(name, source, part, rank * height, height, 0, columns)
    return Piece(name, source, part, 0, rows, cut.start, share)


def _grouped(pieces: Sequence[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.nbytes > shard_bytes:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    if group:
        yield group


def _blocks(piece: Piece, stream: BinaryIO) -> Iterator[bytes | memoryview]:
    """The piece's bytes in order, at most about BLOCK_BYTES read at a time."""
    item = DTYPE_BYTES[piece.source.dtype]
    row_bytes = piece.nbytes // piece.rows if piece.rows else 0
    width = math.prod(piece.source.shape[-1:]) * item if len(piece.source.shape) > 1 else item
    if row_bytes == width:
        start, left = piece.source.offset + piece.row * width, piece.nbytes
        while left:
            block = _read(stream, start, min(left, BLOCK_BYTES), piece)
            yield block
            start, left = start + len(block), left - len(block)
        return
    step = max(1, BLOCK_BYTES // width)
    for row in range(piece.row, piece.row + piece.rows, step):
        count = min(step, piece.row + piece.rows - row)
        block = _read(stream, piece.source.offset + row * width, count * width, piece)
        table = np.frombuffer(block, np.uint8).reshape(count, width)
        yield np.ascontiguousarray(table[:, piece.column * item : (piece.column + piece.columns) * item]).data


def _read(stream: BinaryIO, offset: int, nbytes: int, piece: Piece) -> bytes:
    block = os.pread(stream.fileno(), nbytes, offset)
    if len(block) != nbytes:
        raise CheckpointError(f"{piece.source.path}: ends inside {piece.name}; fetch it again")
    return block


def _write_shard(out: Path, shard: Shard) -> dict[str, Any]:
    """Writes one file beside its place and renames it; what the journal says of it."""
    target = out / shard.path
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    digest, header = hashlib.sha256(), shard.header()
    with partial.open("wb") as stream:
        for block in _contents(shard, header):
            digest.update(block)
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    partial.rename(target)
    _sync(target.parent)
    return {"bytes": size, "sha256": digest.hexdigest(), "header": _digest(header)}


def _contents(shard: Shard, header: bytes) -> Iterator[bytes | memoryview]:
    yield header
    opened: dict[Path, BinaryIO] = {}
    try:
        for piece in shard.pieces:
            if piece.source.path not in opened:
                for stream in opened.values():
                    stream.close()
                opened = {piece.source.path: piece.source.path.open("rb", buffering=0)}  # type: ignore[dict-item]
            yield from _blocks(piece, opened[piece.source.path])
    finally:
        for stream in opened.values():
            stream.close()


def _begin(out: Path, identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The files that are finished already. Raises StagingError when ``out`` is of another conversion, or of none."""
    mark = out / IDENTITY
    if out.exists() and not mark.exists() and any(entry.name != IDENTITY + ".partial" for entry in out.iterdir()):
        raise StagingError(f"{out}: is not empty and no conversion; name another directory")
    out.mkdir(exist_ok=True)
    if mark.exists():
        known = json.loads(mark.read_text())
        if known != identity:
            differs = ", ".join(sorted(key for key in identity if known.get(key) != identity[key]))
            raise StagingError(f"{out}: holds a conversion with another {differs}; remove it or name another directory")
    else:
        _replace(mark, json.dumps(identity, indent=2, sort_keys=True) + "\n")
    done: dict[str, dict[str, Any]] = {}
    journal = out / JOURNAL
    for line in journal.read_text().splitlines() if journal.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        path = out / entry["file"]
        if path.is_file() and path.stat().st_size == entry["bytes"]:
            done[entry["file"]] = {key: entry[key] for key in ("bytes", "sha256", "header")}
    return done


def _note(out: Path, file: str, facts: Mapping[str, Any]) -> None:
    journal = out / JOURNAL
    torn = journal.exists() and journal.stat().st_size > 0 and not journal.read_bytes().endswith(b"\n")
    with journal.open("ab") as stream:
        stream.write((b"\n" if torn else b"") + json.dumps({"file": file, **facts}).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _finish(
    out: Path,
    model_dir: Path,
    identity: Mapping[str, Any],
    shards: Sequence[Shard],
    done: Mapping[str, Mapping[str, Any]],
) -> None:
    """Indexes, the model's other files, provenance."""
    by_rank: dict[int, dict[str, str]] = {}
    for shard in shards:
        by_rank.setdefault(shard.rank, {}).update({piece.name: shard.file for piece in shard.pieces})
    for rank, weight_map in by_rank.items():
        folder = out / f"rank{rank}"
        for leftover in folder.glob("*.partial"):
            leftover.unlink()
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        _replace(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
        for name in COPIED:
            if (model_dir / name).is_file():
                _replace(folder / name, (model_dir / name).read_text())
    files = {shard.path: {key: done[shard.path][key] for key in ("bytes", "sha256")} for shard in shards}
    _replace(out / PROVENANCE, json.dumps({**identity, "files": files}, indent=2, sort_keys=True) + "\n")


def _sources(model_dir: Path, dtype: str | None) -> dict[str, Source]:
    """Every tensor's place, after the checkpoint's own checks. Raises CheckpointError."""
    with Checkpoint(model_dir) as checkpoint:
        if dtype is not None:
            checkpoint.require_dtype(dtype)
        by_file: dict[str, list[str]] = {}
        for name in checkpoint.names:
            by_file.setdefault(checkpoint.stored(name).file, []).append(name)
    sources: dict[str, Source] = {}
    for file, names in by_file.items():
        path = model_dir / file
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name in names:
            entry = header[name]
            if entry["dtype"] not in DTYPE_BYTES:
                known = ", ".join(DTYPE_BYTES)
                raise CheckpointError(f"{path}: {name} is stored as {entry['dtype']}, not one of {known}")
            sources[name] = Source(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
    for name, source in sources.items():
        if source.dtype == "F8_E4M3":
            scale = sources.get(name + "_scale_inv")
            if scale is None or scale.dtype != "F32":
                raise CheckpointError(f"{source.path}: {name} is fp8 and has no float32 {name}_scale_inv")
    return sources


def _described(sources: Mapping[str, Source]) -> str:
    """Identity of the source's tensors: names, files, places, sizes of the files and when they changed."""
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(f"{name} {source.path.name} {source.offset} {source.dtype} {source.shape}\n".encode())
    for path in sorted({source.path for source in sources.values()}):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _config(model_dir: Path) -> dict[str, Any]:
    try:
        config = json.loads((model_dir / "config.json").read_text())
        if not isinstance(config["num_hidden_layers"], int):
            raise ValueError("num_hidden_layers is not a number")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{model_dir / 'config.json'}: cannot be read ({error!r})") from None
    return dict(config)


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if len(parts) > 2 and parts[1] == "layers" and parts[2].isdigit() else None


def _natural_order(name: str) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    _sync(partial)
    partial.rename(path)
    _sync(path.parent)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256(path: Path) -> str:
    return _digest(path.read_bytes())


def main(argv: list[str] | None = None) -> int:
    """Converts one checkpoint; exit status 1 with a message when it cannot."""
    parser = argparse.ArgumentParser(prog="python -m serve.weights.convert", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help=f"{SINGLE_FILE} or {INDEX_FILE}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets rank0, rank1 ...")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4, 8, 16), help="default %(default)s")
    parser.add_argument("--append-mtp", action="store_true", help="also the MTP layers, in files of their own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="refuse any other stored dtype")
    options = parser.parse_args(argv)
    try:
        print(convert(options.model, options.out, options.ranks, append_mtp=options.append_mtp, dtype=options.dtype))
    except (CheckpointError, StagingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
