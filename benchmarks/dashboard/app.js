"use strict";
// Columns of the points, as benchmarks/dashboard/data.py writes them; D.col[name][i] is the i-th point's value.
const D = { n: 0, col: {}, stages: {}, stageNames: [], timelines: [] };
const DIMENSIONS = [["model", "Model"], ["hw", "Hardware"], ["framework", "Framework"], ["precision", "Precision"],
  ["scenario", "Scenario"], ["shape", "Input / output"], ["run", "Run"], ["validity", "Validity"]];
const Y = [["out", "output tok/s/GPU"], ["total", "total tok/s/GPU"], ["inp", "input tok/s/GPU"]];
const X = [["intvty_50", "interactivity p50, tok/s/user"], ["intvty_90", "interactivity p90, tok/s/user"],
  ["intvty_99", "interactivity p99, tok/s/user"], ["ttft_50", "TTFT p50, ms"], ["ttft_99", "TTFT p99, ms"],
  ["e2el_50", "end-to-end p50, ms"]];
const LATENCY = [["ttft", "TTFT"], ["tpot", "TPOT"], ["itl", "ITL"], ["e2el", "end-to-end"]];
const COLOURS = [["series", "series"], ["model", "model"], ["hw", "hardware"], ["framework", "framework"],
  ["precision", "precision"], ["topology", "topology"], ["run", "run"]];
const PALETTE = { light: ["#0072B2", "#D55E00", "#009E73", "#B4559A", "#B07800", "#3C8FC0", "#6A51A3", "#8C6D31", "#C0392B", "#4D4D4D"],
  dark: ["#4FA8E0", "#FF8A4C", "#35C796", "#E091C5", "#F0B93A", "#8FD0F5", "#A994E0", "#C9A86A", "#F1948A", "#C8C8C8"] };
const STAGE_COLOURS = ["#B8B8B8", "#9ECAE1", "#2171B5", "#6BAED6", "#8A8A8A", "#FD8D3C", "#FDD0A2", "#C7E9C0", "#41AB5D", "#1F8A4C", "#C9B3E6", "#E7A4C1"];
const TABLE = [["key", "job", 1], ["point", "point", 1], ["hw", "hw", 1], ["framework", "framework", 1], ["precision", "prec.", 1],
  ["topology", "GPUs", 1], ["conc", "conc"], ["out", "out tok/s/GPU"], ["intvty_50", "tok/s/user"], ["ttft_50", "TTFT p50 ms"],
  ["ttft_99", "TTFT p99 ms"], ["tpot_50", "TPOT p50 ms"], ["em_strict", "strict"], ["reasons", "valid", 1]];
const PAGE_ROWS = 100, MANY = 1500, MAX_BARS = 60;
const GROUPED = { barmode: "group", showlegend: true, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" }, margin: { l: 56, r: 14, t: 34, b: 44 } };
const $ = id => document.getElementById(id);
const state = { filters: {}, sort: ["", 1], rows: PAGE_ROWS, selected: null };
let shown = [], theme = "light";

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text.trim()), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}
function accept(payload) {
  D.n = payload.n; D.col = {}; D.stageNames = payload.stage_names; D.timelines = payload.timelines;
  D.reasons = payload.reasons; D.generated = payload.generated; D.stages = payload.stages;
  for (const [name, column] of Object.entries(payload.columns))
    D.col[name] = column.words ? column.index.map(i => i < 0 ? null : column.words[i]) : column;
}
const value = (name, i) => D.col[name] ? D.col[name][i] : null;
const known = v => v !== null && v !== undefined && v !== "";
const escape = text => String(text).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const number = v => !known(v) ? "" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : Number(v).toPrecision(4).replace(/\.?0+$/, "");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const valid = i => value("validity", i) === "valid";
const color = (list, i) => list[i % list.length];

