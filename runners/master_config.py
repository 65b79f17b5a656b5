"""An InferenceX master config -> a matrix of ours, with what it could not carry and what is wrong in the original.

The original names scripts and settings by convention (a script for each model, precision, GPU and framework; free text
"K=V" settings), so much of a recipe lies outside the file. What cannot be known from it is reported and never guessed.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ruamel.yaml import YAML

from configs.document import ConfigError, Document, YamlPath, dotted
from configs.load import CONFIGS_DIR, KEY, load_cluster, load_matrix, load_model
from configs.suggest import suggestion

Kind = Literal["wrong", "not-carried"]
HEADER = "# yaml-language-server: $schema=schema/matrix.json\n"
ALONE = {"vllm": "vllm", "sglang": "sglang"}  # framework -> engine of an aggregated server
TILERT_DEPTH = 3
# What its pairing rules leave no choice in (configs/check_pairs.py); the original has it in a script.
TILERT_PREFILL = {"dtype": "bfloat16", "enforce-eager": True, "block-size": 64}
TILERT_KV = {"nvidia": ("fp8_ds_mla", "fp8"), "amd": ("bfloat16", "bfloat16")}
SIZES = ("tp", "pp", "dcp-size", "pcp-size", "ep", "dp-attn")
CONCURRENCY = ("conc-list", "conc-start", "conc-end", "conc-step")
NODES = {"prefill": "PREFILL_NODES", "decode": "DECODE_NODES"}
IMAGES = {"prefill": "PREFILL_IMAGE", "decode": "DECODE_IMAGE"}
DEPTH, CONFIG_FILE = "DECODE_MTP_SIZE", "CONFIG_FILE"
SETTINGS = (
    *(*NODES.values(), *IMAGES.values(), DEPTH, CONFIG_FILE),
    *("SYNTHETIC_ACCEPTANCE", "SYNTHETIC_ACCEPTANCE_LENGTH", "SLURM_PARTITION", "GPUS_PER_NODE"),
    *("EVAL_CONFIG_FILE", "CLIENT_IMAGE", "PREFILL_WORKERS", "DECODE_WORKERS"),
)


class ImportProblem(NamedTuple):
    """Something that is wrong in the original, or that a matrix of ours cannot carry."""

    kind: Kind
    key: str
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}{' ' + self.hint if self.hint else ''}"


@dataclass
class Imported:
    """What came of a file: a loadable matrix, and why it is not all of the original."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[ImportProblem] = field(default_factory=list)
    seen: int = 0

    def yaml(self) -> str:
        """The matrix as text; empty when nothing could be carried."""
        if not self.entries:
            return ""
        stream = io.StringIO()
        writer = YAML(typ="safe", pure=True)
        writer.default_flow_style = False
        writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        writer.dump({"schema": 1, "entries": self.entries}, stream)
        return HEADER + stream.getvalue()


@dataclass(frozen=True)
class Surroundings:
    """What the file is read against: our profiles, and the original's own files where they are at hand."""

    models: Mapping[str, str]  # hf id in lower case -> name of a model file
    deprecated: Mapping[str, str]  # name of a model file -> why it is
    clusters: Mapping[str, str]  # name of a cluster file -> hardware key
    runners: frozenset[str] | None = None
    checkout: Path | None = None
    draft_depth: int | None = None


def surroundings(
    *, runners: Path | None = None, checkout: Path | None = None, draft_depth: int | None = None
) -> Surroundings:
    """Our profiles, with the runner labels of a runners.yaml and a checkout of the original. Raises ConfigError."""
    models = [load_model(path) for path in sorted((CONFIGS_DIR / "models").glob("*.yaml"))]
    clusters = [load_cluster(path) for path in sorted((CONFIGS_DIR / "clusters").glob("*.yaml"))]
    labels: frozenset[str] | None = None
    if runners is not None:
        data = Document.read(runners).data
        data = data if isinstance(data, dict) else {}
        labels = frozenset({*(data.get("labels") or {}), *(data.get("hardware") or {})})
    return Surroundings(
        models={model.hf_id.lower(): model.name for model in models},
        deprecated={model.name: model.deprecation or "" for model in models if model.status == "deprecated"},
        clusters={cluster.name: cluster.hardware for cluster in clusters},
        runners=labels,
        checkout=checkout,
        draft_depth=draft_depth,
    )


