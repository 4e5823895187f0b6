"use strict";
/* Reads what is in the page, and puts text on the screen as text. */

const $ = (id) => document.getElementById(id);

/** Bytes of a compressed block of the page. */
async function unpack(id) {
  const text = atob($(id).textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** An element. Properties: `class`, `text` (see `put`), `style` (custom properties and others), `on` (events), attributes. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") put(made, String(value));
    else if (name === "style") for (const [key, v] of Object.entries(value)) made.style.setProperty(key, v);
    else if (name === "on") for (const [event, f] of Object.entries(value)) made.addEventListener(event, f);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/* Characters that are not seen, or change the order in which others are seen: they are written out. */
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Add text to an element: never as markup, hidden characters written out, `needle` (lower case) marked. */
function put(into, text, needle = "") {
  let at = 0;
  for (const found of text.matchAll(HIDDEN)) {
    putMarked(into, text.slice(at, found.index), needle);
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    into.append(el("span", { class: "ctl", title: "a character that is not seen" }, `U+${code}`));
    at = found.index + found[0].length;
  }
  putMarked(into, text.slice(at), needle);
}

function putMarked(into, text, needle) {
  const lower = needle ? text.toLowerCase() : "";
  let at = 0;
  for (let next; needle && (next = lower.indexOf(needle, at)) >= 0; at = next + needle.length) {
    into.append(text.slice(at, next), el("mark", {}, text.slice(next, next + needle.length)));
  }
  if (at < text.length) into.append(text.slice(at));
}

/** A number for people: about four digits, or so many. */
function show(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 2);
  if (size >= 1000) {
    const before = Math.floor(Math.log10(size)) + 1;
    return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, digits - before) });
  }
  return String(+value.toPrecision(digits));
}

/** Numbers that stand side by side: each with as many digits as it takes to tell all of them apart. */
function showAll(values) {
  const different = new Set(values).size;
  let texts = [];
  for (let digits = 4; digits <= 14; digits++) {
    texts = values.map((value) => show(value, digits));
    if (new Set(texts).size === different) break;
  }
  return texts;
}

function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 90) return `${show(+seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (number) => css(`--s${number % 8}`);
const lastOf = (values) => (values || []).findLast((value) => value !== null && value !== undefined) ?? null;
const firstOf = (values) => (values || []).find((value) => value !== null && value !== undefined) ?? null;
const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);

/** What is shown when the pointer rests on something. */
const tip = {
  show(text, x, y) {
    const box = $("tip") || document.body.appendChild(el("div", { id: "tip", role: "tooltip" }));
    box.hidden = false;
    box.replaceChildren();
    put(box, text);
    const left = Math.min(x + 14, innerWidth - box.offsetWidth - 8);
    const top = y + 22 + box.offsetHeight > innerHeight ? y - box.offsetHeight - 12 : y + 18;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${top}px`;
  },
  hide() {
    if ($("tip")) $("tip").hidden = true;
  },
};