// ---- filters -------------------------------------------------------------------------------------------------
function passes(i, except) {
  for (const [name] of DIMENSIONS) {
    const wanted = state.filters[name];
    if (name !== except && wanted && wanted.size && !wanted.has(String(value(name, i)))) return false;
  }
  return true;
}
function buildFilters() {
  $("groups").innerHTML = "";
  for (const [name, label] of DIMENSIONS) {
    const counts = new Map();
    for (let i = 0; i < D.n; i++) {
      const v = value(name, i);
      if (!known(v)) continue;
      const word = String(v);
      if (!counts.has(word)) counts.set(word, 0);
      if (passes(i, name)) counts.set(word, counts.get(word) + 1);
    }
    if (counts.size < 2 && name !== "scenario") continue;
    const group = document.createElement("fieldset");
    group.innerHTML = `<legend>${label}</legend><div class="chips"></div>`;
    for (const [word, count] of [...counts].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }))) {
      const chip = document.createElement("button");
      chip.type = "button"; chip.className = "chip"; chip.dataset.dimension = name; chip.dataset.value = word;
      chip.setAttribute("aria-pressed", Boolean(state.filters[name]?.has(word)));
      chip.innerHTML = `${escape(word)}<small>${count}</small>`;
      chip.onclick = () => toggle(name, word);
      group.lastChild.append(chip);
    }
    $("groups").append(group);
  }
}
function toggle(name, word) {
  const wanted = state.filters[name] ??= new Set();
  wanted.has(word) ? wanted.delete(word) : wanted.add(word);
  if (!wanted.size) delete state.filters[name];
  state.rows = PAGE_ROWS;
  remember(); refresh();
}
function remember() {
  const parts = new URLSearchParams();
  for (const [name, words] of Object.entries(state.filters)) for (const word of words) parts.append(name, word);
  history.replaceState(null, "", parts.size ? "#" + parts : location.pathname + location.search);
}
function recall() {
  for (const [name, word] of new URLSearchParams(location.hash.slice(1)))
    if (DIMENSIONS.some(([known]) => known === name)) (state.filters[name] ??= new Set()).add(word);
}

