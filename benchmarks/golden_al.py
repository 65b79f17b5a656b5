"""Measures mean acceptance lengths on running servers and writes them as a curve of golden_al_distribution.

    python -m benchmarks.golden_al --url http://127.0.0.1:8200 --model-prefix glm5.2 --thinking thinking-on \
        --prompts speed-bench-coding.jsonl --dataset "SPEED-Bench coding" --output-tokens 4096

A server drafts to one depth, so one --url is one length of the curve: give one for each depth, or run again with the
next server. Lengths are added to a file that has the same provenance; nothing is written when a server is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import get_args

from benchmarks.acceptance import Length, Load, Prompts, Refused, generated_prompts, measure, read_prompts
from benchmarks.point import EXIT_INFRASTRUCTURE, EXIT_INVALID, EXIT_USAGE, EXIT_VALID
from benchmarks.speculation import SpeculationError
from configs.curve import (
    CURVES,
    DECIMALS,
    Curve,
    CurveError,
    DraftMethod,
    Provenance,
    ThinkingMode,
    read_curve,
    write_curve,
)

DEFAULT_MIN_STEPS = 2000


def curve_of(model_prefix: str, lengths: Sequence[Length], prompts: Prompts, load: Load) -> Curve:
    """The curve that these lengths make, all of one method. Raises Refused when two are of the same depth."""
    methods = {length.method for length in lengths}
    if len(methods) != 1:
        raise Refused(f"the servers draft by {' and '.join(sorted(methods))}; a curve is of one method")
    cells = {length.draft_depth: length.measured for length in lengths}
    if len(cells) != len(lengths):
        raise Refused("two servers draft to the same depth; a curve has one length a depth")
    sampling = "greedy" if load.temperature == 0 else f"temperature {load.temperature:g}"
    models = ", ".join(sorted({length.model for length in lengths}))
    return Curve(
        schema=1,
        model=model_prefix,
        method=methods.pop(),
        provenance=Provenance(
            status="measured",
            source=f"python -m benchmarks.golden_al on {models}, {sampling}",
            dataset=prompts.dataset,
            output_tokens=load.output_tokens,
            date=datetime.now(UTC).date().isoformat(),
            versions={"baton-bench": _version()}
            | {name: version for length in lengths for name, version in length.versions.items()},
            note="; ".join(sorted({length.note for length in lengths if length.note})),
        ),
        curves={load.thinking: {depth: round(cell.mean_length, DECIMALS) for depth, cell in cells.items()}},
        measurements={load.thinking: cells},
    )


def merged(old: Curve, new: Curve, *, replace: bool) -> Curve:
    """``new`` added to ``old``, of the same provenance but for the day. Raises Refused; ``replace`` is for cells."""
    for name in ("status", "source", "dataset", "output_tokens", "versions", "note"):
        was, now = getattr(old.provenance, name), getattr(new.provenance, name)
        if was != now:
            raise Refused(
                f"{old.name}.yaml has another provenance, {name} {was!r} and not {now!r}: one file has one. Delete the "
                "file to begin anew, or write elsewhere with --output-dir"
            )
    curves = {mode: dict(cells) for mode, cells in old.curves.items()}
    measurements = {mode: dict(cells) for mode, cells in old.measurements.items()}
    for thinking, cells in new.curves.items():
        known = curves.setdefault(thinking, {}).keys() & cells.keys()
        if known and not replace:
            raise Refused(f"{old.name}.yaml has {thinking} depth {min(known)} already; --replace measures it anew")
        curves[thinking] |= cells
        measurements.setdefault(thinking, {}).update(new.measurements[thinking])
    return new.model_copy(update={"curves": curves, "measurements": measurements})


def _version() -> str:
    try:
        return metadata.version("baton-bench")
    except metadata.PackageNotFoundError:
        return "unknown"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.golden_al", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--url", action="append", required=True, help="router or server; one for each draft depth")
    p.add_argument("--model-prefix", required=True, help="model-prefix of the model's file in configs/models")
    p.add_argument("--thinking", required=True, choices=get_args(ThinkingMode), help="sent as enable_thinking")
    p.add_argument("--prompts", type=Path, help="JSON lines with messages or prompt; default: generated problems")
    p.add_argument("--dataset", help="what --prompts is called in the provenance")
    p.add_argument("--problems", type=int, default=200, help="generated problems (default %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the generated problems (default %(default)s)")
    p.add_argument("--output-tokens", type=int, default=128, help="limit of one answer (default %(default)s)")
    p.add_argument("--conc", type=int, default=4, help="concurrent requests (default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--min-steps", type=int, default=DEFAULT_MIN_STEPS, help="refuse fewer (default %(default)s)")
    p.add_argument("--request-timeout-s", type=float, default=600.0, help="of one request (default %(default)s)")
    p.add_argument("--output-dir", "-o", type=Path, default=CURVES, help="folder of curves (default: the project's)")
    p.add_argument("--replace", action="store_true", help="measure lengths anew that the file has already")
    told = p.add_argument_group("for a server that does not say it, such as vLLM")
    told.add_argument("--method", choices=get_args(DraftMethod), help="how it drafts")
    told.add_argument("--draft-depth", type=int, help="its num_speculative_tokens")
    told.add_argument("--acceptance-is-real", action="store_true", help="it was started without a simulated length")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints each length, writes the file; exit status 1 when a measurement is refused, 75 when one fails."""
    given = parser().parse_args(argv)
    if (given.prompts is None) != (given.dataset is None):
        print("error: --prompts and --dataset need each other", file=sys.stderr)
        return EXIT_USAGE
    load = Load(
        thinking=given.thinking,
        output_tokens=given.output_tokens,
        conc=given.conc,
        temperature=given.temperature,
        request_timeout_s=given.request_timeout_s,
        min_steps=given.min_steps,
        method=given.method,
        draft_depth=given.draft_depth,
        acceptance_is_real=given.acceptance_is_real,
    )
    try:
        prompts = (
            generated_prompts(given.problems, given.seed)
            if given.prompts is None
            else read_prompts(given.prompts, given.dataset)
        )
        lengths = list(_reported(given.url, prompts, load))
        curve = curve_of(given.model_prefix, lengths, prompts, load)
        path = given.output_dir / f"{curve.name}.yaml"
        if path.exists():
            curve = merged(read_curve(path), curve, replace=given.replace)
        write_curve(curve, path)
        read_curve(path)
    except (Refused, CurveError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_INVALID
    except SpeculationError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    print(path)
    return EXIT_VALID


def _reported(urls: Sequence[str], prompts: Prompts, load: Load) -> Iterator[Length]:
    for url in urls:
        length = measure(url.rstrip("/"), prompts, load)
        cell = length.measured
        print(
            f"{length.method} depth {length.draft_depth}: {cell.mean_length:.3f} +- {cell.standard_error:.3f} "
            f"({cell.steps} steps, {cell.prompts} prompts; by position {' '.join(map(str, cell.per_position))})",
            file=sys.stderr,
        )
        yield length


if __name__ == "__main__":
    sys.exit(main())
