"""What is sent, by whom and when: the recorded sessions as conversations for aiperf, and what they should find cached.

A lane is one of the point's concurrent sessions. The first session of every lane begins inside its record (a share of
its turns between start-min-ratio and start-max-ratio): the turns before are history, and the last of them, up to
warmup-requests-per-lane, are sent as warm-up so that the servers hold that history. All later sessions begin at their
first turn. Gaps are the recorded ones, cut at idle-cap-s. When whole sessions are asked for, those are all there is;
else the corpus is repeated, each pass with words of its own, until it outlasts the duration.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.dataset import ChatTokenizer
from benchmarks.records import RequestRecord
from benchmarks.replay.session import Piece, Session
from benchmarks.replay.text import Message, Template, Words, answer_message, tool_message
from configs.job import AgentXPoint

# No server answers faster than this; sessions are repeated until they would outlast the duration even then.
LEAST_REQUEST_S = 0.03
LEAST_TOKEN_S = 0.001
# About 2 GB of text. A client that comes to its end all the same begins anew, and the point is replay_repeated.
MAX_TOKENS = 400_000_000


class PlanError(ValueError):
    """No replay can be made of these sessions; the message says what to change."""


@dataclass(frozen=True)
class PlannedTurn:
    """One request. ``shared_tokens`` are the prompt's first tokens that an earlier request of the plan began with."""

    prompt_tokens: int
    output_tokens: int
    delay_s: float
    by_tool: bool
    joins: bool
    rewrites: bool
    shared_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns that one client sends one after the other. ``lane`` is set for the first session of a lane."""

    id: str
    session: str
    warmup: bool
    parent: str | None
    lane: int | None
    first_turn: int
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True)
class Plan:
    """The whole replay, in sending order of its conversations; subagents stand behind their parents."""

    conversations: tuple[Conversation, ...]
    sessions: int
    dropped_sessions: int
    passes: int
    cut_gaps: int
    tool_turns: int
    renders_tools: bool
    dataset_sha256: str = ""
    by_id: dict[str, Conversation] = field(default_factory=dict, compare=False, repr=False)

    @property
    def warmup(self) -> list[Conversation]:
        """Conversations of the warm-up, none of which is a subagent's."""
        return [one for one in self.conversations if one.warmup]

    @property
    def roots(self) -> list[Conversation]:
        """Measured conversations that the client starts by itself."""
        return [one for one in self.conversations if not one.warmup and one.parent is None]

    def turn(self, record: RequestRecord) -> PlannedTurn | None:
        """What was planned for the record, None when nothing was."""
        known = self.by_id.get(record.conversation_id)
        return known.turns[record.turn] if known is not None and record.turn < len(known.turns) else None

    def asked(self, record: RequestRecord) -> RequestRecord:
        """The record with the lengths that were planned for it; as it is when nothing was."""
        turn = self.turn(record)
        if turn is None:
            return record
        return replace(record, asked_input_tokens=turn.prompt_tokens, asked_output_tokens=turn.output_tokens)

    def requests(self, *, warmup: bool = False) -> int:
        """Requests of all its conversations."""
        return sum(len(one.turns) for one in self.conversations if one.warmup == warmup)

    def write(self, path: Path) -> None:
        """Writes it as JSON lines: what holds for all, then one a conversation."""
        head = {name: value for name, value in self.__dict__.items() if name not in ("conversations", "by_id")}
        lines = [json.dumps(head), *(json.dumps(asdict(one)) for one in self.conversations)]
        path.write_text("\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Reads what `write` wrote."""
        head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
        conversations = tuple(
            Conversation(**{**row, "turns": tuple(PlannedTurn(**turn) for turn in row["turns"])}) for row in rows
        )
        return cls(conversations, **head, by_id={one.id: one for one in conversations})


class Planner:
    """Turns sessions into the client's data set. Bound to one point and its tokenizer."""

    def __init__(self, point: AgentXPoint, tokenizer: ChatTokenizer) -> None:
        """Raises DatasetError for a tokenizer or chat template that cannot carry a replay."""
        self._point = point
        self._words = Words(tokenizer, f"{point.id}/{point.seed}")
        self._template = Template.of(tokenizer, self._words.sample)
        self._draw = random.Random(point.seed)
        self._seen = _Prefixes()
        self._names: set[str] = set()
        self._digest = hashlib.sha256()
        self._conversations: list[Conversation] = []
        self._cut_gaps = 0
        self._tool_turns = 0

    def plan(self, sessions: Sequence[Session], dropped: int, path: Path) -> Plan:
        """Writes aiperf's DAG data set to ``path``. Raises PlanError without sessions that fit."""
        if not sessions:
            raise PlanError(
                f"all {dropped} sessions of {self._point.corpus.name} pass {self._point.max_context_tokens} tokens;"
                " serve a longer context or replay another corpus"
            )
        order = sorted(sessions, key=lambda _: self._draw.random())
        starts = [self._start(session) for session in order[: self._point.conc]]
        chosen = list(self._passes(order))
        with path.open("wb") as self._file:
            for lane, (turn, (number, session)) in enumerate(zip(starts, chosen, strict=False)):
                first = max(0, turn - self._point.warmup_requests_per_lane)
                if first < turn:
                    self._add(session, number, first, turn, lane=lane, warmup=True)
            for index, (number, session) in enumerate(chosen):
                lane_of = index if index < len(starts) else None
                self._add(session, number, starts[index] if lane_of is not None else 0, lane=lane_of)
        return Plan(
            tuple(self._conversations),
            sessions=len(order),
            dropped_sessions=dropped,
            passes=1 + max(number for number, _ in chosen),
            cut_gaps=self._cut_gaps,
            tool_turns=self._tool_turns,
            renders_tools=self._template.tools,
            dataset_sha256=self._digest.hexdigest(),
            by_id={one.id: one for one in self._conversations},
        )

    def _start(self, session: Session) -> int:
        low, high = self._point.start_min_ratio, self._point.start_max_ratio
        share = low + self._draw.random() * max(0.0, high - low)
        return min(len(session.turns) - 1, math.floor(share * len(session.turns)))

    def _passes(self, order: Sequence[Session]) -> Iterator[tuple[int, Session]]:
        """(pass, session), until there are as many as asked for, or enough to outlast the duration."""
        wanted, busy_s = self._point.sessions, self._point.duration_s * self._point.conc
        count, planned_s, planned_tokens = 0, 0.0, 0
        for number in itertools.count():
            for session in order:
                enough = planned_s > busy_s or planned_tokens > MAX_TOKENS
                if count >= wanted if wanted is not None else enough and count >= 2 * self._point.conc:
                    return
                yield number, session
                count += 1
                planned_s += sum(min(turn.delay_s, self._point.idle_cap_s) for turn in session.turns[1:])
                planned_s += sum(LEAST_REQUEST_S + LEAST_TOKEN_S * turn.output_tokens for turn in session.turns)
                planned_tokens += sum(turn.added_tokens for turn in session.turns)

    def _add(
        self,
        session: Session,
        number: int,
        first: int,
        end: int | None = None,
        *,
        lane: int | None = None,
        warmup: bool = False,
        parent: str | None = None,
    ) -> None:
        """Turns ``first`` to ``end`` of a session as one conversation, its subagents behind it."""
        name = _in_pass(session.id, number) + ("~warmup" if warmup else "")
        if name in self._names:
            raise PlanError(f"{self._point.corpus.name} names two sessions {session.id!r}")
        self._names.add(name)
        prompts = list(self._prompts(session, str(number)))
        last = len(session.turns) if end is None else end
        rewrites = any(turn.rewrites for turn in session.turns[first + 1 : last])
        rows: list[dict[str, Any]] = []
        turns: list[PlannedTurn] = []
        for index in range(first, last):
            turn, (whole, new, chain) = session.turns[index], prompts[index]
            delay_s = min(turn.delay_s, self._point.idle_cap_s) if turns else 0.0
            self._cut_gaps += int(bool(turns) and turn.delay_s > delay_s)
            self._tool_turns += int(turn.by_tool)
            rows.append(
                {
                    "messages": whole if rewrites or not turns else new,
                    "max_tokens": turn.output_tokens,
                    "delay": round(1e3 * delay_s, 3),
                    "extra": {"temperature": 0, "ignore_eos": self._point.ignore_eos},
                }
            )
            turns.append(
                PlannedTurn(
                    prompt_tokens=sum(tokens for _, tokens in chain),
                    output_tokens=turn.output_tokens,
                    delay_s=delay_s,
                    by_tool=turn.by_tool,
                    joins=not warmup and bool(turns) and index - 1 in session.subagents,
                    rewrites=bool(turns) and turn.rewrites,
                    shared_tokens=self._seen.add(chain),
                )
            )
        below = {} if warmup else {i: each for i, each in session.subagents.items() if first <= i < last}
        for index, children in below.items():
            if index + 1 < last:
                rows[index - first]["spawns"] = [_in_pass(child.id, number) for child in children]
        mode = "message_array_with_responses" if rewrites else "deltas_with_responses"
        line = json.dumps({"session_id": name, "context_mode": mode, "turns": rows}, separators=(",", ":")) + "\n"
        self._file.write(line.encode())
        self._digest.update(line.encode())
        self._conversations.append(Conversation(name, session.id, warmup, parent, lane, first, tuple(turns)))
        for index, children in below.items():
            for child in children:
                # Behind a session's last turn nobody waits for a subagent: it is sent as a session of its own.
                self._add(child, number, 0, parent=name if index + 1 < last else None)

    def _prompts(self, session: Session, salt: str) -> Iterator[tuple[list[Message], list[Message], _Chain]]:
        """(all messages, those that the turn adds, the prompt as a chain of texts) of every turn."""
        template, system = self._template, session.system
        opening: list[Message] = [{"role": "system", "content": self._words.text(system, salt)}] if system else []
        head: _Chain = [("bare", template.bare)]
        if system:
            head = [("system", template.system), *_units(system, salt), ("first user", template.first_user)]
        whole, chain = opening, head
        for index, turn in enumerate(session.turns):
            content = self._words.text(turn.new, salt)
            if turn.rewrites or index == 0:
                new, chain = [*opening, {"role": "user", "content": content}], head
                whole = new
            else:
                tool = turn.by_tool and template.tools
                answer = Piece(f"{session.id}#answer{index}", max(1, turn.answer_tokens))
                said = answer_message(self._words.text([answer], salt), calls=tool)
                new = [said, tool_message(content) if tool else {"role": "user", "content": content}]
                whole = [*whole, *new]
                rest = (template.calling_answer if tool else template.answer) - template.generation
                chain = [*chain, ("generation", template.generation), *_units([answer], salt), (f"said {tool}", rest)]
                chain = [*chain, ("tool", template.tool) if tool else ("user", template.user)]
            chain = [*chain, *_units(turn.new, salt)]
            yield whole, new, [*chain, ("generation", template.generation)]


_Chain = list[tuple[str, int]]


def _units(pieces: Sequence[Piece], salt: str) -> _Chain:
    return [(f"{salt}/{piece.key}", piece.tokens) for piece in pieces]


def _in_pass(name: str, number: int) -> str:
    return name if number == 0 else f"{name}@{number + 1}"


class _Prefixes:
    """All prompts so far as a tree of their texts."""

    def __init__(self) -> None:
        self._root: dict[str, Any] = {}

    def add(self, chain: _Chain) -> int:
        """Tokens at the start of ``chain`` that an earlier one began with; takes the chain in."""
        node, shared, common = self._root, 0, True
        for key, tokens in chain:
            common = common and key in node
            shared += tokens if common else 0
            node = node.setdefault(key, {})
        return shared
