"""Patches of third-party engines: pinned to one version and to the bytes of every file, verified before and after.

patches/<engine>/<name>/ holds patch.yaml (the schema below) and patch.diff, a unified diff without fuzz. Nothing is
written unless every file has exactly the bytes that the patch was made for, and every result exactly those it promises.
``python -m runners.patches DISTRIBUTION`` patches what is installed beside the interpreter that runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from configs.base import Strict
from configs.model import Sha256

PATCHES = Path(__file__).resolve().parent.parent / "patches"
PATCH_FILE, DIFF_FILE = "patch.yaml", "patch.diff"
MAX_DIFF_BYTES = 1 << 20
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")

RelativePath = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._/-]+$")]


class PatchError(RuntimeError):
    """A patch cannot be used or applied; nothing has been written. The message says which file and why."""


class PatchedFile(Strict):
    """One file that a patch changes."""

    path: RelativePath = Field(description="Path below the folder the patch is applied to, e.g. vllm/envs.py.")
    before: Sha256 = Field(description="sha256 of the file as shipped, in hex.")
    after: Sha256 = Field(description="sha256 of the file once patched, in hex.")


class PatchRecord(Strict):
    """patch.yaml: what is changed, in which release, why, and until when."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this file's format.")
    engine: str = Field(pattern=r"^[a-z0-9-]+$", description="Distribution that is patched.")
    version: str = Field(min_length=1, description="The one version it is for.")
    reason: str = Field(min_length=1, description="What is wrong without it.")
    upstream: str = Field(pattern=r"^https://\S+$", description="Issue or pull request of the engine's own project.")
    waiver: str = Field(pattern=r"^[a-z0-9.-]+$", description="Name of the waiver: docs/waiver/<name>.md.")
    files: tuple[PatchedFile, ...] = Field(min_length=1, description="Every file that is changed.")


@dataclass(frozen=True)
class Patch:
    """A record with its diff. ``name`` is the folder's."""

    name: str
    folder: Path
    record: PatchRecord
    diff: str


