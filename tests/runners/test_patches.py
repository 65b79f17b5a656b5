"""Patches apply to exactly the bytes they were made for, or to nothing; waivers and patches name each other."""

from __future__ import annotations

import difflib
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from runners import patches
from runners.patches import PatchError, apply, patch_folders, patches_for, read_patch
from runners.preflight import Context, Finding, run_checks
from tests.runners.jobs import REPO
from tests.runners.specs import tilert_rocm

SHIPPED = {
    "engine/wire.py": "STRIDES = (1152, 656)\n\n\ndef read(stride):\n    assert stride in STRIDES\n    return stride\n",
    "engine/late.py": "".join(f"line {number}\n" for number in range(40)) + "last without newline",
}
WANTED = {
    "engine/wire.py": SHIPPED["engine/wire.py"]
    .replace("656)", "656, 576)")
    .replace("    return", "    # checked\n    return"),
    "engine/late.py": SHIPPED["engine/late.py"].replace("line 3\n", "").replace("line 30\n", "line 30\nmore\n") + "\n",
}
UPSTREAM = "https://github.com/owner/engine/pull/7"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def diff() -> str:
    parts = []
    for name, old in SHIPPED.items():
        for line in difflib.unified_diff(
            old.splitlines(keepends=True), WANTED[name].splitlines(keepends=True), f"a/{name}", f"b/{name}"
        ):
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts)


def record(**changes: Any) -> dict[str, Any]:
    files = [{"path": name, "before": sha256(SHIPPED[name]), "after": sha256(WANTED[name])} for name in SHIPPED]
    fields = {"schema": 1, "engine": "engine", "version": "0.1.6", "reason": "strides", "upstream": UPSTREAM}
    return fields | {"waiver": "strides", "files": files} | changes


def write_patch(repo: Path, **changes: Any) -> Path:
    folder = repo / "patches" / "engine" / "strides"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "patch.yaml").open("w") as file:
        YAML().dump(record(**changes), file)
    (folder / "patch.diff").write_text(diff())
    return folder


def write_waiver(repo: Path, text: str | None = None, name: str = "strides") -> Path:
    path = repo / "docs" / "waiver" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or f"# patches/engine/{name}\n## What\n## Why\n## Upstream\n{UPSTREAM}\n## Removal\n")
    return path


def install(root: Path) -> Path:
    for name, text in SHIPPED.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def installed(root: Path) -> dict[str, str]:
    return {name: (root / name).read_text() for name in SHIPPED}


def test_a_patch_applies_once_and_again_changes_nothing(tmp_path: Path) -> None:
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path))
    (root / "engine/wire.py").chmod(0o755)
    assert apply(root, patch, "0.1.6") == "applied"
    assert installed(root) == WANTED
    assert (root / "engine/wire.py").stat().st_mode & 0o777 == 0o755
    before = (root / "engine/wire.py").stat().st_mtime_ns
    assert apply(root, patch, "0.1.6") == "already"
    assert (root / "engine/wire.py").stat().st_mtime_ns == before


def test_another_version_is_refused(tmp_path: Path) -> None:
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path))
    with pytest.raises(PatchError, match=r"is for engine 0\.1\.6, 0\.1\.7 is installed"):
        apply(root, patch, "0.1.7")
    assert installed(root) == SHIPPED


def test_another_file_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path))
    (root / "engine/late.py").write_text("edited by hand")
    with pytest.raises(PatchError, match=r"late\.py is not the shipped file; reinstall engine"):
        apply(root, patch, "0.1.6")
    assert (root / "engine/wire.py").read_text() == SHIPPED["engine/wire.py"]


def test_a_half_patched_installation_is_refused(tmp_path: Path) -> None:
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path))
    (root / "engine/wire.py").write_text(WANTED["engine/wire.py"])
    with pytest.raises(PatchError, match="patched already while others are not"):
        apply(root, patch, "0.1.6")


def test_a_result_that_is_not_the_promised_one_is_not_written(tmp_path: Path) -> None:
    files = record()["files"]
    files[0]["after"] = "0" * 64
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path, files=files))
    with pytest.raises(PatchError, match="does not come out as promised"):
        apply(root, patch, "0.1.6")
    assert installed(root) == SHIPPED


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path))
    (root / "engine/late.py").unlink()
    with pytest.raises(PatchError, match=r"late\.py: No such file"):
        apply(root, patch, "0.1.6")


