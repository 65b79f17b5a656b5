"""Figures of a run, drawn from its rows: throughput against interactivity, latency against concurrency, TTFT stages.

A point without a valid verdict is drawn as a hollow grey cross beside its line, never on it, and its reasons are
printed under the figure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

# Okabe-Ito: eight colours that stay apart for colour-blind readers and in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STAGE_COLOURS = {
    "router_queue_ms": "#B8B8B8",
    "prefill_queue_ms": "#9ECAE1",
    "prefill_compute_ms": "#2171B5",
    "prefill_http_ms": "#6BAED6",
    "dispatch_ms": "#636363",
    "wait_commit_ms": "#FD8D3C",
    "verify_ms": "#FDD0A2",
    "admit_wait_ms": "#C7E9C0",
    "inject_ms": "#41AB5D",
    "first_write_ms": "#006D2C",
    "first_byte_ms": "#969696",
    "unexplained_ms": "#FFFFFF",
}
_PERCENTILES = (("median", "p50", "-"), ("p90", "p90", "--"), ("p99", "p99", ":"))
_DPI = 144
_INVALID = "#777777"


def draw_all(rows: Sequence[Row], stages: Sequence[tuple[Row, dict[str, Any]]], folder: Path) -> list[Path]:
    """Draws every figure there is data for; ``stages`` pairs a row with the stages of its result. Returns the PNGs."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (isl, osl), group in sorted(_by(measured(rows), lambda row: (row["isl"], row["osl"])).items()):
        name = f"{isl}x{osl}"
        title = f"{group[0]['model']}, input {isl} / output {osl} tokens"
        written.append(_save(throughput_figure(group, title), folder / f"throughput-{name}.png"))
        written.append(_save(latency_figure(group, title), folder / f"latency-{name}.png"))
    explained = [(row, stage) for row, stage in stages if stage.get("ttft_ms")]
    if explained:
        written.append(_save(stage_figure(explained), folder / "stages.png"))
    return written


def measured(rows: Iterable[Row]) -> list[Row]:
    """Throughput rows that hold at least one answered request, valid or not."""
    return [row for row in rows if row.get("scenario") == "fixed-seq-len" and "median_tpot" in row]


def shape_name(row: Row) -> str:
    """What was sent: input/output lengths, or the corpus of a replay."""
    return f"{row['isl']}/{row['osl']}" if row.get("isl") else str((row.get("dataset") or {}).get("name", "replay"))


def series_name(row: Row) -> str:
    """One line a framework, hardware and precision, with the speculation depth where there is one, and the topology."""
    name = f"{row['framework']} / {row['hw']} / {row['precision']}"
    if row.get("num_speculative_tokens"):
        name += f" / {row['spec_decoding']}-{row['num_speculative_tokens']}"
    if row.get("disagg"):
        return f"{name} ({row['num_prefill_gpu']}P+{row['num_decode_gpu']}D)"
    return f"{name} ({row['num_gpus']})"


def throughput_figure(rows: Sequence[Row], title: str) -> Figure:
    """Output tokens/s per GPU against interactivity (1 / median TPOT), points labelled by concurrency."""
    figure, axes = _figure(7.2, 4.8)
    labels: list[tuple[float, float, str, str]] = []
    for index, (name, group) in enumerate(sorted(_by(rows, series_name).items())):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        good = sorted((row for row in group if row["verdict"]["valid"]), key=lambda row: int(row["conc"]))
        points = [(row["median_intvty"], row["output_tput_per_gpu"]) for row in good]
        axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, marker=marker, label=name)
        labels += [(x, y, f"c{row['conc']}", colour) for (x, y), row in zip(points, good, strict=True)]
    bad = [row for row in rows if not row["verdict"]["valid"]]
    if bad:
        xs, ys = [row["median_intvty"] for row in bad], [row["output_tput_per_gpu"] for row in bad]
        axes.scatter(xs, ys, marker="x", color=_INVALID, s=60, label="not valid", zorder=3)
        labels += [(x, y, f"c{row['conc']}", _INVALID) for x, y, row in zip(xs, ys, bad, strict=True)]
    axes.set_xlabel("Interactivity, tokens/s/user (1 / median TPOT)")
    axes.set_ylabel("Output throughput per GPU, tokens/s")
    axes.margins(0.12)
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1])
    _finish(figure, [axes], title, bad)
    _place_labels(figure, axes, labels)
    return figure


def latency_figure(rows: Sequence[Row], title: str) -> Figure:
    """TTFT and TPOT percentiles, in ms, against concurrency."""
    figure, left = _figure(9.6, 4.6, columns=2)
    panels = [left, figure.axes[1]]
    concurrencies = sorted({int(row["conc"]) for row in rows})
    bad = [row for row in rows if not row["verdict"]["valid"]]
    for axes, metric, label in zip(panels, ("ttft", "tpot"), ("TTFT", "TPOT"), strict=True):
        for index, (name, group) in enumerate(sorted(_by(rows, series_name).items())):
            colour = _COLOURS[index % len(_COLOURS)]
            good = sorted((row for row in group if row["verdict"]["valid"]), key=lambda row: int(row["conc"]))
            # The legend has colours for the series and line styles for the percentiles, not their product.
            axes.plot([], [], color=colour, marker=_MARKERS[index % len(_MARKERS)], markersize=4, label=name)
            for statistic, _, style in _PERCENTILES:
                ys = [row[f"{statistic}_{metric}"] * 1e3 for row in good]
                marker = _MARKERS[index % len(_MARKERS)]
                xs = [row["conc"] for row in good]
                axes.plot(xs, ys, style, color=colour, marker=marker, markersize=4)
        for row in bad:
            for statistic, _, _ in _PERCENTILES:
                axes.scatter([row["conc"]], [row[f"{statistic}_{metric}"] * 1e3], marker="x", color=_INVALID, zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(conc) for conc in concurrencies])
        axes.minorticks_off()
        axes.margins(x=0.1)
        axes.set_xlabel("Concurrent requests")
        axes.set_ylabel(f"{label}, ms")
        axes.set_ylim(bottom=0)
    for _, short, style in _PERCENTILES:
        panels[0].plot([], [], style, color="black", label=short)
    if bad:
        panels[0].scatter([], [], marker="x", color=_INVALID, label="not valid")
    _finish(figure, panels, title, bad, legend_columns=3)
    return figure