def import_master(path: Path, around: Surroundings) -> Imported:
    """Reads a master config. Raises ConfigError when the file is no YAML mapping of entries."""
    document = Document.read(path)
    if not isinstance(document.data, dict):
        raise ConfigError([document.problem((), "a master config is a mapping of keys to entries.")])
    result = Imported(seen=len(document.data))
    for problem in document.problems:
        where = f"{problem.file}:{problem.line}"
        result.problems.append(ImportProblem("wrong", problem.path.partition(".")[0], where, problem.message))
    for key, data in document.data.items():
        reader = _Entry(document, str(key), data, around)
        entry = reader.read()
        result.problems += reader.problems
        if entry is not None:
            result.entries[str(key)] = entry
    _drop_unloadable(result)
    return result


def _drop_unloadable(result: Imported) -> None:
    """Our own loader has the last word: what it refuses is reported and left out."""
    if not result.entries:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.yaml"
        path.write_text(result.yaml())
        try:
            load_matrix(path)
        except ConfigError as error:
            for problem in error.problems:
                key = next((key for key in result.entries if problem.path.startswith(f"entries.{key}")), "")
                where = problem.path.removeprefix("entries.")
                result.problems.append(ImportProblem("not-carried", key, where, problem.message, problem.hint))
            refused = {problem.key for problem in result.problems if problem.key in result.entries}
            bad = {key for key in refused if any(p.path.startswith(f"entries.{key}") for p in error.problems)}
            result.entries = {key: entry for key, entry in result.entries.items() if key not in bad}


