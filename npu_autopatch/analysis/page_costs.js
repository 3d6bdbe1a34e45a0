"use strict";

// What a cost looks like: its numbers, its bars, the colour and the mark of its state.

// A state's key is its colour in page.css and its mark in page.html.
const STATES = {
  "fused here": { key: "fused", meaning: "npu_autopatch does it" },
  "fused by torch_npu": { key: "torch", meaning: "torch_npu does it by itself" },
  "candidate": { key: "candidate", meaning: "an op could serve it" },
  "not possible": { key: "impossible", meaning: "the op's contract forbids it" },
  "no op exists": { key: "missing", meaning: "torch_npu has none for it" },
};
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const grouped = new Intl.NumberFormat("en");

/** An element; strings among `children` become text, never markup. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function mark(state) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#mark-${STATES[state].key}`);
  svg.setAttribute("class", "mark");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

// ---- numbers ----

function inBytes(value) {
  let unit = 0;
  while (unit < UNITS.length - 1 && Number(value.toPrecision(3)) >= 1000) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? value.toPrecision(3) : value}\u00a0${UNITS[unit]}`;
}

const MEASURES = {
  launches: { label: "Launches", shown: (value) => grouped.format(value) },
  bytes: { label: "Bytes read and written", shown: inBytes },
};

function change(before, after) {
  if (!before) return after ? "new" : "";
  const percent = (100 * (after - before)) / before;
  const digits = Math.abs(percent) < 10 && percent % 1 ? 1 : 0;
  const text = Math.abs(percent).toFixed(digits);
  if (!Number(text)) return "\u00b10\u00a0%";
  return `${percent < 0 ? "\u2212" : "+"}${text}\u00a0%`;
}

function number(measure, value, when) {
  const title = measure === "bytes" ? `${grouped.format(value)} bytes` : undefined;
  return make("data", { value, title, class: when }, MEASURES[measure].shown(value));
}

/** "12 -> 1". */
function pair(measure, before, after, prefix = "") {
  const first = make("span", { class: "first" }, prefix, number(measure, before, "before"));
  return [first, arrow(), number(measure, after, "after")];
}

const arrow = () => make("span", { class: "arrow" }, "\u00a0\u2192\u00a0");
const share = (value, whole) => (whole ? (100 * value) / whole : 0);
const times = (cost, count) => ({ launches: cost.launches * count, bytes: cost.bytes * count });
const plus = (one, other) => ({ launches: one.launches + other.launches, bytes: one.bytes + other.bytes });
const total = (costs) => costs.reduce(plus, { launches: 0, bytes: 0 });

/** What `chains` cost, `count` times, by state: the segments of a bar. */
function byState(chains, when, count) {
  return Object.keys(STATES).map((state) => {
    const costs = chains.filter((chain) => chain.judgement.state === state).map((chain) => chain[when]);
    return [state, times(total(costs), count)];
  });
}

const added = (bars) => bars[0].map(([state], at) => [state, total(bars.map((bar) => bar[at][1]))]);

// ---- bars ----

function bar(segments, measure, scale, when, marked) {
  const track = make("span", { class: `bar ${when}`, "aria-hidden": "true" });
  for (const [state, cost] of segments) {
    if (!cost[measure]) continue;
    const width = share(cost[measure], scale);
    const segment = make("span", { class: `segment ${STATES[state].key}` });
    segment.style.width = `${width}%`;
    if (marked && width > 4) segment.append(mark(state));
    track.append(segment);
  }
  return track;
}

function amount(measure, before, after, bars, ...more) {
  const numbers = make("span", { class: "numbers" }, ...pair(measure, before[measure], after[measure]));
  return make("span", { class: `amount ${measure}` }, numbers, make("span", { class: "bars" }, ...bars), ...more);
}
