/* Curves of the metrics, and the seconds of each step by phase. */

const HEADLINES = [
  [/^critic\/score\/mean$/, "Reward"],
  [/^val-core\/.*\/mean@\d+$/, "Validation accuracy"],
  [/^train\/loss$/, "Loss"],
  [/^val\/loss$/, "Validation loss"],
  [/^rewards\/(accuracies|margins)$/, "Preferences"],
  [/^response_length\/mean$/, "Response length"],
  [/^actor\/pg_loss$/, "Policy loss"],
  [/^actor\/entropy$/, "Entropy"],
  [/^(actor|train)\/grad_norm$/, "Gradient norm"],
  [/^actor\/(ppo_kl|kl_loss)$/, "KL"],
  [/^rollout_gap\/mean_abs$/, "Trainer and engine apart"],
  [/^critic\/vf_explained_var$/, "Explained variance"],
  [/^perf\/throughput$/, "Tokens a second"],
  [/^rollout\/groups_without_signal$/, "Groups without signal"],
];

/** Why there is nothing to draw. */
function noStep(runs) {
  return runs.some((run) => run.status === "running") ? "No step is finished yet." : "No step was finished.";
}

const plots = new Set();
let smoothing = 0;

function drawCurves(section, runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.values)))];
  if (!names.length) return section.append(el("p", { class: "empty" }, noStep(runs)));
  const steps = Math.max(...runs.map((run) => run.curves.steps.length));
  smoothing = steps > 120 ? 0.8 : 0;
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing });
  slider.addEventListener("input", () => {
    smoothing = +slider.value;
    for (const plot of plots) plot.redo();
  });
  const every = Math.max(...runs.map((run) => run.curves.every));
  const note = every > 1 ? `each point is the mean of ${every} steps` : "";
  section.append(el("div", { class: "bar" }, legend(runs), el("label", {}, "Smoothing ", slider), note));

  const first = HEADLINES.flatMap(([pattern, title]) =>
    names.filter((name) => pattern.test(name)).slice(0, 4).map((name) => [name, title]));
  section.append(el("div", { class: "grid" }, ...first.map(([name, title]) => card(runs, name, title))));

  const rest = names.filter((name) => !first.some(([shown]) => shown === name));
  const grid = el("div", { class: "grid" });
  const filter = el("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter metrics by name" });
  const fill = () => {
    const wanted = filter.value.trim().toLowerCase();
    grid.replaceChildren(...rest.filter((name) => name.toLowerCase().includes(wanted)).map((name) => card(runs, name, "")));
  };
  filter.addEventListener("input", fill);
  const more = el("details", { on: { toggle: () => more.open && !grid.firstChild && fill() } },
    el("summary", {}, `All other metrics (${rest.length})`), el("div", { class: "bar" }, filter), grid);
  if (rest.length) section.append(more);
}

function legend(runs) {
  return el("div", { class: "legend" }, ...runs.map((run) =>
    el("span", {}, el("i", { style: { background: color(run.group) } }), el("span", { text: run.name }))));
}

/** A card with one metric, drawn when it comes into view. */
function card(runs, name, title) {
  const readout = el("span", { class: "readout" });
  const place = el("div", { class: "plot", role: "img", "aria-label": `Curve of ${name}` });
  const made = el("div", { class: "card", "data-metric": name },
    el("div", { class: "top" }, title ? el("h3", {}, title) : el("span", { class: "name", text: name }), readout),
    title ? el("div", { class: "name", text: name }) : null, place);
  const having = runs.filter((run) => run.curves.values[name]);
  whenSeen(place, () => draw(place, (width) => curve(having, name, width, readout)));
  return made;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    entry.target.whenSeen();
  }
}, { rootMargin: "300px" });

function whenSeen(place, then) {
  place.whenSeen = then;
  seen.observe(place);
}

/** Draw into `place`, and again when its size or the colours of the page change. */
function draw(place, make) {
  const plot = {
    redo() {
      if (!place.isConnected) return plots.delete(plot);
      const width = Math.max(place.clientWidth, 120);
      place.replaceChildren();
      const { options, data } = make(width);
      new uPlot(options, data, place);
    },
  };
  plots.add(plot);
  plot.redo();
}

let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => plots.forEach((plot) => plot.redo()), 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redo()));

function smooth(values) {
  if (!smoothing) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : smoothing * mean + (1 - smoothing) * value;
    return mean;
  });
}

/** One line a run; a thick one for the mean of runs that differ in the seed only. */
function curve(runs, name, width, readout) {
  const joined = uPlot.join(runs.map((run) => [run.curves.steps, smooth(run.curves.values[name])]));
  const series = runs.map((run) => {
    const seeds = runs.filter((other) => other.group === run.group).length;
    return line(run.name, color(run.group), seeds > 1 ? 0.45 : 1, seeds > 1 ? 1 : 1.7);
  });
  const data = [...joined];
  for (const group of new Set(runs.map((run) => run.group))) {
    const members = runs.flatMap((run, i) => (run.group === group ? [joined[i + 1]] : []));
    if (members.length < 2) continue;
    data.push(joined[0].map((_, i) => {
      const values = members.map((member) => member[i]).filter((value) => value !== null && value !== undefined);
      return values.length === members.length ? sum(values) / values.length : null;
    }));
    series.push(line(`mean of ${members.length} seeds`, color(group), 1, 2.4));
  }
  const tell = (plot) => {
    const at = plot.cursor.idx;
    const texts = data.slice(1, 6).map((values, i) => el("span", { title: series[i].label, style: runs.length > 1 ? { color: series[i].stroke } : {} },
      show(at === null || at === undefined ? lastOf(values) : values[at])));
    readout.replaceChildren(at === null || at === undefined ? "" : `step ${data[0][at]}:`, ...texts);
  };
  return { options: options(width, series, { hooks: { setCursor: [tell], ready: [tell] } }), data };
}