// ---- drawing -------------------------------------------------------------------------------------------------
const drawers = { pareto, latency, stages, acceptance, cache, evals, timeline };
const stale = new Set(), visible = new Set();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) entry.isIntersecting ? visible.add(entry.target.id) : visible.delete(entry.target.id);
  flush();
});
let scheduled = false;
function flush() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    // One figure a frame, in the order of the page: the first one is there before the others are begun.
    const next = Object.keys(drawers).find(id => visible.has(id) && stale.has(id));
    if (!next) return;
    stale.delete(next); drawers[next]();
    // Until the first figure stands, in milliseconds: what "opens in" means here, and what the tests wait for.
    document.documentElement.dataset.ready ??= String(Math.round(performance.now()));
    flush();
  });
}
function refresh() {
  shown = [];
  for (let i = 0; i < D.n; i++) if (passes(i)) shown.push(i);
  buildFilters(); summarise(); cards(); invalidList(); table();
  if (state.selected !== null) detail(state.selected);
  for (const id in drawers) stale.add(id);
  flush();
}
function layout(x, y, more = {}) {
  const axis = title => ({ title: { text: title, font: { size: 13 }, standoff: 8 }, gridcolor: css("--grid"), linecolor: css("--line"),
    zeroline: false, automargin: true });
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--text"), size: 12, family: "inherit" },
    margin: { l: 56, r: 14, t: 10, b: 44 }, showlegend: false, hovermode: "closest", xaxis: axis(x), yaxis: axis(y),
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", ...more };
}
function draw(id, traces, shape) {
  const config = { responsive: true, displaylogo: false, displayModeBar: matchMedia("(max-width: 760px)").matches ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  Plotly.react(id, traces, shape, config);
  const element = $(id);
  element.dataset.points = traces.reduce((sum, t) => sum + (t.x || []).filter(v => v !== null).length, 0);
  if (element.bound) return;
  element.bound = true;
  element.on("plotly_click", event => {
    const index = event.points[0].customdata;
    if (Number.isInteger(index)) select(index);
  });
}
function seriesOf(indices) {
  const groups = new Map();
  for (const i of indices) {
    const name = value("series", i) + " " + value("run", i);
    groups.has(name) ? groups.get(name).push(i) : groups.set(name, [i]);
  }
  return groups;
}
function colouring(indices) {
  const by = $("colour").value;
  const names = [...new Set(indices.map(i => String(value(by, i))))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const place = new Map(names.map((name, k) => [name, k]));
  return { names, of: i => color(PALETTE[theme], place.get(String(value(by, i)))), name: i => String(value(by, i)) };
}
function hover(i) {
  const lines = [`<b>${escape(value("series", i))}</b>`, `${escape(value("point", i))}, ${escape(value("shape", i) ?? "")}`,
    `${number(value("out", i))} output tok/s/GPU (${number(value("total", i))} total)`,
    `${number(value("intvty_50", i))} tok/s/user`,
    `TTFT ${number(value("ttft_50", i))} / ${number(value("ttft_99", i))} ms (p50 / p99)`,
    `TPOT ${number(value("tpot_50", i))} / ${number(value("tpot_99", i))} ms`];
  if (known(value("client_tpot_error", i))) lines.push(`client's own TPOT error ${(100 * value("client_tpot_error", i)).toFixed(1)} %`);
  if (D.runs > 1) lines.push(escape(value("run", i)));
  if (!valid(i)) for (const [code, message] of reasonsOf(i)) lines.push(`<b>not valid: ${escape(code)}</b>`, ...wrap(escape(message)));
  return lines.join("<br>");
}
function wrap(text) {
  const lines = [""];
  for (const word of text.split(" ")) lines.at(-1).length + word.length > 64 ? lines.push(word) : lines.push((lines.pop() + " " + word).trim());
  return lines.slice(0, 5);
}
const reasonsOf = i => (value("reason_ids", i) || []).map(k => D.reasons[k]);

function pareto() {
  const x = $("pareto-x").value, y = $("pareto-y").value, smaller = !x.startsWith("intvty");
  const measured = shown.filter(i => known(value(x, i)) && known(value(y, i)));
  const good = measured.filter(valid), bad = measured.filter(i => !valid(i));
  const paint = colouring(measured), many = measured.length > MANY, type = many ? "scattergl" : "scatter";
  const lines = new Map(), marks = new Map();
  const at = (map, i) => { const n = paint.name(i); if (!map.has(n)) map.set(n, { i: [], c: paint.of(i) }); return map.get(n); };
  for (const group of seriesOf(good).values()) {
    const order = [...group].sort((a, b) => (value(x, b) - value(x, a)) * (smaller ? -1 : 1) || value(y, b) - value(y, a));
    let best = -Infinity;
    for (const i of order) {
      const front = value(y, i) > best;
      if (front) { best = value(y, i); at(lines, i).i.push(i); }
      if (front || !$("frontier").checked) at(marks, i).i.push(i), (at(marks, i).front ??= []).push(front);
    }
    at(lines, group[0]).i.push(null);
  }
  const get = (name, list) => list.map(i => i === null ? null : value(name, i));
  const traces = [];
  for (const [name, { i, c }] of lines) traces.push({ type, mode: "lines", name, x: get(x, i), y: get(y, i), line: { color: c, width: many ? 1 : 2 },
    hoverinfo: "skip", connectgaps: false });
  for (const [name, { i, c, front }] of marks) traces.push({ type, mode: many ? "markers" : "markers+text", name, x: get(x, i), y: get(y, i),
    customdata: i, marker: { color: c, size: many ? 6 : 9, opacity: front.map(f => f ? 1 : .35) },
    text: many ? undefined : i.map(k => known(value("conc", k)) ? "c" + value("conc", k) : ""), textposition: "top center",
    textfont: { size: 10, color: css("--muted") }, hovertext: i.map(hover), hoverinfo: "text" });
  if ($("show-invalid").checked && bad.length) traces.push({ type, mode: "markers", name: "not valid", x: get(x, bad), y: get(y, bad), customdata: bad,
    marker: { color: css("--bad"), size: 10, symbol: "x-thin", line: { color: css("--bad"), width: 2 } },
    hovertext: bad.map(hover), hoverinfo: "text" });
  const label = (list, name) => list.find(([k]) => k === name)[1];
  draw("pareto", traces, layout(label(X, x), label(Y, y)));
  $("legend").innerHTML = paint.names.map((n, k) => `<span style="--c:${color(PALETTE[theme], k)}">${escape(n)}</span>`).join("") +
    (bad.length ? `<span class="bad">not valid (${bad.length})</span>` : "");
}
function latency() {
  const metric = $("latency-metric").value;
  const good = shown.filter(i => valid(i) && known(value(metric + "_50", i)));
  const paint = colouring(good), traces = [], type = good.length > MANY ? "scattergl" : "scatter";
  for (const [suffix, dash] of [["_50", "solid"], ["_90", "dash"], ["_99", "dot"]]) {
    const byColour = new Map();
    for (const group of seriesOf(good).values()) {
      const name = paint.name(group[0]);
      if (!byColour.has(name)) byColour.set(name, { i: [], c: paint.of(group[0]) });
      byColour.get(name).i.push(...group.sort((a, b) => value("conc", a) - value("conc", b)), null);
    }
    for (const [name, { i, c }] of byColour) traces.push({ type, mode: "lines+markers", name, x: i.map(k => k === null ? null : value("conc", k)),
      y: i.map(k => k === null ? null : value(metric + suffix, k)), customdata: i, line: { color: c, dash, width: 1.6 }, marker: { size: 5, color: c },
      hovertext: i.map(k => k === null ? "" : `<b>${escape(value("series", k))}</b><br>c${value("conc", k)}, p${suffix.slice(1)}: ${number(value(metric + suffix, k))} ms`),
      hoverinfo: "text", connectgaps: false });
  }
  const shape = layout("concurrent requests", LATENCY.find(([k]) => k === metric)[1] + ", ms", {});
  shape.xaxis.type = shape.yaxis.type = "log"; shape.xaxis.dtick = shape.yaxis.dtick = "D2";
  const all = [...new Set(good.map(i => value("conc", i)))].sort((a, b) => a - b);
  if (all.length <= 12) { shape.xaxis.tickvals = all; shape.xaxis.ticktext = all.map(String); }
  draw("latency", traces, shape);
}
function labelled(indices) {
  const long = D.runs > 1, names = indices.map(i => (long ? value("run", i).slice(0, 15) + " " : "") + value("key", i).slice(0, 34) + " " + value("point", i));
  return names.map((name, k) => names.indexOf(name) === k ? name : name + " ".repeat(k + 1));
}
function bars(id, indices, make, x, more = {}) {
  const picked = indices.slice(0, MAX_BARS).reverse();
  const narrow = matchMedia("(max-width: 760px)").matches;
  const shape = layout(x, "", { bargap: .35, ...more });
  $(id).style.height = Math.max(220, 90 + picked.length * 24) + "px";
  const names = labelled(picked);
  shape.yaxis = { ...shape.yaxis, tickvals: names, ticktext: narrow ? picked.map(i => value("point", i)) : names, tickfont: { size: 11 }, automargin: true };
  draw(id, make(picked, names), shape);
}
const stageColour = (name, k) => name === "unexplained" ? "rgba(128,128,128,.3)" : STAGE_COLOURS[k % STAGE_COLOURS.length];
function stages() {
  const found = shown.filter(i => valid(i) && D.stages[i]);
  $("stages-legend").innerHTML = D.stageNames.map((name, k) => `<span style="--c:${stageColour(name, k)}">${escape(name)}</span>`).join("");
  $("stages-note").textContent = "mean ms of each stage" + (found.length > MAX_BARS ? `; first ${MAX_BARS} of ${found.length} points, filter for others` : "");
  bars("stages", found, (picked, names) => D.stageNames.map((name, k) => ({ type: "bar", orientation: "h", name, y: names, x: picked.map(i => D.stages[i][k]),
    customdata: picked, marker: { color: stageColour(name, k), line: { color: css("--line"), width: name === "unexplained" ? 1 : 0 } },
    hovertemplate: `${name}: %{x:.2f} ms<extra></extra>` })), "ms", { barmode: "relative" });
}
function acceptance() {
  const found = shown.filter(i => known(value("accept", i)));
  bars("acceptance", found, (picked, names) => [
    { type: "bar", orientation: "h", y: names, x: picked.map(i => value("accept", i)), customdata: picked, marker: { color: picked.map(i => valid(i) ? color(PALETTE[theme], 2) : css("--bad")) }, hovertemplate: "measured %{x:.3f}<extra></extra>" },
    { type: "scatter", mode: "markers", y: names, x: picked.map(i => value("accept_target", i)), customdata: picked, marker: { symbol: "diamond-open", size: 10, color: css("--text") }, hovertemplate: "target %{x:.3f}<extra></extra>" }],
  "tokens a step");
}
function cache() {
  const found = shown.filter(i => ["cache_client", "cache_server", "cache_theory"].some(name => known(value(name, i))));
  const kind = (name, label, k) => (picked, names) => ({ type: "bar", orientation: "h", name: label, y: names, x: picked.map(i => known(value(name, i)) ? 100 * value(name, i) : null),
    customdata: picked, marker: { color: color(PALETTE[theme], k) }, hovertemplate: label + " %{x:.1f} %<extra></extra>" });
  const all = [kind("cache_client", "client", 0), kind("cache_server", "server", 2), kind("cache_theory", "possible", 4)];
  bars("cache", found, (picked, names) => all.map(make => make(picked, names)), "% of input tokens", GROUPED);
}
function evals() {
  const found = shown.filter(i => known(value("em_strict", i)) || known(value("em_flexible", i)));
  const kind = (name, label, k) => (picked, names) => ({ type: "bar", orientation: "h", name: label, y: names, x: picked.map(i => value(name, i)), customdata: picked,
    error_x: { type: "data", array: picked.map(i => value(name + "_se", i) ?? 0), color: css("--text"), thickness: 1.4 },
    marker: { color: color(PALETTE[theme], k), opacity: picked.map(i => valid(i) ? 1 : .45) },
    hovertext: picked.map(i => `<b>${escape(value("task", i) ?? "")}</b><br>${label} ${number(value(name, i))} ± ${number(value(name + "_se", i) ?? 0)}, ${value("n_eff", i)} problems` +
      reasonsOf(i).map(([c, m]) => `<br><b>not valid: ${escape(c)}</b><br>${wrap(escape(m)).join("<br>")}`).join("")), hoverinfo: "text" });
  bars("evals", found, (picked, names) => [kind("em_flexible", "flexible", 4)(picked, names), kind("em_strict", "strict", 0)(picked, names),
    { type: "scatter", mode: "markers", name: "threshold", y: names, x: picked.map(i => value("threshold", i)), marker: { symbol: "line-ns", size: 18, line: { color: css("--bad"), width: 2 } }, hovertemplate: "threshold %{x}<extra></extra>" }],
  "exact match", GROUPED);
}
function timeline() {
  const run = D.timelines.find(t => t.run === $("timeline-run").value);
  if (!run) return;
  const kinds = { stage: color(PALETTE[theme], 0), process: color(PALETTE[theme], 5), point: color(PALETTE[theme], 2), bad: css("--bad") };
  const shape = layout("seconds since the start of the run", "", { bargap: .3, barmode: "overlay" });
  const lanes = [...new Set(run.bars.map(b => b.lane))].reverse();
  $("timeline").style.height = Math.max(220, 80 + 24 * lanes.length) + "px";
  shape.yaxis = { ...shape.yaxis, categoryorder: "array", categoryarray: lanes, tickfont: { size: 11 } };
  shape.xaxis.rangemode = "tozero";
  draw("timeline", [{ type: "bar", orientation: "h", y: run.bars.map(b => b.lane), base: run.bars.map(b => b.start), x: run.bars.map(b => b.end - b.start),
    marker: { color: run.bars.map(b => kinds[b.bad ? "bad" : b.kind]) }, hovertext: run.bars.map(b => `<b>${escape(b.name)}</b><br>${b.start.toFixed(1)} s to ${b.end.toFixed(1)} s (${(b.end - b.start).toFixed(1)} s)` +
      (b.message ? "<br>" + wrap(escape(b.message)).join("<br>") : "")), hoverinfo: "text" }], shape);
}

// ---- text ----------------------------------------------------------------------------------------------------
function summarise() {
  const bad = shown.filter(i => !valid(i)).length;
  $("summary").innerHTML = `${shown.length === D.n ? D.n : `${shown.length} of ${D.n}`} points, ${bad ? `<b>${bad} not valid</b>` : "all valid"} · ${escape(D.generated)}`;
  const active = Object.values(state.filters).reduce((sum, words) => sum + words.size, 0);
  $("active").textContent = active ? `(${active} active)` : "";
}
function cards() {
  const any = test => shown.some(test);
  const has = { pareto: i => known(value("out", i)), latency: i => valid(i) && known(value("ttft_50", i)), stages: i => valid(i) && D.stages[i],
    acceptance: i => known(value("accept", i)), cache: i => ["cache_client", "cache_server", "cache_theory"].some(n => known(value(n, i))),
    evals: i => known(value("em_strict", i)) || known(value("em_flexible", i)), invalid: i => !valid(i) };
  for (const [id, test] of Object.entries(has)) $(id + "-card").hidden = !any(test);
  const runs = new Set(shown.map(i => value("run", i))), select = $("timeline-run"), before = select.value;
  const names = D.timelines.map(t => t.run).filter(run => runs.has(run) || !shown.length);
  select.innerHTML = names.map(n => `<option>${escape(n)}</option>`).join("");
  if (names.includes(before)) select.value = before;
  $("timeline-card").hidden = !names.length;
}
function invalidList() {
  const byCode = new Map();
  for (const i of shown) for (const [code, message] of reasonsOf(i)) {
    if (!byCode.has(code)) byCode.set(code, []);
    byCode.get(code).push([i, message]);
  }
  $("invalid").innerHTML = [...byCode].sort((a, b) => b[1].length - a[1].length).map(([code, items]) =>
    `<div class="reason"><code>${escape(code)}</code> ${items.length} point${items.length > 1 ? "s" : ""}<ul>` +
    items.slice(0, 8).map(([i, m]) => `<li><a href="#" data-index="${i}">${escape(value("point", i))}</a> (${escape(value("key", i))}): ${escape(m)}</li>`).join("") +
    (items.length > 8 ? `<li>and ${items.length - 8} more, listed under Points</li>` : "") + "</ul></div>").join("");
  for (const link of $("invalid").querySelectorAll("a")) link.onclick = event => { event.preventDefault(); select(Number(link.dataset.index), true); };
}
function table() {
  const used = TABLE.filter(([name]) => name === "reasons" || shown.some(i => known(value(name, i))));
  $("table").tHead.innerHTML = "<tr>" + used.map(([name, label, text]) => `<th tabindex="0" data-name="${name}" class="${text ? "text" : ""}" aria-sort="${state.sort[0] === name ?
    (state.sort[1] > 0 ? "ascending" : "descending") : "none"}">${label}</th>`).join("") + "</tr>";
  const [by, direction] = state.sort, cell = (name, i) => name === "reasons" ? (valid(i) ? "yes" : reasonsOf(i).map(r => r[0]).join(", ")) : value(name, i);
  const order = by ? [...shown].sort((a, b) => {
    const x = cell(by, a), y = cell(by, b);
    if (!known(x) || !known(y)) return known(x) ? -1 : known(y) ? 1 : 0;
    return direction * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  }) : shown;
  $("table").tBodies[0].innerHTML = order.slice(0, state.rows).map(i => `<tr data-index="${i}">` + used.map(([name, , text]) => {
    const v = cell(name, i);
    return `<td class="${text ? "text" : ""}${name === "reasons" && !valid(i) ? " bad" : ""}">${escape(typeof v === "number" ? number(v) : v ?? "")}</td>`;
  }).join("") + "</tr>").join("");
  $("more").hidden = order.length <= state.rows;
  $("more").textContent = `Show more (${order.length - state.rows} left)`;
}
function select(index, scroll = true) { state.selected = index; detail(index); if (scroll) $("detail").scrollIntoView({ block: "nearest" }); }
function detail(i) {
  if (i >= D.n) { state.selected = null; $("detail").hidden = true; return; }
  const skip = new Set(["series", "reason_ids", "shape", "validity", "key", "point"]);
  const items = Object.keys(D.col).filter(name => !skip.has(name) && known(value(name, i))).map(name => {
    const v = value(name, i);
    return `<div><dt>${escape(name.replace(/_(50|90|99)$/, " p$1").replaceAll("_", " "))}</dt><dd>${escape(typeof v === "number" ? number(v) : v)}</dd></div>`;
  });
  $("detail").hidden = false;
  $("detail").innerHTML = `<h3>${escape(value("point", i))} of ${escape(value("key", i))}</h3>` +
    reasonsOf(i).map(([code, message]) => `<div class="reason"><code>${escape(code)}</code> ${escape(message)}</div>`).join("") + `<dl>${items.join("")}</dl>`;
}

// ---- start ---------------------------------------------------------------------------------------------------
function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
}
function options(id, list, chosen) {
  $(id).innerHTML = list.map(([name, label]) => `<option value="${name}">${label}</option>`).join("");
  if (chosen) $(id).value = chosen;
}
function chooseColour() {
  const distinct = name => new Set(D.col[name] || []).size;
  if (distinct("series") <= 10) return "series";
  return ["framework", "hw", "model", "precision"].filter(n => distinct(n) > 1 && distinct(n) <= 10).sort((a, b) => distinct(b) - distinct(a))[0] || "framework";
}
function settle() { D.runs = new Set(D.col.run || []).size; options("colour", COLOURS, chooseColour()); }
function wire() {
  options("pareto-y", Y); options("pareto-x", X); options("latency-metric", LATENCY);
  for (const id of ["pareto-y", "pareto-x", "frontier", "show-invalid"]) $(id).onchange = () => { stale.add("pareto"); flush(); };
  $("colour").onchange = () => { stale.add("pareto"); stale.add("latency"); flush(); };
  $("latency-metric").onchange = () => { stale.add("latency"); flush(); };
  $("timeline-run").onchange = () => { stale.add("timeline"); flush(); };
  $("reset").onclick = () => { state.filters = {}; remember(); refresh(); };
  $("more").onclick = () => { state.rows += 5 * PAGE_ROWS; table(); };
  $("theme").onclick = () => { setTheme(theme === "dark" ? "light" : "dark"); for (const id in drawers) stale.add(id); flush(); };
  const sort = event => {
    const head = event.target.closest("th"), row = event.target.closest("tbody tr");
    if (head) { const name = head.dataset.name; state.sort = [name, state.sort[0] === name ? -state.sort[1] : 1]; table(); }
    else if (row) select(Number(row.dataset.index));
  };
  $("table").onclick = sort;
  $("table").onkeydown = event => { if (event.key === "Enter") sort(event); };
  matchMedia("(prefers-color-scheme: dark)").onchange = event => { setTheme(event.matches ? "dark" : "light"); for (const id in drawers) stale.add(id); flush(); };
  if (matchMedia("(max-width: 760px)").matches) $("filters").open = false;
}
function follow() {
  $("live").hidden = false;
  const source = new EventSource("events");
  source.onmessage = async () => { accept(await (await fetch("data.json", { cache: "no-store" })).json()); settle(); refresh(); $("live").classList.remove("lost"); };
  source.onerror = () => $("live").classList.add("lost");
}
(async () => {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (!("DecompressionStream" in window)) { $("summary").textContent = "This browser is too old for the figures (no DecompressionStream); see report.md."; return; }
  const [data, code] = await Promise.all([inflate($("data").textContent), inflate($("plotly").textContent)]);
  accept(JSON.parse(data));
  const script = document.createElement("script");
  script.textContent = code; document.head.append(script); $("plotly").remove(); $("data").remove();
  recall(); wire(); settle(); refresh();
  for (const id in drawers) observer.observe($(id));
  if (LIVE) follow();
})();