class _Entry:
    """One key of the original."""

    def __init__(self, document: Document, key: str, data: Any, around: Surroundings) -> None:
        self.document, self.key, self.around = document, key, around
        self.data: dict[str, Any] = data if isinstance(data, dict) else {}
        self.problems: list[ImportProblem] = []
        self.images: dict[str, str] = {}
        self.depth: int | None = None

    def read(self) -> dict[str, Any] | None:
        """The entry in our words, or None when too little of it can be carried."""
        if not KEY.fullmatch(self.key):
            self._say("wrong", (), "a key is at most 100 letters, digits, '.', '_' and '-'.")
            return None
        model, cluster, roles = self._model(), self._cluster(), self._roles()
        self._script()
        scenarios = self._scenarios()
        if model is None or cluster is None or roles is None or not scenarios:
            return None
        disagg = "prefill" in roles
        entry: dict[str, Any] = {
            "description": f"Imported from {Path(self.document.name).name}.",
            "image": str(self.data.get("image")),
            "model": model,
            "precision": self.data.get("precision"),
            "framework": self.data.get("framework"),
            "cluster": cluster,
            "multinode": bool(self.data.get("multinode")),
            "disagg": disagg,
            "roles": roles,
            "scenarios": scenarios,
        }
        for role, image in self.images.items():
            if role in roles:
                roles[role]["image"] = image
        if disagg:
            entry["kv-p2p-transfer"] = self._lifted("kv-p2p-transfer")
            entry["handoff"] = {"kv-dtype": TILERT_KV[self._vendor()][1]}
            entry["router"] = self._lifted("router")
            entry = {name: value for name, value in entry.items() if value is not None}
        if model in self.around.deprecated:
            self._say("wrong", ("model",), f"the model is deprecated: {self.around.deprecated[model]}")
            entry["deprecated-model-reason"] = "imported; say here why it is measured all the same"
        return entry

    def _say(self, kind: Kind, path: YamlPath, message: str, hint: str = "") -> None:
        problem = self.document.problem((self.key, *path), message)
        where = f"{problem.file}:{problem.line}: {dotted((self.key, *path))}"
        self.problems.append(ImportProblem(kind, self.key, where, message, hint))

    def _model(self) -> str | None:
        wanted = str(self.data.get("model", ""))
        found = self.around.models.get(wanted.lower())
        if found is None:
            self._say("not-carried", ("model",), f"there is no profile of {wanted} in configs/models.")
        return found

    def _cluster(self) -> str | None:
        label = str(self.data.get("runner", ""))
        if self.around.runners is not None and label not in self.around.runners:
            self._say("wrong", ("runner",), f"unknown runner '{label}'.", suggestion(label, self.around.runners))
        name = label.removeprefix("cluster:")
        if name in self.around.clusters:
            return name
        hardware = name.partition("-")[0]
        same = [cluster for cluster, has in self.around.clusters.items() if has == hardware]
        if len(same) != 1:
            several = f"several sites have {hardware}: {', '.join(same)}" if same else f"no site here has {hardware}"
            self._say("not-carried", ("runner",), f"'{label}' names no site: {several}.")
            return None
        return same[0]

    def _roles(self) -> dict[str, dict[str, Any]] | None:
        framework = str(self.data.get("framework", ""))
        if framework == "tilert":
            args = {**TILERT_PREFILL, "kv-cache-dtype": TILERT_KV[self._vendor()][0]}
            return {
                "prefill": {"engine": "vllm", "args": args},
                "decode": {"engine": "tilert", "args": {"senders": 1}},
                "router": {"engine": "tilert"},
            }
        if framework in ALONE:
            if self.data.get("disagg"):
                self._say("not-carried", ("framework",), f"{framework} hands over to no decode engine of ours.")
                return None
            return {"aggregated": {"engine": ALONE[framework]}}
        self._say("not-carried", ("framework",), f"'{framework}' is no engine here.", suggestion(framework, ALONE))
        return None

    def _vendor(self) -> str:
        return "amd" if str(self.data.get("runner", "")).removeprefix("cluster:").startswith("mi") else "nvidia"

    def _script(self) -> None:
        """The file that the original would start by convention; only a checkout can tell whether it is there."""
        root = self.around.checkout
        if root is None:
            return
        hardware = str(self.data.get("runner", "")).removeprefix("cluster:").partition("-")[0]
        stem = f"{self.data.get('model-prefix')}_{self.data.get('precision')}_{hardware}"
        folder = root / "benchmarks" / ("multi_node" if self.data.get("multinode") else "single_node")
        if any(True for _ in self._settings_named(CONFIG_FILE)):
            return  # started by its recipe files instead, which are looked for one by one
        if not any(path.name.startswith(stem) for path in folder.rglob("*.sh")):
            self._say("wrong", (), f"no script {folder.relative_to(root)}/**/{stem}*.sh would start it.")

    def _lifted(self, name: str) -> Any:
        """A value that may stand at the top or in every search-space entry; None when those differ."""
        if name in self.data:
            return self.data[name]
        values = [space.get(name) for _, space in self._spaces()]
        if values and all(value == values[0] for value in values):
            return values[0]
        self._say("not-carried", (), f"the search space has more than one {name}.", "Split the entry.")
        return None

    def _spaces(self) -> Iterator[tuple[YamlPath, dict[str, Any]]]:
        scenarios = self.data.get("scenarios")
        for kind, items in (scenarios if isinstance(scenarios, dict) else {}).items():
            for index, item in enumerate(items if isinstance(items, list) else ()):
                spaces = item.get("search-space") if isinstance(item, dict) else None
                for number, space in enumerate(spaces if isinstance(spaces, list) else ()):
                    if isinstance(space, dict):
                        yield ("scenarios", str(kind), index, "search-space", number), space

    def _settings_named(self, name: str) -> Iterator[str]:
        for _, space in self._spaces():
            for role in ("prefill", "decode"):
                worker = space.get(role)
                for text in (worker.get("additional-settings") or ()) if isinstance(worker, dict) else ():
                    if str(text).startswith(f"{name}="):
                        yield str(text).partition("=")[2]

    def _scenarios(self) -> dict[str, list[dict[str, Any]]]:
        carried: dict[str, list[dict[str, Any]]] = {}
        scenarios = self.data.get("scenarios")
        for kind, items in (scenarios if isinstance(scenarios, dict) else {}).items():
            if kind not in ("fixed-seq-len", "agentic-coding"):
                self._say("wrong", ("scenarios", str(kind)), "unknown scenario.")
                continue
            for index, item in enumerate(items if isinstance(items, list) else ()):
                at: YamlPath = ("scenarios", str(kind), index)
                given = item if isinstance(item, dict) else {}
                spaces = [
                    space
                    for number, raw in enumerate(given.get("search-space") or ())
                    if (space := self._space((*at, "search-space", number), raw, agentic=kind == "agentic-coding"))
                ]
                if not spaces:
                    continue
                names = ("isl", "osl") if kind == "fixed-seq-len" else ("dram-utilization",)
                scenario = {name: given[name] for name in names if name in given}
                carried.setdefault(str(kind), []).append({**scenario, "search-space": spaces})
        return carried

    def _space(self, at: YamlPath, raw: Any, *, agentic: bool) -> dict[str, Any] | None:
        data = raw if isinstance(raw, dict) else {}
        space: dict[str, Any] = {name: data[name] for name in CONCURRENCY if name in data}
        if "conc-list" in space:
            space["conc-list"] = self._unrepeated(at, space["conc-list"])
        workers = self._workers(at, data)
        if workers is None:
            return None
        space |= workers
        method = data.get("spec-decoding", "none")
        if method != "none":
            depth = self.depth or (TILERT_DEPTH if self.data.get("framework") == "tilert" else None)
            depth = depth or self.around.draft_depth
            if depth is None:
                message = f"'{method}' without {DEPTH}: the draft depth is hidden in the engine's script."
                self._say("not-carried", (*at, "spec-decoding"), message, "Give it with --draft-depth.")
                return None
            space |= {"spec-decoding": method, "draft-depth": depth}
        if agentic:
            if method != "none":
                space |= {"acceptance": "simulated", "thinking": "thinking-on"}
            for name in ("kv-offloading", "kv-offload-backend"):
                if name in data:
                    space[name] = data[name]
        return space

    def _unrepeated(self, at: YamlPath, values: Any) -> list[Any]:
        unique = list(dict.fromkeys(values if isinstance(values, list) else [values]))
        if isinstance(values, list) and len(unique) < len(values):
            self._say("wrong", (*at, "conc-list"), "a concurrency is repeated: the point would be measured twice.")
        return unique

    def _workers(self, at: YamlPath, data: dict[str, Any]) -> dict[str, Any] | None:
        if "prefill" not in data and "decode" not in data:
            return {"aggregated": {"num-worker": 1, **self._sizes(data)}}
        workers: dict[str, Any] = {}
        for role in ("prefill", "decode"):
            worker = data.get(role)
            if not isinstance(worker, dict):
                self._say("wrong", at, f"'{role}' workers are missing.")
                return None
            self._settings((*at, role), role, worker)
            workers[role] = {"num-worker": worker.get("num-worker", 1), **self._sizes(worker)}
        if workers["decode"]["num-worker"] == 0:
            if workers["prefill"]["num-worker"] != 1:
                self._say("not-carried", at, "several aggregated workers behind a router.", "Use one worker.")
                return None
            return {"aggregated": workers["prefill"]}
        return workers

    def _sizes(self, data: dict[str, Any]) -> dict[str, Any]:
        return {name: data[name] for name in SIZES if data.get(name) is not None}

    def _settings(self, at: YamlPath, role: str, worker: dict[str, Any]) -> None:
        """Free text "K=V" settings: known ones are understood, the others would only be noticed on the cluster."""
        for number, text in enumerate(worker.get("additional-settings") or ()):
            path = (*at, "additional-settings", number)
            name, equals, value = str(text).partition("=")
            if not equals:
                self._say("wrong", path, f"'{text}' is no K=V setting.")
            elif name not in SETTINGS:
                self._say("wrong", path, f"unknown setting {name}.", suggestion(name, SETTINGS))
            elif name == IMAGES[role]:
                self.images[role] = value
            elif name == DEPTH:
                self.depth = int(value) if value.isdigit() and int(value) else self.depth
            elif name == CONFIG_FILE:
                self._config_file(path, value)
            elif name not in NODES.values():
                self._say("not-carried", path, f"{name} has no field here.")

    def _config_file(self, path: YamlPath, value: str) -> None:
        root = self.around.checkout
        if root is not None:
            base = root / "benchmarks" / "multi_node" / "srt-slurm-recipes"
            if not (base / value.removeprefix("recipes/")).exists():
                self._say("wrong", path, f"{value} is not in the checkout: it comes from elsewhere at run time.")
        self._say("not-carried", path, f"the engine's arguments are in {value}, another format.")