function line(label, stroke, alpha, width) {
  return { label, stroke, alpha, width, spanGaps: true, points: { show: (u) => u.data[0].length < 30, size: 4 } };
}

function options(width, series, more = {}) {
  const axis = {
    stroke: css("--muted"), font: `11px ${css("--sans")}`,
    grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, border: { show: false },
  };
  return {
    width, height: 178, legend: { show: false }, series: [{}, ...series], padding: [10, 8, 0, 0],
    cursor: { sync: { key: "steps" }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: (u, low, high) => low === null ? [0, 1]
      : low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : uPlot.rangeNum(low, high, 0.1, true) } },
    axes: [{ ...axis, size: 26, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] },
      { ...axis, size: (u, values) => 14 + 6.5 * Math.max(3, ...(values || []).map((v) => v.length)), space: 34,
        values: (u, ticks) => showAll(ticks) }],
    ...more,
  };
}

// ---------------------------------------------------------------------- time

function drawTime(section, run) {
  const values = run.curves.values;
  const phases = Object.keys(values).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step");
  const total = sum(values["timing_s/step"] || []);
  if (!total) return section.append(el("p", { class: "empty" }, noStep([run])));
  const parts = phases.map((name) => [name.slice(9), values[name]]).sort((a, b) => sum(b[1]) - sum(a[1]));
  const shown = parts.slice(0, 7);
  const rest = run.curves.steps.map((_, i) => Math.max(0,
    (values["timing_s/step"][i] || 0) - sum(shown.map(([, seconds]) => seconds[i]))));
  if (sum(rest) > 0.001 * total) shown.push(["other", rest]);
  const rows = shown.map(([name, seconds], i) => el("tr", {},
    el("td", { class: "swatch" }, el("i", { style: { background: color(i) } }), el("span", { text: name })),
    el("td", { class: "n" }, duration(sum(seconds) * run.curves.every)),
    el("td", { class: "n" }, `${(100 * sum(seconds) / total).toFixed(1)} %`)));
  const readout = el("div", { class: "muted" });
  const place = el("div", { class: "plot", role: "img", "aria-label": "Seconds of each step by phase" });
  section.append(el("div", { class: "wide" }, el("div", { class: "card" }, place, readout),
    el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "phase"), el("th", { class: "n" }, "time"),
      el("th", { class: "n" }, "share"))), el("tbody", {}, ...rows))));
  whenSeen(place, () => draw(place, (width) => stack(run.curves.steps, shown, width, readout)));
}

/** A slanted gap through each bar that is taller than the scale. */
function markCut(plot, cut) {
  const { ctx, bbox } = plot;
  const [unit, y] = [devicePixelRatio, bbox.top + 14 * devicePixelRatio];
  const half = Math.max(4 * unit, Math.min(20 * unit, Math.abs(plot.valToPos(1, "x", true) - plot.valToPos(0, "x", true)) / 2)) + unit;
  ctx.save();
  ctx.fillStyle = css("--surface");
  for (const [step] of cut) {
    const x = plot.valToPos(step, "x", true);
    ctx.beginPath();
    for (const [dx, dy] of [[-half, 3], [half, -3], [half, 1], [-half, 7]]) ctx.lineTo(x + dx, y + dy * unit);
    ctx.fill();
  }
  ctx.restore();
}

/** Bars of the phases on top of each other: drawn from the highest sum to the lowest. */
function stack(steps, parts, width, readout) {
  let below = steps.map(() => 0);
  const sums = parts.map(([name, seconds], i) => {
    below = below.map((value, at) => value + (seconds[at] || 0));
    return { values: below, series: { label: name, fill: color(i), stroke: color(i), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.92, 40], gap: 0 }) } };
  }).reverse();
  const totals = sums[0].values.toSorted((a, b) => a - b);
  const usual = totals[Math.floor(0.95 * (totals.length - 1))] || 1;
  const top = Math.min(totals[totals.length - 1] * 1.05, usual * 2.5); // the first step starts everything
  const cut = steps.flatMap((step, at) => (sums[0].values[at] > top ? [[step, sums[0].values[at]]] : []));
  const longer = cut.slice(0, 3).map(([step, seconds]) => `step ${step} took ${duration(seconds)}`).join(", ")
    + (cut.length > 3 ? ` and ${cut.length - 3} more` : "");
  const tell = (plot) => {
    const at = plot.cursor.idx;
    readout.textContent = at === null || at === undefined
      ? `Seconds of each step. Point at one to read it.${cut.length ? ` Bars with a gap are cut: ${longer}.` : ""}`
      : `step ${steps[at]}: ` + parts.map(([name, seconds]) => `${name} ${duration(seconds[at] || 0)}`).join(", ");
  };
  const more = { height: 230, hooks: { setCursor: [tell], ready: [tell], draw: [(plot) => markCut(plot, cut)] },
    scales: { x: { time: false,
    range: (u, low, high) => [low - 0.6, high + 0.6] }, y: { range: () => [0, top] } } };
  return { options: options(width, sums.map((s) => s.series), more), data: [steps, ...sums.map((s) => s.values)] };
}
