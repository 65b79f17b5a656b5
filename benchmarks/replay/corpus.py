"""Reads recorded sessions: a folder of weka traces, a mooncake JSONL, a generated corpus or one from the hub."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay.session import Piece, Session, Turn
from configs.job import AgentXPoint, TraceCorpus

MOONCAKE_BLOCK_TOKENS = 512


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names file and line, and what is wrong."""


def load(point: AgentXPoint, work_dir: Path) -> list[Session]:
    """All sessions of the point's corpus, in its order; ``work_dir`` receives a generated one. Raises CorpusError."""
    corpus = point.corpus
    if corpus.source == "generated":
        from benchmarks.replay.generated import generate

        path, block_tokens = generate(point, work_dir)
        return read_mooncake(path, block_tokens)
    sessions = read_hub(corpus) if corpus.source == "hub" else read_path(Path(corpus.location))
    if not sessions:
        raise CorpusError(f"{corpus.location} holds no sessions")
    return sessions


def within(sessions: Sequence[Session], max_context_tokens: int) -> tuple[list[Session], int]:
    """(sessions whose longest context fits, how many were left out)."""
    kept = [session for session in sessions if session.context_tokens() <= max_context_tokens]
    return kept, len(sessions) - len(kept)


def read_path(path: Path) -> list[Session]:
    """A folder of weka traces (*.json, one session each), or of or with mooncake files (*.jsonl)."""
    if path.is_file():
        return read_mooncake(path) if path.suffix == ".jsonl" else [read_weka(path)]
    if not path.is_dir():
        raise CorpusError(f"{path}: no such folder or file of recorded sessions")
    traces, lists = sorted(path.glob("*.json")), sorted(path.glob("*.jsonl"))
    if bool(traces) == bool(lists):
        what = "both *.json (weka) and *.jsonl (mooncake)" if traces else "neither *.json nor *.jsonl"
        raise CorpusError(f"{path} holds {what}; give one format")
    return [read_weka(trace) for trace in traces] or [one for each in lists for one in read_mooncake(each)]


def read_hub(corpus: TraceCorpus) -> list[Session]:
    """Weka traces of a data set on the hub, one a row. Raises CorpusError when it cannot be had."""
    from datasets import load_dataset

    try:
        rows = load_dataset(corpus.location, split="train")
        return [weka_session(dict(row), f"{corpus.location} row {number}") for number, row in enumerate(rows)]
    except CorpusError:
        raise
    except Exception as error:  # the hub's client raises whatever its transports raise
        message = str(error).strip().partition("\n")[0]
        raise CorpusError(
            f"corpus {corpus.name}: {corpus.location} cannot be had from the hub ({type(error).__name__}: {message});"
            " check HF_HOME, HF_TOKEN and the network, or give a folder with 'trace'"
        ) from error


