/* The browser of trajectories: a list that is searched and sorted, and one trajectory whole. */

const SORTS = {
  step: ["Step", (a, b) => a.step - b.step || a.at - b.at],
  best: ["Reward, best first", (a, b) => b.reward - a.reward],
  worst: ["Reward, worst first", (a, b) => a.reward - b.reward],
  unlikely: ["Least likely tokens", (a, b) => likelihood(a) - likelihood(b)],
  longest: ["Longest", (a, b) => b.tokens - a.tokens],
  slowest: ["Slowest", (a, b) => b.seconds - a.seconds],
  group: ["Prompt", (a, b) => a.kind.localeCompare(b.kind) || a.step - b.step || a.group - b.group || b.reward - a.reward],
};
const OUTCOMES = {
  all: ["All", () => true],
  train: ["Training", (e) => e.kind === "train"],
  val: ["Validation", (e) => e.kind === "val"],
  correct: ["Correct", (e) => e.error === null && e.correct],
  wrong: ["Wrong", (e) => e.error === null && !e.correct],
  tools: ["With tool calls", (e) => e.tool_calls > 0],
  branches: ["With branches", (e) => e.branches > 1],
  failed: ["Failed", (e) => e.error !== null],
};
const COLOURS = { advantage: "Advantage", logprob: "Log-probability", none: "No colours" };

const view = { sort: "step", outcome: "all", colour: "logprob", needle: "", chosen: null, shown: [] };

function drawEpisodes(section, run, number) {
  const mine = data.episodes.filter((episode) => episode.run === number);
  section.append(lead(run, mine));
  if (!mine.length) return;
  groupBranches(mine);
  if (mine.some((episode) => episode.scale)) view.colour = "advantage";
  view.chosen = null;
  const select = (key, label, choices) => el("label", {}, `${label} `, el("select", { id: `by-${key}`,
    on: { change: (event) => { view[key] = event.target.value; key === "colour" ? open(view.chosen) : fill(mine); } } },
    ...Object.entries(choices).map(([value, choice]) =>
      el("option", { value, selected: view[key] === value }, Array.isArray(choice) ? choice[0] : choice))));
  const search = el("input", { type: "search", id: "search", placeholder: "Search ( / )", "aria-label": "Search the text of trajectories" });
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { view.needle = search.value.trim().toLowerCase(); fill(mine); }, 120);
  });
  search.value = view.needle;
  section.append(
    el("div", { class: "bar" }, search, select("outcome", "Show", OUTCOMES), select("sort", "by", SORTS),
      select("colour", "Colour", COLOURS), el("span", { id: "count", "aria-live": "polite" })),
    el("div", { class: "browser" },
      el("div", { id: "list", role: "listbox", "aria-label": "Trajectories", on: { keydown: walk } }),
      el("div", { id: "detail", tabindex: "0", "aria-label": "The chosen trajectory" })));
  fill(mine);
}

function lead(run, mine) {
  const text = el("p", { class: "lead" });
  if (!run.episodes) {
    const why = run.command === "rl" ? `No trajectory ${run.status === "running" ? "is written yet" : "was written"}, or run.rollouts is off.` : `posttrain ${run.command} samples nothing.`;
    put(text, why);
    return text;
  }
  const all = run.shown === run.episodes;
  put(text, `${mine.length.toLocaleString("en")} of ${run.episodes.toLocaleString("en")} trajectories are in this page`
    + (all ? "" : ": the best, the worst, failed ones, and some of every step or of evenly spaced steps")
    + `. All of them, with every token, are in ${run.rollouts}/*.parquet.`);
  if (run.uncoloured) put(text, ` Tokens have no colours: ${run.uncoloured}.`);
  return text;
}

/** Give each trajectory the branches of its episode, itself among them, and the episode's place. */
function groupBranches(mine) {
  const episodes = new Map();
  for (const one of mine) {
    const key = `${one.kind} ${one.step} ${one.episode}`;
    one.siblings = episodes.get(key) ?? [];
    one.siblings.push(one);
    episodes.set(key, one.siblings);
    one.place = one.siblings[0].place ?? episodes.size;
  }
}

/** The mean log-probability of its tokens. */
function likelihood(episode) {
  if (episode.likelihood === undefined) {
    const turns = episode.messages.filter((message) => message.count);
    const all = turns.flatMap(({ first, count }) => Array.from({ length: count }, (_, i) => tokens.logprob(first + i)));
    episode.likelihood = all.length ? sum(all) / all.length : 0;
  }
  return episode.likelihood;
}

