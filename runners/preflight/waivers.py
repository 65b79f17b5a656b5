"""The image and the engines run as shipped, or a waiver says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from configs.job import JobSpec
from runners.finding import Finding
from runners.patches import Patch, PatchError, patch_folders, read_patch
from runners.preflight.registry import Context, check, error, warning

HEADINGS = ("What", "Why", "Upstream", "Removal")
_LINK = re.compile(r"https://\S+")
# Commands that change what an image ships. Pinned releases in an environment beside it do not.
_CHANGES = re.compile(r"\bgit apply\b|(?<![\w/.-])patch\s+-|\bsed\s+-i\b|/(?:site|dist)-packages/")
_FORKED = re.compile(r"[A-Za-z0-9_.\[\],-]+==[0-9A-Za-z.]+\+[A-Za-z0-9.]+|(?:git\+)?https?://\S+|\S+\.whl\b")

PATCH_BROKEN = error(
    code="patch-broken",
    phase="static",
    description="a patch is incomplete, or its record and its diff contradict each other",
)
NO_WAIVER = error(
    code="patch-without-waiver",
    phase="static",
    description="an engine patch that no waiver explains",
    seen="InferenceX's review checklist",
)
NO_PATCH = warning(
    code="waiver-without-patch",
    phase="static",
    description="a waiver for a patch or recipe that is gone",
)
INCOMPLETE = error(
    code="waiver-incomplete",
    phase="static",
    description="a waiver without what, why, upstream link or removal plan",
    seen="InferenceX #2533",
)
VERSION = warning(
    code="patch-version-mismatch",
    phase="static",
    description="a patch exists for another version of an engine that a job runs: it is not applied",
    seen="InferenceX #3330",
)
IMAGE_MODIFIED = error(
    code="image-modified",
    phase="static",
    description="a step changes files of the image or installs a forked build, and no waiver says why",
    seen="InferenceX #2650",
)


@check(PATCH_BROKEN, NO_WAIVER, NO_PATCH, INCOMPLETE, VERSION)
def patches_and_waivers(context: Context) -> Iterator[Finding]:
    """Patches and waivers name each other."""
    patches: list[Patch] = []
    for folder in patch_folders(context.repo / "patches"):
        try:
            patches.append(read_patch(folder))
        except PatchError as reason:
            yield PATCH_BROKEN.at(_name(context, folder), str(reason), "correct patch.yaml or make the diff again")
    waivers = context.repo / "docs" / "waiver"
    for patch in patches:
        waiver = waivers / f"{patch.record.waiver}.md"
        if not waiver.is_file():
            message = f"patch {patch.name} names the waiver {patch.record.waiver}, which is not there"
            fix = f"write docs/waiver/{waiver.name} with the headings {', '.join(HEADINGS)}"
            yield NO_WAIVER.at(_name(context, patch.folder), message, fix)
        elif patch.record.upstream not in waiver.read_text():
            message = f"{waiver.name} does not link {patch.record.upstream}, the upstream of patch {patch.name}"
            yield INCOMPLETE.at(_name(context, waiver), message, "add the link below ## Upstream")
        yield from _versions(context, patch)
    wanted = {patch.record.waiver for patch in patches} | {spec.key for spec in context.specs if _changes(spec)}
    for waiver in sorted(waivers.glob("*.md")):
        if waiver.name == "README.md":
            continue
        yield from _complete(context, waiver)
        # A recipe's waiver may belong to a matrix that is not loaded; one for a patch says so.
        if waiver.stem not in wanted and "patches/" in waiver.read_text():
            message = f"{waiver.name} explains no patch that is there"
            yield NO_PATCH.at(_name(context, waiver), message, "remove it, or the patch that it names was lost")


def _versions(context: Context, patch: Patch) -> Iterator[Finding]:
    for spec in context.specs:
        used = spec.versions.get(patch.record.engine)
        if used is not None and used != patch.record.version:
            message = f"{spec.key} runs {patch.record.engine} {used}; patch {patch.name} is for {patch.record.version}"
            fix = "remove the patch if that version needs none, else make it again for it"
            yield VERSION.at(context.where(spec), message, fix)


def _complete(context: Context, waiver: Path) -> Iterator[Finding]:
    text = waiver.read_text()
    missing = [name for name in HEADINGS if not re.search(rf"^#+ {name}\b", text, re.MULTILINE)]
    if missing:
        message = f"{waiver.name} lacks {', '.join(missing)}"
        yield INCOMPLETE.at(_name(context, waiver), message, f"add the headings {', '.join(missing)}")
    elif not _LINK.search(text):
        message = f"{waiver.name} has no link to an upstream issue or pull request"
        yield INCOMPLETE.at(_name(context, waiver), message, "add the link below ## Upstream")


@check(IMAGE_MODIFIED)
def modified_images(context: Context) -> Iterator[Finding]:
    """Steps before a start that change what the image ships."""
    for spec in context.specs:
        changes = _changes(spec)
        if changes and not (context.repo / "docs" / "waiver" / f"{spec.key}.md").is_file():
            name, what = changes[0]
            message = f"{name}: '{what}' changes what was shipped"
            fix = f"use a released version, or write docs/waiver/{spec.key}.md"
            yield IMAGE_MODIFIED.at(context.where(spec, "roles", name.partition("-")[0]), message, fix)


def _changes(spec: JobSpec) -> list[tuple[str, str]]:
    found = []
    for process in spec.processes:
        for text in (
            *(part for step in process.prepare for command in step.commands for part in command),
            *process.argv,
        ):
            match = _CHANGES.search(text) or (_FORKED.search(text) if "pip" in text and "install" in text else None)
            if match:
                found.append((process.name, match.group(0).strip()))
    return found


def _name(context: Context, path: Path) -> str:
    return str(path.relative_to(context.repo))
