/* The config with the origin of each value, how runs differ in it, and what they ran on. */

const VIEWS = { differs: "Keys that differ", set: "Keys that were set", all: "All keys" };

function drawSettings(section, runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const value = (run, key) => run.settings[key]?.[0] ?? "none";
  const differs = (key) => runs.some((run) => value(run, key) !== value(runs[0], key));
  const wanted = {
    differs, all: () => true,
    set: (key) => runs.some((run) => (run.settings[key]?.[1] ?? "default") !== "default"),
  };
  let which = runs.length > 1 ? "differs" : "set";
  const filter = el("input", { type: "search", placeholder: "Filter by key", "aria-label": "Filter by key" });
  const choice = el("select", { "aria-label": "Which keys" }, ...Object.entries(VIEWS)
    .filter(([name]) => runs.length > 1 || name !== "differs")
    .map(([name, text]) => el("option", { value: name, selected: name === which }, text)));
  const body = el("tbody");
  const count = el("span", { "aria-live": "polite" });
  const fill = () => {
    which = choice.value;
    const shown = keys.filter((key) => wanted[which](key) && key.includes(filter.value.trim()));
    count.textContent = `${shown.length} of ${keys.length} keys`;
    body.replaceChildren(...shown.map((key) => el("tr", { class: differs(key) ? "differs" : "" },
      el("td", {}, el("code", { text: key })),
      ...runs.map((run) => el("td", {}, el("code", { text: value(run, key) }),
        el("div", { class: "muted", text: run.settings[key]?.[1] ?? "" }))))));
  };
  choice.addEventListener("change", fill);
  filter.addEventListener("input", fill);
  section.append(
    el("p", { class: "lead" }, runs.length > 1
      ? "Under each value: where it came from. Keys in which the runs differ are marked."
      : "Under each value: where it came from. `posttrain report A B` shows how two runs differ."),
    el("div", { class: "bar" }, choice, filter, count),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "key"),
      ...runs.map((run) => el("th", { text: run.name })))), body)));
  fill();
}

function drawEnvironment(section, runs) {
  const metadata = [
    ["status", (run) => run.status], ["command", (run) => `posttrain ${run.command}`], ["preset", (run) => run.preset],
    ["model", (run) => run.model], ["folder", (run) => run.path], ["host", (run) => run.host],
    ["started", (run) => run.started], ["resumed", (run) => run.resumed], ["ended", (run) => run.ended],
    ["checkpoints", (run) => run.checkpoints.map((step) => `step ${step}`).join(", ") || "none"],
    ...[...new Set(runs.flatMap((run) => Object.keys(run.versions ?? {})))].map((name) => [name, (run) => run.versions?.[name]]),
  ];
  const rows = metadata.filter(([, of]) => runs.some((run) => of(run))).map(([name, of]) =>
    el("tr", { class: name !== "folder" && runs.some((run) => of(run) !== of(runs[0])) ? "differs" : "" },
      el("td", {}, name), ...runs.map((run) => el("td", { text: of(run) ?? "" }))));
  section.append(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, ""),
    ...runs.map((run) => el("th", { text: run.name })))), el("tbody", {}, ...rows))));
}