def read_patch(folder: Path) -> Patch:
    """Reads patches/<engine>/<name>. Raises PatchError when it is incomplete or contradicts itself."""
    try:
        record = PatchRecord.model_validate(YAML(typ="safe").load((folder / PATCH_FILE).read_text()))
        diff = (folder / DIFF_FILE).read_text()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise PatchError(f"{folder / PATCH_FILE}: {field}: {first['msg']}") from None
    except YAMLError as error:
        raise PatchError(f"{folder / PATCH_FILE}: not valid YAML: {' '.join(str(error).split())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"{folder}: {PATCH_FILE} and {DIFF_FILE} must both be there and be text: {error}") from None
    if len(diff) > MAX_DIFF_BYTES:
        raise PatchError(f"{folder / DIFF_FILE}: larger than {MAX_DIFF_BYTES} bytes")
    if folder.parent.name != record.engine:
        raise PatchError(f"{folder}: lies below {folder.parent.name}, its engine is {record.engine}")
    told, changed = {file.path for file in record.files}, set(_sections(diff, folder))
    if told != changed:
        raise PatchError(f"{folder}: {PATCH_FILE} names {sorted(told)}, {DIFF_FILE} changes {sorted(changed)}")
    return Patch(folder.name, folder, record, diff)


def patch_folders(patches: Path = PATCHES) -> list[Path]:
    """Folders of all patches, sorted."""
    return sorted(folder for folder in patches.glob("*/*") if folder.is_dir() and not folder.name.startswith("__"))


def patches_for(engine: str, version: str, patches: Path = PATCHES) -> list[Patch]:
    """Patches of exactly that release. Raises PatchError for a broken one."""
    found = [read_patch(folder) for folder in patch_folders(patches) if folder.parent.name == engine]
    return [patch for patch in found if patch.record.version == version]


def apply(root: Path, patch: Patch, version: str) -> Literal["applied", "already"]:
    """Patches the distribution below ``root`` (its site-packages folder), which is of ``version``.

    Applying twice changes nothing. Raises PatchError before anything is written: another version, another file."""
    if version != patch.record.version:
        raise PatchError(
            f"patch {patch.name} is for {patch.record.engine} {patch.record.version}, {version} is installed; "
            "make it again for that version or install the one it is for"
        )
    paths = {file.path: _inside(root, file.path) for file in patch.record.files}
    contents = {name: _read(path) for name, path in paths.items()}
    done = [file.path for file in patch.record.files if _sha256(contents[file.path]) == file.after]
    if len(done) == len(patch.record.files):
        return "already"
    for file in patch.record.files:
        if _sha256(contents[file.path]) != file.before:
            state = "is patched already while others are not" if file.path in done else "is not the shipped file"
            raise PatchError(f"patch {patch.name}: {paths[file.path]} {state}; reinstall {patch.record.engine}")
    sections = _sections(patch.diff, patch.folder)
    results = {}
    for file in patch.record.files:
        results[file.path] = _patched(contents[file.path], sections[file.path], f"patch {patch.name}: {file.path}")
        if _sha256(results[file.path]) != file.after:
            raise PatchError(f"patch {patch.name}: {file.path} does not come out as promised (sha256 after)")
    for name, content in results.items():
        _replace(paths[name], content)
    return "applied"


def _sections(diff: str, folder: Path) -> dict[str, list[str]]:
    """Path -> the lines of its hunks."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in diff.splitlines(keepends=True):
        if line.startswith(("--- ", "diff ", "index ")):
            current = None
        elif line.startswith("+++ "):
            name = line[4:].split("\t")[0].strip().removeprefix("b/")
            if name in sections:
                raise PatchError(f"{folder / DIFF_FILE}: changes {name} twice")
            current = sections.setdefault(name, [])
        elif current is not None:
            current.append(line)
    return sections


def _patched(content: bytes, lines: list[str], where: str) -> bytes:
    """The content with the hunks applied, line by line and without fuzz."""
    old = content.decode().splitlines(keepends=True)
    new: list[str] = []
    position = 0
    for start, body in _hunks(lines, where):
        begin = max(start - 1, 0)
        if begin < position:
            raise PatchError(f"{where}: hunks are out of order")
        new += old[position:begin]
        position = begin
        for line in body:
            mark, text = line[:1], line[1:]
            if mark == "+":
                new.append(text)
                continue
            if position >= len(old) or old[position] != text:
                raise PatchError(f"{where}: line {position + 1} is not what the diff expects")
            if mark == " ":
                new.append(text)
            position += 1
    return "".join(new + old[position:]).encode()


def _hunks(lines: list[str], where: str) -> Iterator[tuple[int, list[str]]]:
    body: list[str] = []
    start = 0
    for line in lines:
        match = _HUNK.match(line)
        if match:
            if body:
                yield start, body
            # A hunk without old lines inserts after the line it names.
            start = int(match.group(1)) + (1 if match.group(2) == "0" else 0)
            body = []
        elif line.startswith("\\"):
            body[-1] = body[-1].removesuffix("\n")
        elif line[:1] in (" ", "+", "-"):
            body.append(line)
        elif line == "\n":
            body.append(" \n")
        else:
            raise PatchError(f"{where}: not a line of a unified diff: {line.strip()[:60]}")
    if not body:
        raise PatchError(f"{where}: the diff has no hunk")
    yield start, body


def _inside(root: Path, name: str) -> Path:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PatchError(f"{name}: must be a path below the patched folder")
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise PatchError(f"{name}: leads out of {root}")
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror}") from None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.chmod(path.stat().st_mode & 0o777)
    temporary.replace(path)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Applies every patch of the installed version of a distribution. 1 when one cannot be applied."""
    parser = argparse.ArgumentParser(prog="python -m runners.patches", description=main.__doc__)
    parser.add_argument("distribution", help="installed distribution to patch, e.g. vllm")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="folder of patches")
    options = parser.parse_args(argv)
    try:
        installed = importlib.metadata.distribution(options.distribution)
        root = Path(str(installed.locate_file("")))
        found = patches_for(options.distribution, installed.version, options.patches)
        for patch in found:
            print(f"{options.distribution} {installed.version}: {patch.name}: {apply(root, patch, installed.version)}")
    except importlib.metadata.PackageNotFoundError:
        print(f"error: {options.distribution} is not installed here", file=sys.stderr)
        return 1
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not found:
        print(f"{options.distribution} {installed.version}: no patch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