/** What a search looks at: everything that is said in an episode. */
function words(episode) {
  episode.words ??= [episode.source, episode.truth, episode.extracted, episode.error, episode.stop_reason,
    ...episode.messages.flatMap((m) => [m.name, said(m), m.reasoning_content, m.tool_calls])]
    .filter(Boolean).join("\n").toLowerCase();
  return episode.words;
}

const said = (message) => (message.count === undefined ? message.text : turnPieces(message).join(""));

function turnPieces({ first, count }) {
  const found = [];
  for (let i = first; i < first + count; i++) found.push(data.pieces[tokens.piece(i)]);
  return found;
}

function fill(mine) {
  view.shown = mine.filter((e) => OUTCOMES[view.outcome][1](e) && (!view.needle || words(e).includes(view.needle)))
    .sort((a, b) => SORTS[view.sort][1](a.siblings[0], b.siblings[0]) || a.place - b.place || a.branch - b.branch);
  $("count").textContent = `${view.shown.length} shown`;
  $("list").replaceChildren(...view.shown.map(row));
  $("list").scrollTop = 0;
  open(view.shown[0] ?? null);
}

const branchName = (e) => `branch ${e.branch + 1} of ${e.branches}`;

const verdict = (e) => (e.error !== null ? "failed" : e.correct ? "correct" : "");

function row(episode) {
  const asked = episode.messages.slice(0, episode.prompt).findLast((m) => m.role === "user");
  const made = el("button", { class: `row ${episode.branch ? "branch" : ""}`, role: "option", tabindex: "-1", "aria-selected": "false", on: { click: () => open(episode) } },
    el("span", {}, [
      ...(episode.branch ? [] : [`step ${episode.step}`, ...(episode.kind === "val" ? ["validation"] : []), `prompt ${episode.group}`]),
      ...(episode.branches > 1 ? [branchName(episode)] : [])].join(" · ")),
    el("span", { class: `reward ${episode.error !== null ? "bad" : episode.correct ? "good" : ""}` },
      episode.error !== null ? "failed" : show(episode.reward)),
    el("span", { class: "what", text: (episode.error ?? asked?.text ?? "").slice(0, 120).replace(/\s+/g, " ") }));
  made.episode = episode;
  return made;
}

/** Arrow keys, Home and End in the list. */
function walk(event) {
  const at = view.shown.indexOf(view.chosen);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, j: at + 1, k: at - 1, Home: 0, End: view.shown.length - 1,
    PageDown: at + 10, PageUp: at - 10 }[event.key];
  if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  open(view.shown[Math.max(0, Math.min(view.shown.length - 1, to))]);
  document.querySelector('.row[aria-selected="true"]')?.focus({ preventScroll: true });
}

/** Scroll the list, and not the page. */
function bringIntoList(made) {
  const list = $("list");
  const [top, bottom] = [made.offsetTop, made.offsetTop + made.offsetHeight];
  if (top < list.scrollTop) list.scrollTop = top;
  else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
}

/** Show one trajectory whole. */
function open(episode) {
  view.chosen = episode;
  for (const made of document.querySelectorAll(".row")) {
    const chosen = made.episode === episode;
    made.setAttribute("aria-selected", chosen);
    made.tabIndex = chosen ? 0 : -1;
    if (chosen) bringIntoList(made);
  }
  const detail = $("detail");
  detail.scrollTop = 0;
  tip.hide();
  if (!episode) return detail.replaceChildren(el("p", { class: "empty" }, "Nothing matches."));
  detail.replaceChildren(metadata(episode), branchesOf(episode), parts(episode), scaleOf(episode), ...episode.messages.map((m, i) => turn(episode, m, i)));
}

const pair = (name, value) => el("span", {}, `${name} `, el("b", { text: value }));

function metadata(e) {
  const shown = [
    pair("step", e.step), pair("prompt", `${e.group} (row ${e.row})`), pair("source", e.source),
    pair("stopped", e.stop_reason), pair("prompt tokens", show(e.prompt_tokens)), pair("response tokens", show(e.tokens)),
    pair("sampled", show(e.sampled)), pair("tool calls", e.tool_calls), pair("time", duration(e.seconds)),
    e.tool_seconds ? pair("in tools", duration(e.tool_seconds)) : null,
    ...Object.entries(e.more).map(([name, value]) => pair(name.replaceAll("_", " "), value)),
  ];
  return el("div", {}, el("h3", {}, `${e.kind === "val" ? "Validation" : "Training"} episode ${verdict(e) ? `· ${verdict(e)}` : ""}`
    + (e.branches > 1 ? ` · ${branchName(e)}` : "")),
    el("div", { class: "key" }, ...shown), e.error !== null ? el("p", { class: "problem", text: e.error }) : null);
}

