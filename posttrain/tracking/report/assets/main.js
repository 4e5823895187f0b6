/* Puts the page together. */

let data = null;
let tokens = null;

/** The tokens' columns: three bytes of the piece, log-probability, advantage; `data.tokens` bytes each. */
function columns(bytes, count, scale) {
  return {
    piece: (i) => bytes[i] | (bytes[count + i] << 8) | (bytes[2 * count + i] << 16),
    logprob: (i) => -((bytes[3 * count + i] / scale) ** 2),
    advantage: (i) => ((bytes[4 * count + i] << 24) >> 24) / 127,
  };
}

const ACCURACY = /^val-core\/.*\/mean@\d+$/;

function tiles(run) {
  const values = run.curves.values;
  const accuracy = Object.keys(values).find((name) => ACCURACY.test(name));
  const steps = run.curves.steps;
  const change = (name, label) => values[name] && [show(lastOf(values[name])), `${label}, from ${show(firstOf(values[name]))}`];
  const seconds = sum(values["timing_s/step"] ?? []) * run.curves.every;
  return [
    change("critic/score/mean", "reward"), accuracy && change(accuracy, "validation"),
    change("train/loss", "loss"), change("val/loss", "validation loss"), change("rewards/accuracies", "pairs in order"),
    change("response_length/mean", "response length"),
    steps.length && [show(steps[steps.length - 1]), "steps"], seconds && [duration(seconds), "in all steps"],
  ].filter(Boolean).slice(0, 6).map(([value, label]) => el("div", {}, el("b", {}, value), el("span", {}, label)));
}

function drawHead(head, runs) {
  if (runs.length === 1) {
    const [run] = runs;
    head.append(el("h1", {}, el("span", { text: run.name }), el("span", { class: `chip ${run.status}` }, run.status ?? "")),
      el("p", { class: "metadata", text: [`posttrain ${run.command}`, run.preset && `preset ${run.preset}`, run.model, `seed ${run.seed}`,
        run.started && `started ${run.started.replace("T", " ").slice(0, 16)} UTC`].filter(Boolean).join("  ·  ") }),
      ...warnings(runs), ...[tiles(run)].filter((made) => made.length).map((made) => el("div", { class: "tiles" }, ...made)));
  } else {
    const rows = runs.map((run) => el("tr", {},
      el("td", { class: "swatch" }, el("i", { style: { background: color(run.group) } }), el("b", { text: run.name })),
      el("td", {}, el("span", { class: `state ${run.status}` }, run.status ?? "")), el("td", { class: "n" }, String(run.seed)), el("td", { class: "n" }, show(lastOf(run.curves.steps))),
      el("td", { class: "n" }, show(lastOf(run.curves.values["critic/score/mean"]))),
      el("td", { class: "n" }, show(lastOf(run.curves.values[Object.keys(run.curves.values).find((n) => ACCURACY.test(n))]))),
      el("td", { class: "n" }, show(lastOf(run.curves.values["train/loss"] ?? run.curves.values["actor/pg_loss"])))));
    head.append(el("h1", {}, `${runs.length} runs`),
      el("p", { class: "metadata" }, "Runs that differ in nothing but the seed have one colour; the thick line is their mean."),
      el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, el("th", {}, "run"), el("th", {}, "status"),
        ...["seed", "steps", "reward", "validation", "loss"].map((name) => el("th", { class: "n" }, name)))), el("tbody", {}, ...rows))),
      ...warnings(runs));
  }
  for (const run of runs.filter((each) => each.failure)) {
    const { message, hint, who } = run.failure;
    head.append(el("p", { class: "problem failure", text: `${run.name} failed (${who}): ${message}${hint ? `\nhint: ${hint}` : ""}\nlogs: ${run.path}/logs` }));
  }
  for (const run of runs) for (const problem of run.problems) head.append(el("p", { class: "problem", text: problem }));
}

/** What the runs warned of, in one box if there is anything: the newest warning of each kind, and what to do. */
function warnings(runs) {
  const rows = runs.flatMap((run) => run.warnings.map((warning) => el("li", {},
    el("b", { text: runs.length > 1 ? `${run.name}, step ${warning.step}` : `step ${warning.step}` }),
    el("span", { text: warning.text }), el("div", { class: "muted", text: `hint: ${warning.hint}` }))));
  return rows.length ? [el("div", { class: "warnings", role: "region", "aria-label": "Warnings" },
    el("h2", {}, rows.length > 1 ? `${rows.length} warnings` : "1 warning"), el("ul", {}, ...rows))] : [];
}

/** Sections about one run, drawn anew when another one is chosen. */
function drawRun(number) {
  const run = data.runs[number];
  const anew = (id, drawIt) => {
    const section = $(id);
    section.replaceChildren(section.querySelector("h2"));
    drawIt(section);
  };
  anew("time", (section) => drawTime(section, run));
  anew("distributions", (section) => drawDistributions(section, run));
  anew("trajectories", (section) => drawEpisodes(section, run, number));
}

async function main() {
  const [json, bytes] = await Promise.all([unpack("data"), unpack("tokens")]);
  data = JSON.parse(new TextDecoder().decode(json));
  tokens = columns(bytes, data.tokens, data.logprob_scale);
  const runs = data.runs;
  drawHead($("head"), runs);
  drawCurves($("curves"), runs);
  if (runs.length > 1) {
    $("chooser").hidden = false;
    runs.forEach((run, i) => $("run").append(el("option", { value: i, text: run.name })));
    $("run").addEventListener("change", () => drawRun(+$("run").value));
  }
  drawRun(0);
  drawSettings($("settings"), runs);
  drawEnvironment($("environment"), runs);
  put($("foot"), `Made ${data.made.replace("T", " ").slice(0, 16)} UTC by posttrain ${data.version}. `
    + "Keys: / searches, arrows walk the list of trajectories. This page asks no server for anything.");
  document.documentElement.dataset.ready = Math.round(performance.now());
}

main().catch((error) => {
  $("head").append(el("h1", {}, "This report cannot be shown"), el("p", { class: "problem", text: String(error) }));
  throw error;
});