def stage_figure(pairs: Sequence[tuple[Row, dict[str, Any]]]) -> Figure:
    """Mean TTFT of every point as a stacked bar of its stages, the unexplained part hatched."""
    figure, axes = _figure(9.6, 1.9 + 0.55 * len(pairs))
    names = [name for name in (*STAGES, "unexplained_ms") if any(stage.get(name) for _, stage in pairs)]
    positions = range(len(pairs))
    longest = max(stage["ttft_ms"]["mean"] for _, stage in pairs)
    ends = [0.0] * len(pairs)
    for name in names:
        widths = [max(0.0, (stage.get(name) or {}).get("mean", 0.0)) for _, stage in pairs]
        hatch = "////" if name == "unexplained_ms" else None
        label = name.removesuffix("_ms").replace("_", " ")
        axes.barh(
            positions,
            widths,
            left=ends,
            height=0.62,
            color=_STAGE_COLOURS[name],
            edgecolor="#444444",
            linewidth=0.4,
            hatch=hatch,
            label=label,
        )
        for position, (start, width) in enumerate(zip(ends, widths, strict=True)):
            if width >= 0.05 * longest:  # narrower than its text
                dark = name in ("prefill_compute_ms", "first_write_ms", "dispatch_ms", "inject_ms")
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if hatch else None
                colour = "white" if dark else "black"
                text = f"{width:,.0f}" if width >= 100 else f"{width:.3g}"
                axes.text(
                    start + width / 2, position, text, ha="center", va="center", fontsize=8, color=colour, bbox=box
                )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for position, (_, stage) in enumerate(pairs):
        share = stage["unexplained_fraction"] or 0.0
        text = f" {stage['ttft_ms']['mean']:.1f} ms, {share:.1%} unexplained"
        axes.text(ends[position], position, text, va="center", ha="left", fontsize=8)
    axes.set_yticks(positions, [_stage_label(row, [other for other, _ in pairs]) for row, _ in pairs], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(ends) * 1.35)
    axes.set_xlabel("Mean time to first token, ms")
    axes.grid(axis="y", visible=False)
    bad = [row for row, _ in pairs if not row["verdict"]["valid"]]
    _finish(figure, [axes], "Where the time to first token goes", bad, legend_columns=6)
    return figure


def _stage_label(row: Row, others: Sequence[Row]) -> str:
    label = f"{shape_name(row)}, c{row['conc']}"
    if len({series_name(other) for other in others}) > 1:
        label = f"{series_name(row)}\n{label}"
    return label if row["verdict"]["valid"] else f"{label} (not valid)"


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, no display, nothing to close.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    for column in range(columns):
        axes = figure.add_subplot(1, columns, column + 1)
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, figure.axes[0]


def _finish(
    figure: Figure, axes: Sequence[Axes], title: str, bad: Sequence[Row], *, legend_columns: int | None = None
) -> None:
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        columns = legend_columns or (3 if len(axes) > 1 else 2)
        width = max(len(label) for label in labels)
        columns = max(1, min(columns, len(labels), int(figure.get_figwidth() * 12 / (width + 6))))
        figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, handlelength=3
        )
    if bad:
        lines = []
        for row in sorted(bad, key=lambda row: int(row["conc"])):
            codes = ", ".join(reason["code"] for reason in row["verdict"]["reasons"])
            lines.append(f"{series_name(row)}, c{row['conc']}: {codes}")
        wrapped = "\n".join(textwrap.fill(line, int(figure.get_figwidth() * 14)) for line in lines)
        axes[0].set_xlabel(f"{axes[0].get_xlabel()}\n\nNot valid:\n{wrapped}", fontsize=8, loc="left")
        for other in axes[1:]:
            other.set_xlabel(other.get_xlabel(), fontsize=8, loc="left")


def _place_labels(figure: Figure, axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Puts each text beside its point, on the first side where it covers no other text and no other point."""
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken: list[Bbox] = []
    dots = [axes.transData.transform((x, y)) for x, y, _, _ in labels]
    taken += [Bbox.from_bounds(dot[0] - 4, dot[1] - 4, 8, 8) for dot in dots]
    sides = [(7, 5), (7, -12), (-7, 5), (-7, -12), (0, 10), (0, -17), (14, 12), (-14, 12)]
    for x, y, text, colour in labels:
        for dx, dy in sides:
            anchor = "left" if dx > 0 else "right" if dx < 0 else "center"
            note = axes.annotate(
                text, (x, y), xytext=(dx, dy), textcoords="offset points", ha=anchor, fontsize=8, color=colour
            )
            box = note.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken) or (dx, dy) == sides[-1]:
                taken.append(box)
                break
            note.remove()


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI, facecolor="white", metadata={"Software": None})
    return path


def _by(rows: Iterable[Row], key: Any) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
