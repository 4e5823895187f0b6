/* Histograms over all trajectories, of any range of steps. */

const TITLES = {
  "response length": ["Response length", "tokens after the prompt"],
  reward: ["Reward", "of the episodes that could be graded"],
  staleness: ["Staleness", "sampled tokens by how many steps their weights were behind"],
  gap: ["Trainer and engine apart", "share of tokens by the difference of the two log-probabilities"],
};

function drawDistributions(section, run) {
  const { parts, of } = run.distributions;
  const names = Object.keys(TITLES).filter((name) => of[name]);
  if (!names.length) return section.append(el("p", { class: "empty" }, "This run has no trajectories on the disk."));
  const range = [0, parts.length - 1];
  const grid = el("div", { class: "grid" });
  const label = el("span", { "aria-live": "polite" });
  const slider = (which, text) => el("label", {}, `${text} `, el("input", {
    type: "range", min: 0, max: parts.length - 1, value: range[which], on: { input: (event) => {
      range[which] = +event.target.value;
      fill();
    } } }));
  const fill = () => {
    const [first, last] = [Math.min(...range), Math.max(...range)];
    label.textContent = `steps ${parts[first][0]} to ${parts[last][1]}`;
    grid.replaceChildren(...names.map((name) => histogram(name, of[name], first, last)));
  };
  if (parts.length > 1) section.append(el("div", { class: "bar" }, slider(0, "From"), slider(1, "to"), label));
  section.append(grid);
  fill();
}

function histogram(name, { edges, single, unit, counts, shares }, first, last) {
  const bins = counts[0].map((_, bin) => sum(counts.slice(first, last + 1).map((part) => part[bin])));
  const [title, about] = TITLES[name];
  const [total, most] = [sum(bins) || 1, Math.max(1e-9, ...bins)];
  const [width, height, base] = [360, 150, 128];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const shape = (tag, attributes, text) => {
    const made = document.createElementNS(svg.namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
    return made;
  };
  svg.setAttribute("class", "histogram");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Histogram: ${title}, ${about}`);
  const slot = width / bins.length;
  const labels = edges.every((edge) => typeof edge === "number") ? showAll(edges) : edges;
  bins.forEach((count, bin) => {
    const tall = count ? Math.max(1, (count / most) * (base - 8)) : 0;
    const gap = Math.min(2, slot * 0.15);
    const bar = shape("rect", { x: bin * slot + gap / 2, y: base - tall, width: Math.max(0.5, slot - gap), height: tall, rx: 1 });
    const where = single ? labels[bin] : `${labels[bin]} to ${labels[bin + 1]}`;
    bar.addEventListener("pointermove", (event) => tip.show(
      `${where} ${unit}\n${shares ? "" : `${count.toLocaleString("en")}: `}${(100 * count / total).toFixed(2)} %`, event.clientX, event.clientY));
    bar.addEventListener("pointerleave", tip.hide);
  });
  const marks = single && bins.length <= 9 ? labels.map((text, i) => [(i + 0.5) * slot, text, "middle"])
    : [[0, labels[0], "start"], [width, labels[labels.length - 1], "end"]];
  for (const [x, text, anchor] of marks) shape("text", { x, y: height - 6, "text-anchor": anchor }, text);
  return el("div", { class: "card", "data-histogram": name },
    el("div", { class: "top" }, el("h3", {}, title), el("span", { class: "readout muted" }, shares ? "" : `${sum(bins).toLocaleString("en")} counted`)),
    el("div", { class: "about" }, about), svg);
}
