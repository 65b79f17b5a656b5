"""Records which flags an engine's programs take, from its wheel's source (read, never imported) or from its guide.

    python scripts/engine_flags.py wheel --engine sglang --version 0.5.23 sglang-0.5.23-*.whl
    python scripts/engine_flags.py guide --engine pegainfer --version e38dfdd8 guide.txt pegainfer-server ...

writes runners/engines/flags/<engine>-<version>.json, which the command-line audit compares recipes with. Choices and
whether a flag takes a value are kept where the source states them as literals.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "runners" / "engines" / "flags"
Flags = dict[str, dict[str, Any]]
# Program -> files of the wheel that define its command line.
PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "vllm.entrypoints.openai.api_server": (
            "vllm/engine/arg_utils.py",
            "vllm/entrypoints/openai/cli_args.py",
            "vllm/entrypoints/launchers/cli_args.py",
        ),
        "vllm.entrypoints.cli.main": (
            "vllm/engine/arg_utils.py",
            "vllm/entrypoints/openai/cli_args.py",
            "vllm/entrypoints/launchers/cli_args.py",
            "vllm/entrypoints/cli/serve.py",
        ),
    },
    "sglang": {"sglang.launch_server": ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/")},
    "sglang-kt": {"sglang.launch_server": ("sglang/srt/server_args.py",)},
    "tilert": {
        "tilert.pd_vllm.decode_server": ("tilert/pd_vllm/decode_server.py",),
        "tilert.pd_vllm.pd_router": ("tilert/pd_vllm/pd_router.py",),
        "tilert.models.preprocess.weight_converter": ("tilert/models/preprocess/weight_converter.py",),
        "tilert.models.glm_5_2_rocm.weight_converter": ("tilert/models/glm_5_2_rocm/weight_converter.py",),
    },
}
SWITCHES = {"store_true", "store_false", "store_const", "count", "help", "version"}


def read_wheel(path: Path, engine: str) -> dict[str, Flags]:
    """Flags of every program of the engine that the wheel holds."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        programs = {}
        for program, places in PROGRAMS[engine].items():
            files = [name for place in places for name in names if _is_at(name, place)]
            flags: Flags = {}
            for name in files:
                flags |= flags_of(wheel.read(name).decode())
            if flags:
                programs[program] = dict(sorted(flags.items()))
    return programs


def flags_of(source: str) -> Flags:
    """Flags that a Python source defines: add_argument calls, and dataclass fields that become arguments."""
    tree = ast.parse(source)
    flags: Flags = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "add_argument":
            flags |= _from_call(node)
        elif isinstance(node, ast.ClassDef):
            flags |= _from_fields(node)
    return flags


def _is_at(name: str, place: str) -> bool:
    return name == place or (place.endswith("/") and name.startswith(place) and name.endswith(".py"))


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _from_call(node: ast.Call) -> Flags:
    names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    options = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    action = options.get("action")
    literal = action.value if isinstance(action, ast.Constant) else None
    name_of_action = action.attr if isinstance(action, ast.Attribute) else getattr(action, "id", "")
    entry: dict[str, Any] = {}
    if literal in SWITCHES or "StoreTrue" in name_of_action or "StoreConst" in name_of_action:
        entry["switch"] = True
    if choices := _strings(options.get("choices")):
        entry["choices"] = choices
    found = {name: entry for name in names if name.startswith("--")}
    unclear = any(keyword.arg is None for keyword in node.keywords)
    if name_of_action == "BooleanOptionalAction" or unclear:
        # vLLM passes what it derives from a config class, and its booleans have a --no- form.
        found |= {f"--no-{name.removeprefix('--')}": {"switch": True} for name in list(found)}
    return found


def _from_fields(node: ast.ClassDef) -> Flags:
    """SGLang's ``name: A[type, Arg(...)]`` and vLLM's frontend dataclass."""
    flags: Flags = {}
    frontend = node.name in ("FrontendArgs", "BaseFrontendArgs")
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        option = f"--{item.target.id.replace('_', '-')}"
        if frontend:
            boolean = ast.unparse(item.annotation) == "bool"
            flags[option] = {"switch": True} if boolean else {}
            if boolean:
                flags[f"--no-{option[2:]}"] = {"switch": True}
        elif isinstance(item.annotation, ast.Subscript) and ast.unparse(item.annotation.value) in ("A", "Annotated"):
            flags |= _from_annotation(option, item.annotation)
    return flags


def _from_annotation(option: str, annotation: ast.Subscript) -> Flags:
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    if len(parts) < 2:
        return {}
    names, entry = [option], {}
    meta = parts[1]
    if isinstance(meta, ast.Call) and _called(meta) == "Arg":
        options = {keyword.arg: keyword.value for keyword in meta.keywords if keyword.arg}
        if _true(options.get("no_cli")):
            return {}
        own = options.get("cli_name")
        names = [own.value] if isinstance(own, ast.Constant) else names
        names += _strings(options.get("aliases"))
        if choices := _strings(options.get("choices")):
            entry["choices"] = choices
    elif not (isinstance(meta, ast.Constant) and isinstance(meta.value, str)):
        return {}
    if ast.unparse(parts[0]) == "bool":
        entry["switch"] = True
    return {name: entry for name in names}


def _strings(node: ast.expr | None) -> list[str]:
    """A literal list or tuple of plain values, as text."""
    if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return []
    values = [item.value for item in node.elts if isinstance(item, ast.Constant)]
    return [str(value) for value in values] if len(values) == len(node.elts) else []


def _true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def read_guide(text: str, programs: Iterable[str], prose: str | None) -> dict[str, Flags]:
    """Flags that a guide shows in the commands of each program; prose flags (by pattern) are the first one's."""
    mentioned = set(re.findall(r"--[a-z][a-z0-9-]+", text)) if prose else set()
    more = {name for name in mentioned if prose and re.search(prose, name)}
    found = {}
    for number, program in enumerate(programs):
        flags = {
            word for command in _commands(text, program) for word in re.findall(r"(?<!\S)--[a-z][a-z0-9_-]+", command)
        }
        found[program] = {name: {} for name in sorted(flags | (set() if number else more))}
    return found


def _commands(text: str, program: str) -> Iterator[str]:
    lines = iter(text.splitlines())
    for line in lines:
        if program not in line:
            continue
        command = line
        while command.rstrip().endswith("\\"):
            command = command.rstrip()[:-1] + " " + next(lines, "")
        yield command


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["wheel", "guide"])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--prose", help="regular expression of flags that a guide only mentions")
    parser.add_argument("--source", help="what to name as the source; default: the file's name")
    parser.add_argument("file", type=Path)
    parser.add_argument("programs", nargs="*", help="programs whose commands a guide shows")
    given = parser.parse_args()
    if given.kind == "wheel":
        programs = read_wheel(given.file, given.engine)
    else:
        programs = read_guide(given.file.read_text(), given.programs, given.prose)
    document = {
        "engine": given.engine,
        "version": given.version,
        "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "source": given.source or given.file.name,
        "programs": programs,
    }
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{given.engine}-{given.version}.json"
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(path, {program: len(flags) for program, flags in programs.items()})


if __name__ == "__main__":
    main()
