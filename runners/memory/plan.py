"""Memory of a job: a table for every GPU process and one for every node's own memory, judged before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.job import JobSpec, Parallelism, ProcessSpec
from configs.model import Model
from runners.argv import Arguments
from runners.finding import Finding
from runners.memory import cache, engines, other_engines
from runners.memory.roles import Role, served_tokens
from runners.memory.shape import MemoryUnknown, Shape, shape_of
from runners.memory.tables import GIB, Table, Term, gib

GPU_TABLES: dict[str, Callable[[Role], list[Table]]] = {
    "vllm": engines.vllm_tables,
    "tilert": engines.tilert_tables,
    "sglang": other_engines.sglang_tables,
    "pegainfer": other_engines.pegainfer_tables,
    "bundled": other_engines.bundled_tables,
}
CONTEXT_STEP_TOKENS = 64


@dataclass(frozen=True)
class Registration:
    """Memory that a process registers with its RDMA device, against what the device can hold."""

    process: str
    bytes: int
    page_bytes: int
    limit_pages: int | None

    @property
    def pages(self) -> int:
        return cache.pages(self.bytes, self.page_bytes)

    @property
    def fits(self) -> bool:
        return self.limit_pages is None or self.pages <= self.limit_pages

    def line(self) -> str:
        """One row for people."""
        text = f"  {self.process} registers {gib(self.bytes):.2f} GiB: {self.pages:,} pages of {self.page_bytes:,} B"
        if self.limit_pages is None:
            return text
        return f"{text}, the device holds {self.limit_pages:,}: {'fits' if self.fits else 'DOES NOT FIT'}"


@dataclass(frozen=True)
class MemoryPlan:
    """Every table of a job. ``largest_context`` is the longest context, in tokens, with which all of them fit (a
    multiple of 64; 0 when none does)."""

    key: str
    context: int
    longest_prompt: int
    tables: tuple[Table, ...]
    registrations: tuple[Registration, ...]
    largest_context: int

    @property
    def fits(self) -> bool:
        """Whether every prompt that the job sends can be served."""
        return not any(finding.severity == "error" for finding in self.findings())

    def findings(self, where: str | None = None) -> list[Finding]:
        """What does not fit: which device, which term, and what to change."""
        at = where or self.key
        found = [finding for table in self.tables for finding in self._judge(table, at)]
        return found + [self._registration(item, at) for item in self.registrations if not item.fits]

    def lines(self) -> list[str]:
        """The plan as text, one row a term."""
        rows: list[str] = []
        shown: dict[Table, str] = {}
        for table in self.tables:
            # Workers of a role are alike: one table speaks for all of them.
            alike = replace(table, process="")
            if alike in shown:
                rows.append(f"{table.process}, {table.ranks}: as {shown[alike]}")
                continue
            shown[alike] = table.process
            rows += table.lines()
        rows += [item.line() for item in self.registrations]
        rows.append(f"largest context that fits: {self.largest_context} tokens (served: {self.context})")
        return rows + [f"{finding.code}: {finding.message}; {finding.fix}" for finding in self.findings()]

    def to_json(self) -> dict[str, Any]:
        """The plan as data, in bytes."""
        return {
            "context": self.context,
            "largest-context": self.largest_context,
            "fits": self.fits,
            "tables": [table.to_json() for table in self.tables],
            "registrations": [
                {"process": item.process, "bytes": item.bytes, "pages": item.pages, "fits": item.fits}
                for item in self.registrations
            ],
        }

    def _judge(self, table: Table, at: str) -> Iterator[Finding]:
        who = f"{table.process} {table.ranks}"
        short = table.resident_bytes - table.capacity_bytes
        if short > 0:
            yield self._over(table, who, short, at)
        for budget in table.budgets:
            if not budget.fits:
                message = (
                    f"{who}: {budget.name}: {gib(budget.needed_bytes):.2f} GiB are needed for {self.context} tokens, "
                    f"{gib(budget.available_bytes):.2f} GiB are available ({budget.formula})"
                )
                largest = max(
                    (
                        term
                        for term in table.resident
                        if term.change and term.name in table.inside and term.kind != "kv"
                    ),
                    key=lambda term: term.bytes,
                    default=None,
                )
                if largest is not None:
                    message += f"; the largest term beside it is the {largest.name}, {gib(largest.bytes):.2f} GiB"
                yield Finding("memory-kv-budget", "error", at, message, f"{budget.change}; {self._advice()}")
        conversion = sum(term.bytes for term in table.peak)
        if conversion and table.slack_bytes < 0:
            yield self._conversion(table, who, conversion, at)

    def _over(self, table: Table, who: str, short: int, at: str) -> Finding:
        term = table.largest_changeable
        handoff = next((t for t in table.resident if t.kind == "handoff" and t.bytes >= short and t.change), None)
        outside = table.taken_bytes and handoff is not None
        blamed = handoff or term
        code = "memory-staging-outside" if outside else "memory-host-over" if table.device != "GPU" else "memory-over"
        message = f"{who}: {gib(table.resident_bytes):.2f} GiB on a device of {gib(table.capacity_bytes):.2f} GiB"
        if blamed is not None:
            message += f"; the term to change is the {blamed.name}, {gib(blamed.bytes):.2f} GiB ({blamed.formula})"
        if outside:
            message += "; it is taken beside the engine's own budget"
        fix = f"{blamed.change}; {self._advice()}" if blamed is not None else self._advice()
        return Finding(code, "error", at, message, fix)

    def _conversion(self, table: Table, who: str, conversion: int, at: str) -> Finding:
        longest = table.longest_convertible or 0
        severity = "error" if longest < self.longest_prompt else "warning"
        message = (
            f"{who}: taking over a prompt of {self.context} tokens needs {gib(conversion):.2f} GiB beside "
            f"{gib(table.resident_bytes):.2f} GiB; the device has {gib(table.capacity_bytes):.2f} GiB: "
            + (
                f"prompts above {longest} tokens run out of memory although the server starts"
                if longest
                else "none fits"
            )
        )
        fix = f"{table.peak[0].change}; the job's longest prompt has {self.longest_prompt} tokens"
        return Finding("memory-conversion-peak", severity, at, message, fix)  # type: ignore[arg-type]

    def _registration(self, item: Registration, at: str) -> Finding:
        assert item.limit_pages is not None
        most = cache.largest_registration_bytes(item.limit_pages, item.page_bytes)
        message = (
            f"{item.process} registers {gib(item.bytes):.2f} GiB, {item.pages:,} pages of {item.page_bytes:,} B; an "
            f"RDMA device here holds {item.limit_pages:,} pages, {most >> 20:,} MiB, over all regions"
        )
        return Finding(
            "rdma-registration-limit",
            "error",
            at,
            message,
            "use TileRT 0.1.6.post3 or later, which backs it by 2 MiB pages, or make it smaller",
        )

    def _advice(self) -> str:
        if self.largest_context <= 0:
            return "no context fits as it is"
        return f"the largest context that fits as it is: {self.largest_context} tokens"


def plan_memory(spec: JobSpec) -> MemoryPlan:
    """The plan of a job. Raises MemoryUnknown when a model, dtype or engine has no byte count."""
    roles = list(_roles(spec))
    tables = _tables(spec, roles)
    context = max((role.tokens for role in roles if role.process.role != "router"), default=spec.max_model_len)
    longest = max((role.longest_prompt_tokens for role in roles if role.process.role != "router"), default=0)
    return MemoryPlan(
        key=spec.key,
        context=context,
        longest_prompt=longest,
        tables=tuple(tables),
        registrations=tuple(_registrations(spec, roles)),
        largest_context=_largest_context(spec, roles, context),
    )


def host_bytes(spec: JobSpec, node: int = 0) -> int:
    """Node memory that the processes on one node need. Raises MemoryUnknown."""
    return sum(term.bytes for term in _host_terms([role for role in _roles(spec) if role.process.node == node]))


def _roles(spec: JobSpec) -> Iterator[Role]:
    shape = _shape(spec)
    gpu, node = spec.cluster_profile.get("gpu"), spec.cluster_profile.get("node") or {}
    for process in spec.processes:
        if process.role == "metaserver":
            continue
        arguments = Arguments(process)
        yield Role(
            spec=spec,
            process=process,
            arguments=arguments,
            shape=shape,
            worker=_worker(spec, process),
            tokens=served_tokens(arguments, spec),
            vendor=str(gpu["vendor"]) if gpu else "",
            device_bytes=int(float(gpu["memory-gib"]) * GIB) if gpu else 0,
            node_bytes=int(float(node.get("dram-gib", 0)) * GIB),
        )


def _worker(spec: JobSpec, process: ProcessSpec) -> Parallelism:
    worker: Parallelism | None = getattr(spec, process.role, None) if process.role != "router" else None
    return worker or Parallelism(num_worker=1)


def _shape(spec: JobSpec) -> Shape:
    return shape_of(_model(spec.model, repr(spec.model_profile), spec), spec.precision)


_MODELS: dict[tuple[str, str], Model] = {}


def _model(name: str, profile: str, spec: JobSpec) -> Model:
    """Validated once a profile: a matrix has many jobs of few models."""
    if (name, profile) not in _MODELS:
        if len(_MODELS) > 64:
            _MODELS.clear()
        _MODELS[name, profile] = Model.model_validate(spec.model_profile)
    return _MODELS[name, profile]


def _tables(spec: JobSpec, roles: Sequence[Role]) -> list[Table]:
    tables = []
    for role in roles:
        if role.on_cpu or role.process.role == "router" or not role.process.gpus:
            continue
        if role.runs_tilert and not role.shape.is_mla:
            raise MemoryUnknown(f"{role.process.name}: TileRT serves only latent-attention models")
        tables += GPU_TABLES["tilert" if role.runs_tilert else role.process.engine](role)
    for node in sorted({role.process.node for role in roles}):
        here = [role for role in roles if role.process.node == node]
        if here[0].node_bytes:
            terms = tuple(_host_terms(here))
            tables.append(Table(f"node {node}", "all processes", "node memory", here[0].node_bytes, terms))
    return tables


def _host_terms(roles: Sequence[Role]) -> Iterator[Term]:
    for role in roles:
        yield from other_engines.host_terms(role)
        size = engines.pinned_bytes(role)
        if size:
            change = "8 buffers of 1/8 on the GPUs (TILERT_PD_SHARDS=8) need none"
            yield Term(
                f"{role.process.name}: pinned buffer", size, "hand-off, whole context", engines.SEEN, "handoff", change
            )


def _registrations(spec: JobSpec, roles: Sequence[Role]) -> Iterator[Registration]:
    if spec.handoff.protocol == "tcp" or spec.handoff.transport == "none":
        return
    limit = spec.cluster_profile.get("rdma-registration-pages")
    for role in roles:
        size = engines.pinned_bytes(role)
        small = size > 0 and role.spec.versions.get("tilert", "").startswith(("0.1.5", "0.1.6.post1", "0.1.6.post2"))
        for term in other_engines.host_terms(role):
            # This repository's buffers ask for 2 MiB pages and fault them in at once.
            size += term.bytes if term.kind == "handoff" and "slots" not in term.name else 0
        if size:
            page = cache.SMALL_PAGE_BYTES if small else cache.HUGE_PAGE_BYTES
            yield Registration(role.process.name, size, page, limit)


def _largest_context(spec: JobSpec, roles: Sequence[Role], served: int) -> int:
    """By bisection: every term grows with the context."""
    native = int(spec.model_profile.get("context-length", served))
    low, high = 0, max(native, served) // CONTEXT_STEP_TOKENS
    if _fits(spec, roles, high * CONTEXT_STEP_TOKENS):
        return high * CONTEXT_STEP_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(spec, roles, middle * CONTEXT_STEP_TOKENS):
            low = middle
        else:
            high = middle
    return low * CONTEXT_STEP_TOKENS


def _fits(spec: JobSpec, served: Sequence[Role], tokens: int) -> bool:
    roles = [replace(role, tokens=tokens) for role in served]
    return all(table.fits for table in _tables(spec, roles)) and all(r.fits for r in _registrations(spec, roles))


__all__ = ["MemoryPlan", "Registration", "host_bytes", "plan_memory"]