/** The branches of an agent's episode, to go to: where each forks off, and how many of its tokens are trained on. */
function branchesOf(e) {
  if (e.branches < 2) return "";
  const told = (b) => `${branchName(b)}${b.branch ? "" : ", the last"} · `
    + (b.fork ? `forks off branch ${b.fork[0] + 1} after ${b.fork[1]} messages (${show(b.fork[2])} tokens)` : "begins with a prompt of its own")
    + ` · ${show(b.sampled)} tokens ${b.scale === null ? "sampled, not trained on" : "trained on"}`;
  return el("div", { class: "branches", "aria-label": "Branches of this episode" }, ...e.siblings.map((b) =>
    el("button", { "aria-current": b === e ? "true" : null, on: { click: () => open(b) } }, told(b))));
}

function parts(e) {
  const shown = Object.entries(e.parts).map(([name, value]) => pair(name, show(value)));
  return el("div", { class: "key" }, pair("reward", show(e.reward)), ...shown, pair("expected", e.truth),
    pair("found", e.extracted ?? "nothing"), e.scale === null ? pair("advantage", "not trained on") : pair("largest |advantage|", show(e.scale)));
}

function scaleOf(e) {
  const coloured = e.messages.some((m) => m.count !== undefined);
  if (view.colour === "none" || !coloured) return "";
  if (view.colour === "advantage" && e.scale === null) return el("p", { class: "key" }, "No advantages: it was not trained on.");
  const [low, high] = view.colour === "advantage" ? [show(-e.scale), show(e.scale)] : ["p = 1", "p ≤ 0.01"];
  const name = view.colour === "advantage" ? "advantage" : "how unlikely each token was";
  return el("div", { class: "key" }, el("span", {}, `${name}: ${low}`, el("i", { class: `scale ${view.colour}` }), high));
}

const ROLES = { user: "User", system: "System", assistant: "Assistant", tool: "Tool" };

function turn(episode, message, at) {
  const who = (ROLES[message.role] ?? message.role) + (message.name ? ` · ${message.name}` : "") + (at < episode.prompt ? " (prompt)" : "");
  const versions = (message.versions ?? []).join(", ");
  const body = el("div", { class: "text" });
  if (message.count === undefined) put(body, message.text ?? "", view.needle);
  else paint(body, episode, message);
  return el("div", { class: `turn ${message.role === "tool" ? "tool" : message.role === "assistant" ? "assistant" : ""}` },
    el("div", { class: "who" }, el("span", { text: who }), message.count === undefined ? null
      : el("span", {}, `${message.count} tokens · weights of step ${versions}`),
      message.reward === undefined ? null : el("span", {}, `reward ${show(message.reward)}`)),
    message.reasoning_content ? el("div", { class: "text muted", text: message.reasoning_content }) : null, body,
    ...(message.images ?? []).map(thumbnail),
    message.tool_calls ? el("div", { class: "text", text: message.tool_calls }) : null);
}

const thumbnail = (number) => (number < 0 ? el("span", { class: "muted" }, "(image not shown) ")
  : el("img", { class: "thumbnail", src: data.thumbnails[number], alt: "image" }));

/** The tokens of a turn, each with its colour. */
function paint(body, episode, { first, count }) {
  turnPieces({ first, count }).forEach((piece, i) => {
    const made = el("span", { "data-t": first + i });
    put(made, piece, view.needle);
    const [tone, strength] = toneOf(episode, first + i);
    if (strength > 0.01) made.style.backgroundColor = `rgb(var(--${tone}) / ${strength.toFixed(2)})`;
    body.append(made);
  });
  body.addEventListener("pointerover", (event) => {
    const token = event.target.closest?.("[data-t]");
    if (!token) return tip.hide();
    const at = +token.dataset.t;
    const box = token.getBoundingClientRect();
    const logprob = tokens.logprob(at);
    tip.show(`probability ${show(Math.exp(logprob))}\nlog-probability ${show(logprob)}`
      + (episode.scale === null ? "" : `\nadvantage ${show(tokens.advantage(at) * episode.scale)}`), box.left, box.top);
  });
  body.addEventListener("pointerleave", tip.hide);
}

function toneOf(episode, at) {
  if (view.colour === "logprob") return ["cold", Math.min(0.75, -tokens.logprob(at) * 0.163)];
  if (view.colour === "advantage" && episode.scale) {
    const share = tokens.advantage(at);
    return [share < 0 ? "low" : "high", Math.abs(share) * Math.min(0.6, 0.15 + 0.3 * episode.scale)];
  }
  return ["cold", 0];
}

addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement.type !== "search" && $("search")) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "Escape" && document.activeElement === $("search")) {
    $("search").value = "";
    $("search").dispatchEvent(new Event("input"));
  }
});