def test_a_path_that_leads_out_is_refused(tmp_path: Path) -> None:
    root, patch = install(tmp_path / "site"), read_patch(write_patch(tmp_path))
    (root / "engine/wire.py").unlink()
    (root / "engine/wire.py").symlink_to(REPO / "pyproject.toml")
    with pytest.raises(PatchError, match="leads out of"):
        apply(root, patch, "0.1.6")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"upstream": "none"}, "upstream"),
        ({"files": []}, "files"),
        ({"extra": 1}, "extra"),
        ({"engine": "other"}, "lies below engine"),
        ({"files": record()["files"][:1]}, "names .*, patch.diff changes"),
    ],
)
def test_a_record_that_contradicts_itself(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        read_patch(write_patch(tmp_path, **changes))


def test_a_diff_that_does_not_fit_the_file(tmp_path: Path) -> None:
    folder = write_patch(tmp_path)
    text = (folder / "patch.diff").read_text().replace(" \n \n def read", " \n \n def wrote")
    (folder / "patch.diff").write_text(text)
    with pytest.raises(PatchError, match="is not what the diff expects"):
        apply(install(tmp_path / "site"), read_patch(folder), "0.1.6")


def test_patches_are_found_by_engine_and_version(tmp_path: Path) -> None:
    write_patch(tmp_path)
    assert [patch.name for patch in patches_for("engine", "0.1.6", tmp_path / "patches")] == ["strides"]
    assert patches_for("engine", "0.1.7", tmp_path / "patches") == []
    assert patches_for("other", "0.1.6", tmp_path / "patches") == []


def test_the_repository_has_no_patch_without_reason() -> None:
    assert patches.PATCHES == REPO / "patches"
    assert [read_patch(folder).name for folder in patch_folders()] == []


def found(repo: Path, **versions: str) -> dict[str, Finding]:
    spec = tilert_rocm(versions={"tilert": "0.1.6.post3"} | versions)
    return {f.code: f for f in run_checks(Context([spec], repo / "results", repo), ("static",))}


def waiver_codes(repo: Path, **versions: str) -> set[str]:
    names = ("patch", "waiver", "image")
    return {code for code in found(repo, **versions) if code.startswith(names) and code != "image-unpinned"}


def test_a_patch_with_its_waiver_is_no_finding(tmp_path: Path) -> None:
    write_patch(tmp_path)
    write_waiver(tmp_path)
    assert waiver_codes(tmp_path, engine="0.1.6") == set()


def test_a_patch_without_waiver(tmp_path: Path) -> None:
    write_patch(tmp_path)
    assert waiver_codes(tmp_path) == {"patch-without-waiver"}
    assert "docs/waiver/strides.md" in found(tmp_path)["patch-without-waiver"].fix


def test_a_waiver_without_patch(tmp_path: Path) -> None:
    write_waiver(tmp_path)
    assert waiver_codes(tmp_path) == {"waiver-without-patch"}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("# patches/engine/strides\n## What\n## Why\n## Upstream\n" + UPSTREAM, "lacks Removal"),
        ("# patches/engine/strides\n## What\n## Why\n## Upstream\n## Removal\n", "does not link"),
    ],
)
def test_an_incomplete_waiver(tmp_path: Path, text: str, missing: str) -> None:
    write_patch(tmp_path)
    write_waiver(tmp_path, text)
    messages = [
        f.message for f in run_checks(Context([], tmp_path, tmp_path), ("static",)) if f.code == "waiver-incomplete"
    ]
    assert any(missing in message for message in messages), messages


def test_a_broken_patch(tmp_path: Path) -> None:
    write_patch(tmp_path, upstream="none")
    write_waiver(tmp_path, name="other", text="## What\n## Why\n## Upstream\nhttps://example.org\n## Removal\n")
    assert waiver_codes(tmp_path) == {"patch-broken"}


def test_a_patch_for_another_version(tmp_path: Path) -> None:
    write_patch(tmp_path)
    write_waiver(tmp_path)
    finding = found(tmp_path, engine="0.1.7")["patch-version-mismatch"]
    assert finding.severity == "warning" and "engine 0.1.7" in finding.message


def test_the_installed_version_is_patched_by_name(tmp_path: Path) -> None:
    write_patch(tmp_path)
    root = install(tmp_path / "site")
    info = root / "engine-0.1.6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 0.1.6\n")

    def patch(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runners.patches", name, "--patches", str(tmp_path / "patches")]
        env = {**os.environ, "PYTHONPATH": f"{REPO}:{root}"}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = patch("engine")
    assert (done.returncode, done.stdout) == (0, "engine 0.1.6: strides: applied\n"), done.stderr
    assert installed(root) == WANTED and "already" in patch("engine").stdout
    assert "not installed" in patch("no-such-engine").stderr
    (root / "engine/late.py").write_text("edited by hand")
    assert patch("engine").returncode == 1