def read_mooncake(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[Session]:
    """Rows of one ``session_id`` are its turns and tell what each adds; a row without one is a session of its own."""
    grouped: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _object(line, where)
        grouped.setdefault(str(row.get("session_id") or f"row-{number}"), []).append((where, row))
    first = Counter(block for rows in grouped.values() for block in dict.fromkeys(rows[0][1].get("hash_ids") or ()))
    return [_mooncake_session(name, rows, block_tokens, first) for name, rows in grouped.items()]


def _mooncake_session(
    name: str, rows: Sequence[tuple[str, dict[str, Any]]], block_tokens: int, first: Mapping[Any, int]
) -> Session:
    turns: list[Turn] = []
    system: tuple[Piece, ...] = ()
    for index, (where, row) in enumerate(rows):
        new = _blocks("", row.get("hash_ids") or (), _count(row, "input_length", where), block_tokens)
        new = new or (Piece(f"{name}#{index}", _count(row, "input_length", where)),)
        if index == 0:
            # What other sessions begin with as well is a harness's system prompt; the last block stays the user's.
            shared = sum(1 for _ in _while_shared(row.get("hash_ids") or (), first))
            system, new = new[: min(shared, len(new) - 1)], new[min(shared, len(new) - 1) :]
        delay_s = float(row.get("delay") or 0.0) / 1e3
        answer = turns[-1].output_tokens if turns else 0
        output = _count(row, "output_length", where)
        turns.append(Turn(new, answer, output, delay_s, by_tool=bool(row.get("tool_result"))))
    return Session(name, system, tuple(turns))


def _while_shared(blocks: Iterable[Any], first: Mapping[Any, int]) -> Iterator[Any]:
    for block in blocks:
        if first[block] < 2:
            return
        yield block


def read_weka(path: Path) -> Session:
    """One kv-cache-tester trace."""
    return weka_session(_object(path.read_text(), str(path)), str(path))


def weka_session(trace: Mapping[str, Any], where: str) -> Session:
    """A weka trace's own requests, with its subagents under the turn that they follow. Raises CorpusError."""
    try:
        scope, block = str(trace["id"]), int(trace["block_size"])
        head = int(trace.get("tool_tokens") or 0) + int(trace.get("system_tokens") or 0)
        return _weka_agent(scope, scope, block, head, list(trace["requests"]), where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(f"{where}: not a weka trace: {error!r}") from error


def _weka_agent(
    scope: str, name: str, block: int, head_tokens: int, requests: Sequence[Mapping[str, Any]], where: str
) -> Session:
    turns: list[Turn] = []
    subagents: dict[int, tuple[Session, ...]] = {}
    system: tuple[Piece, ...] = ()
    before: Mapping[str, Any] | None = None
    for request in requests:
        if request.get("type") == "subagent":
            inner = [one for one in request.get("requests") or () if one.get("type") != "subagent"]
            if inner:
                tokens = int(request.get("tool_tokens") or 0) + int(request.get("system_tokens") or 0)
                child_name = f"{name}/{request.get('agent_id') or 'agent'}.{sum(map(len, subagents.values()))}"
                child = _weka_agent(scope, child_name, block, tokens, inner, where)
                at = max(0, len(turns) - 1)
                subagents[at] = (*subagents.get(at, ()), child)
            continue
        length = _count(request, "in", where)
        if before is None:
            whole = _weka_blocks(scope, name, 0, request, length, block)
            cut = min(head_tokens // block, len(whole) - 1)
            system, new, answer, rewrites = whole[:cut], whole[cut:], 0, False
        elif _continues(before, request):
            added = length - int(before["in"])
            answer = min(int(before["out"]), added - 1)
            new, rewrites = (Piece(f"{name}#{len(turns)}", added - answer),), False
        else:
            whole = _weka_blocks(scope, name, len(turns), request, length, block)
            same = min(len(system), len(whole) - 1)
            kept = same if whole[:same] == system else 0
            new, answer, rewrites = whole[kept:], 0, True
            if kept < len(system):
                new = (Piece(f"{name}#{len(turns)}", max(1, length - sum(p.tokens for p in system))),)
        turns.append(
            Turn(
                new,
                answer,
                _count(request, "out", where),
                0.0 if before is None else _weka_delay_s(before, request),
                by_tool="tool_result" in (request.get("input_types") or ()),
                rewrites=rewrites,
            )
        )
        before = request
    if not turns:
        raise CorpusError(f"{where}: {name} has no requests")
    return Session(name, system, tuple(turns), subagents)


def _continues(before: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """The prompt is the previous one and more. Only the previous prompt's last block may differ: it was not full."""
    if int(request["in"]) <= int(before["in"]) + 1:
        return False
    old, new = list(before.get("hash_ids") or ()), list(request.get("hash_ids") or ())
    return old[:-1] == new[: max(0, len(old) - 1)]


def _weka_delay_s(before: Mapping[str, Any], request: Mapping[str, Any]) -> float:
    """End of the previous request to the start of this one; the recorded think time where its length is not known."""
    if before.get("api_time") is not None:
        return max(0.0, float(request["t"]) - float(before["t"]) - float(before["api_time"]))
    if request.get("think_time") is not None:
        return max(0.0, float(request["think_time"]))
    return max(0.0, float(request["t"]) - float(before["t"]))


def _weka_blocks(
    scope: str, name: str, turn: int, request: Mapping[str, Any], length: int, block: int
) -> tuple[Piece, ...]:
    return _blocks(f"{scope}/", request.get("hash_ids") or (), length, block) or (Piece(f"{name}#{turn}", length),)


def _blocks(scope: str, hash_ids: Sequence[Any], tokens: int, block: int) -> tuple[Piece, ...]:
    """Blocks of ``block`` tokens, the last one shorter; () when the ids do not cover the length."""
    count = -(-tokens // block)
    if len(hash_ids) < count or count == 0:
        return ()
    sizes = [block] * (count - 1) + [tokens - block * (count - 1)]
    # A short block is another text than the full one of the same id.
    return tuple(
        Piece(f"{scope}{key}" + ("" if size == block else f":{size}"), size)
        for key, size in zip(hash_ids[:count], sizes, strict=True)
    )


def _count(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorpusError(f"{where}: {name} must be a positive number of tokens, found {value!r}")
    return value


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: a JSON object is expected")
    return value
