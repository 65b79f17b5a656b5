"""The loader: file, line and path in every error, a suggestion where one is near, all errors at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.document import MAX_FILE_BYTES, ConfigError, Document
from configs.load import load_cluster, load_matrix, load_model
from tests.configs.recipes import CONFIGS, GPU_CLUSTER, KEY, MOE_MODEL, gpu_entry, local_entry, space, write_matrix

# The head of the file and its first entry.
LOCAL = "".join(re.split(r"(?m)^(?=  [a-z0-9].*:$)", (CONFIGS / "local.yaml").read_text())[:2])


def errors_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_matrix(path)
    return [str(problem) for problem in caught.value.problems]


def edited(tmp_path: Path, old: str, new: str) -> Path:
    """configs/local.yaml with one change, so that lines can be counted."""
    assert LOCAL.count(old) == 1
    path = tmp_path / "local.yaml"
    path.write_text(LOCAL.replace(old, new))
    return path


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_the_default_matrix_loads_with_its_names_resolved() -> None:
    loaded = next(iter(load_matrix(CONFIGS / "local.yaml").entries.values()))
    assert (loaded.model.name, loaded.cluster.name, loaded.entry.framework) == ("smollm2-135m", "local", "baton")


def test_the_gpu_recipe_of_these_tests_loads(tmp_path: Path) -> None:
    assert load_matrix(write_matrix(tmp_path, gpu_entry())).entries[KEY].cluster.gpus_per_node == 8


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        (
            "enforce-eager: true",
            "enforce-eeger: true",
            "roles.prefill.args.enforce-eeger",
            "Did you mean 'enforce-eager'?",
        ),
        ("    multinode: false", "    multi-node: false", "multi-node", "Did you mean 'multinode'?"),
        ("model: smollm2-135m\n", "model: smolm2-135m\n", "model", "Did you mean 'smollm2-135m'?"),
        ("cluster: local", "cluster: locl", "cluster", "unknown cluster 'locl'. Did you mean 'local'?"),
        ("engine: vllm", "engine: vlm", "roles.prefill.engine", "Did you mean 'vllm'?"),
        ("engine: vllm", "engine: tilert", "roles.prefill.engine", "Possible: vllm, sglang, pegainfer, bundled."),
        ("precision: fp32", "precision: fp33", "precision", "Did you mean 'fp32'?"),
        ("isl: 256", "isl: a lot", "scenarios.fixed-seq-len[0].isl", 'must be a whole number, not "a lot".'),
        ("isl: 256", "isl: true", "scenarios.fixed-seq-len[0].isl", "must be a whole number, not true."),
        ("isl: 256", "isl: '256'", "scenarios.fixed-seq-len[0].isl", 'must be a whole number, not "256".'),
        ("isl: 256", "isl: 0", "scenarios.fixed-seq-len[0].isl", "must be greater than 0, not 0."),
        ("problems: 4", "problems: .inf", "evals[0].problems", "whole number"),
        (
            "deadline-s: 60\n    max-model-len",
            "deadline-s: .nan\n    max-model-len",
            "handoff.deadline-s",
            "finite number",
        ),
        ("disagg: true", "disagg: maybe", "disagg", 'must be true or false, not "maybe".'),
        (
            "conc-list: [1, 4]",
            "conc-list: []",
            "scenarios.fixed-seq-len[0].search-space[0].conc-list",
            "must not be empty",
        ),
        ("conc-list: [1, 4]", "conc-list: [1, 0]", "conc-list[1]", "must be greater than 0, not 0."),
        ("conc-list: [1, 4]", "conc-list: 4", "search-space[0].conc-list", "must be a list, not 4."),
        ("evals:\n      - task: gsm8k", "evals:\n      - task: gsm9k", "evals[0].task", "Possible: gsm8k."),
        ("    description: vLLM", "    description: 7 #", "description", 'Write it in quotes: "7".'),
    ],
)
def test_an_error_says_where_what_and_what_to_do(tmp_path: Path, old: str, new: str, path: str, words: str) -> None:
    matrix = edited(tmp_path, old, new)
    line = line_of(matrix, new.splitlines()[-2 if "max-model-len" in new else -1].strip())
    matching = [error for error in errors_of(matrix) if words in error]
    assert len(matching) == 1
    assert matching[0].startswith(f"{matrix}:{line}:") and path in matching[0]


def test_a_missing_key_is_reported_at_its_parent_with_its_meaning(tmp_path: Path) -> None:
    matrix = edited(tmp_path, "    precision: fp32\n", "")
    line = line_of(matrix, "smollm2-135m-fp32-cpu-vllm-baton")
    assert errors_of(matrix) == [
        f"{matrix}:{line}:3: entries.smollm2-135m-fp32-cpu-vllm-baton: 'precision' is missing. "
        "Precision of the weights, as reported."
    ]


def test_all_errors_of_a_file_are_reported_at_once_in_line_order(tmp_path: Path) -> None:
    first, second, third = local_entry(), local_entry(), local_entry()
    first["cluster"] = "nowhere"
    second["typo"] = 1
    second["model"] = "nothing"
    space(third)["conc-list"] = [2, 2]
    space(third)["decode"]["tp"] = 2
    third["max-model-len"] = 100
    errors = errors_of(write_matrix(tmp_path, first, second, third))
    parts = [
        "unknown cluster",
        "unknown model",
        "unknown key",
        "max-model-len",
        "tp 2 needs GPUs",
        "duplicate concurrency 2",
    ]
    assert len(errors) == len(parts)
    assert all(any(part in error for error in errors) for part in parts)
    lines = [int(error.split(":")[1]) for error in errors]
    assert lines == sorted(lines)


def test_duplicate_keys_are_all_reported_with_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("schema: 1\nentries:\n  a: {}\n  a: {}\nschema: 1\n")
    errors = errors_of(path)
    assert f"{path}:4:3: entries.a: duplicate key, first written in line 3. Keep one." in errors
    assert f"{path}:5:1: schema: duplicate key, first written in line 1. Keep one." in errors


@pytest.mark.parametrize("key", ["a*", "a?", "[ab]"])
def test_wildcard_keys_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": {key: local_entry()}}))
    assert ["wildcards" in error for error in errors_of(path)] == [True]


@pytest.mark.parametrize("key", ["", "../up", "a b", "a/b", ".hidden", "x" * 101, "ключ"])
def test_keys_that_cannot_name_a_folder_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": {key: local_entry()}}))
    assert ["it names folders" in error for error in errors_of(path)] == [True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2", "not valid YAML"),
        ("a: 1\n\tb: 2", "not valid YAML"),
        ("a: [1\nb: 2\nc: 3", "flow sequence that begins in line 1"),
        ("a: b: c", "not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("a: *nowhere", "not valid YAML"),
        ("[" * 600, "nested too deeply"),
        ("a: \x01", "not valid YAML"),
        ("--- {}\n--- {}\n", "not valid YAML"),
        ("a: 0x" + "f" * 10, "unknown key"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("", "must be a mapping"),
        ("- 1", "must be a mapping, not a list"),
        ("text", "must be a mapping"),
        ("1: {}", "keys must be strings"),
        ("{[a]: 1}", "a key must be a plain string"),
        ("a: &a [*a]", "not valid YAML"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "\n".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]" for i in range(8)),
            "aliases",
        ),
        ("schema: 2\nentries: {}", "must be less than or equal to 1"),
    ],
)
def test_malformed_yaml_is_a_config_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    assert words.split()[0] in " ".join(errors_of(path))


def test_malformed_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("schema: 1\nentries:\n  a: [1, 2\n  b: 3\n")
    assert errors_of(path)[0].startswith(f"{path}:4:")


def test_missing_files_folders_and_binaries(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").write_text(LOCAL)
    assert "no such file. Did you mean 'local.yaml'?" in errors_of(tmp_path / "locale.yaml")[0]
    assert "cannot be read" in errors_of(tmp_path)[0]
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    assert "not UTF-8" in errors_of(binary)[0]
    binary.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert "larger than" in errors_of(binary)[0]


def test_a_broken_model_file_is_reported_with_its_own_lines(tmp_path: Path) -> None:
    path = write_matrix(tmp_path, gpu_entry())
    model = tmp_path / "models" / "moe.yaml"
    model.write_text(json.dumps(MOE_MODEL | {"status": "retired", "colour": "red"}, indent=1))
    errors = errors_of(path)
    assert len(errors) == 2 and all(error.startswith(f"{model}:") for error in errors)


Change = Callable[[dict[str, Any]], object]

WRONG_MODELS: list[tuple[Change, str]] = [
    (lambda m: m.update(name="other"), "must equal the file name"),
    (lambda m: m.update(status="deprecated"), "since when and why"),
    (lambda m: m["weights"].update(sha256="beef"), "does not match"),
    (lambda m: m["weights"].update(source="hub"), "'repository' is missing"),
    (lambda m: m["architecture"]["attention"].update(kind="gqa"), "'kv-heads' is missing"),
]


@pytest.mark.parametrize(("change", "words"), WRONG_MODELS)
def test_a_wrong_model_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    data = json.loads(json.dumps(MOE_MODEL))
    change(data)
    path = tmp_path / "moe.yaml"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words):
        load_model(path)


WRONG_CLUSTERS: list[tuple[Change, str]] = [
    (lambda c: c.update(hardware="cpu"), "exclude each other"),
    (lambda c: c.pop("slurm"), "needs 'slurm'"),
    (lambda c: c.update(executor="local"), "nodes must be 1"),
    (lambda c: c["port-range"].update(first=30000), "larger than port-range.last"),
    (lambda c: c.update(env={"HF_TOKEN": "hf_secret"}), "looks like a secret"),
    (lambda c: c.update(env={"A-B": "x"}), "A-B"),
    (lambda c: c.update(env={"A": 1}), "Write it in quotes"),
]


@pytest.mark.parametrize(("change", "words"), WRONG_CLUSTERS)
def test_a_wrong_cluster_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    data = json.loads(json.dumps(GPU_CLUSTER))
    change(data)
    path = tmp_path / "site.yaml"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words) as caught:
        load_cluster(path)
    assert "hf_secret" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("abc:-[]{}&*!|>'\"%@#,?\n \t0.1"), max_size=60))
def test_any_text_parses_or_is_a_config_error(text: str) -> None:
    try:
        Document.parse(Path("x.yaml"), text)
    except ConfigError as error:
        assert error.problems
