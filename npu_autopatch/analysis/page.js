"use strict";

// The page: a panel for each mode, in it the tree of parts, blocks and chains. Costs are drawn by page_costs.js.

const FILTERING = "Show only the chains of this state, and again: all";
const analysis = JSON.parse(document.getElementById("analysis").textContent);

// ---- one chain ----

function chainOf(chain, count, scale) {
  const { state } = chain.judgement;
  const cells = Object.keys(MEASURES).map((measure) => {
    const bars = ["before", "after"].map((when) => bar([[state, chain[when]]], measure, scale[measure], when));
    return amount(measure, chain.before, chain.after, bars);
  });
  const summary = make(
    "summary",
    { class: "row" },
    make("span", { class: "name" }, chain.name),
    make("span", { class: `state ${STATES[state].key}` }, mark(state), make("span", {}, state)),
    ...cells,
  );
  return make("details", { class: `chain ${STATES[state].key}`, "data-state": state }, summary, reasons(chain, count));
}

function reasons(chain, count) {
  const { reason, source, candidates } = chain.judgement;
  const why = make("div", { class: "why" }, make("p", { class: "reason" }, reason));
  if (source) why.append(make("p", { class: "source" }, source));
  for (const candidate of candidates) why.append(candidateOf(candidate));

  const what = make("div", { class: "what" }, opsOf(chain));
  if (count > 1) {
    const sums = Object.keys(MEASURES).flatMap((measure) => {
      const [before, after] = [chain.before, chain.after].map((cost) => cost[measure] * count);
      return [make("span", {}, ...pair(measure, before, after), measure === "bytes" ? "" : ` ${measure}`)];
    });
    what.append(list(`In all ${count} layers`, "sums", sums));
  }
  const facts = Object.entries(chain.facts).map(([name, value]) => [name, said(value)]);
  const shorter = candidates.length ? what : why;
  if (chain.sites.length) shorter.append(list("Sites", "sites", chain.sites.map((site) => make("code", {}, site))));
  if (facts.length) shorter.append(titled("Facts", terms(facts, "facts")));
  return make("div", { class: "reasons" }, why, what);
}

const titled = (title, ...content) => make("section", {}, make("h4", {}, title), ...content);
const list = (title, kind, items) => {
  return titled(title, make("ul", { class: kind }, ...items.map((item) => make("li", {}, item))));
};

function terms(pairs, kind) {
  const entries = pairs.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value)));
  return make("dl", { class: kind }, ...entries);
}

function said(value) {
  if (Array.isArray(value) && value.every((item) => typeof item !== "object")) return value.join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

function candidateOf({ op, prepare, check, experiment, source }) {
  const told = Object.entries({ Prepare: prepare, Check: check, Experiment: experiment, Source: source });
  const code = make("h4", {}, "Candidate ", make("code", {}, op));
  return make("section", { class: "candidate" }, code, terms(told.filter(([, text]) => text), "told"));
}

function opsOf({ ops_before: before, ops_after: after }) {
  const most = (op) => Math.max(before[op] || 0, after[op] || 0);
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort((a, b) => most(b) - most(a));
  const cell = (count = 0) => make("td", {}, grouped.format(count));
  const lines = names.map((op) => {
    return make("tr", {}, make("th", { scope: "row" }, make("code", {}, op)), cell(before[op]), cell(after[op]));
  });
  const head = ["op", "before", "after"].map((text) => make("th", { scope: "col" }, text));
  return make("table", { class: "ops" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
}

// ---- the tree: model, part, block, chain ----

function partOf(part, whole) {
  const scale = { launches: 0, bytes: 0 };
  const blocks = new Map();
  for (const chain of part.chains) {
    for (const measure of Object.keys(MEASURES)) {
      scale[measure] = Math.max(scale[measure], chain.before[measure], chain.after[measure]);
    }
    if (!blocks.has(chain.block)) blocks.set(chain.block, []);
    blocks.get(chain.block).push(chain);
  }
  const [before, after] = ["before", "after"].map((when) => total(part.chains.map((chain) => chain[when])));
  const cells = Object.keys(MEASURES).map((measure) => {
    const bars = ["before", "after"].map((when) => {
      return bar(byState(part.chains, when, part.count), measure, whole[measure], when);
    });
    const each = make("span", { class: "each" }, ...pair(measure, before[measure], after[measure], "each\u00a0"));
    const below = part.count > 1 ? [each] : [];
    return amount(measure, times(before, part.count), times(after, part.count), bars, ...below);
  });
  const name = make("span", { class: "name" }, make("strong", {}, part.name));
  if (part.kind && part.kind !== part.name) name.append(make("span", { class: "kind" }, part.kind));
  const alike = part.count > 1 ? `${part.count} alike` : "";
  const rows = [...blocks].map(([path, chains]) => {
    const label = path ? make("code", { class: "path" }, path) : make("span", { class: "path own" }, "own code");
    const items = chains.map((chain) => make("li", {}, chainOf(chain, part.count, scale)));
    return make("li", { class: "block" }, label, make("ul", {}, ...items));
  });
  return make(
    "details",
    { class: "part", open: "" },
    make("summary", { class: "row" }, name, make("span", { class: "alike" }, alike), ...cells),
    make("ul", { class: "blocks" }, ...rows),
  );
}

function treeOf(mode, whole) {
  const heading = make(
    "div",
    { class: "row columns", "aria-hidden": "true" },
    make("span", { class: "name" }, "Part, block and chain"),
    make("span", {}, "State"),
    make("span", {}, "Launches, before \u2192 after"),
    make("span", {}, "Bytes, before \u2192 after"),
  );
  const empty = make("p", { class: "empty", hidden: "" }, `No chain of this state in ${mode.name}.`);
  return make("div", { class: "tree" }, heading, ...mode.parts.map((part) => partOf(part, whole)), empty);
}

// ---- one mode ----

function totalsOf(bars) {
  const figures = Object.entries(MEASURES).map(([measure, { label }]) => {
    const [before, after] = bars.map((segments) => total(segments.map(([, cost]) => cost))[measure]);
    const scale = Math.max(before, after);
    const saved = make("span", { class: "saved" }, change(before, after));
    return make(
      "figure",
      { class: `total ${measure}` },
      make("figcaption", {}, make("h3", {}, label), make("p", {}, ...pair(measure, before, after), saved)),
      make("span", { class: "when" }, "before"),
      bar(bars[0], measure, scale, "whole", true),
      make("span", { class: "when" }, "after"),
      bar(bars[1], measure, scale, "whole", true),
    );
  });
  return make("div", { class: "totals" }, ...figures);
}

function legendOf(mode, segments) {
  const chains = mode.parts.flatMap((part) => part.chains);
  const launches = total(segments.map(([, cost]) => cost)).launches;
  const buttons = segments.map(([state, cost]) => {
    const count = chains.filter((chain) => chain.judgement.state === state).length;
    const percent = share(cost.launches, launches);
    const rounded = percent && percent < 1 ? "<1" : percent.toFixed(0);
    const { key } = STATES[state];
    return make(
      "button",
      { type: "button", class: `filter ${key}`, "data-state": state, "aria-pressed": "false", title: FILTERING },
      make("span", { class: `state ${STATES[state].key}` }, mark(state), make("span", {}, state)),
      make("span", { class: "meaning" }, STATES[state].meaning),
      make("span", { class: "count" }, `${count} ${count === 1 ? "chain" : "chains"}, ${rounded}\u00a0% of launches`),
    );
  });
  for (const button of buttons) button.addEventListener("click", () => filter(button.dataset.state));
  return make("div", { class: "legend", role: "group", "aria-label": "Show only chains of a state" }, ...buttons);
}

function panelOf(mode, at) {
  const bars = ["before", "after"].map((when) => {
    return added(mode.parts.map((part) => byState(part.chains, when, part.count)));
  });
  const [before, after] = bars.map((segments) => total(segments.map(([, cost]) => cost)));
  const whole = {};
  for (const measure of Object.keys(MEASURES)) whole[measure] = Math.max(before[measure], after[measure]);
  return make(
    "section",
    { class: "mode", id: `mode-${at}`, role: "tabpanel", "aria-labelledby": `tab-${at}`, "data-mode": mode.name },
    make("p", { class: "input" }, mode.input),
    totalsOf(bars),
    legendOf(mode, bars[0]),
    treeOf(mode, whole),
  );
}

// ---- what a reader does ----

let chosen = null;

/** Leave only chains of `state`; the second time, all. */
function filter(state) {
  chosen = state === chosen ? null : state;
  for (const button of document.querySelectorAll(".filter")) {
    button.setAttribute("aria-pressed", String(button.dataset.state === chosen));
  }
  for (const chain of document.querySelectorAll(".chain")) {
    chain.parentElement.hidden = chosen !== null && chain.dataset.state !== chosen;
  }
  for (const outer of document.querySelectorAll(".block, .part")) {
    outer.hidden = !outer.querySelector("li:not([hidden]) > .chain");
    if (chosen && !outer.hidden && outer.matches(".part")) outer.open = true;
  }
  for (const empty of document.querySelectorAll(".empty")) {
    empty.hidden = Boolean(empty.parentElement.querySelector(".part:not([hidden])"));
  }
}

function select(at, focus) {
  document.querySelectorAll("[role=tab]").forEach((tab, index) => {
    tab.setAttribute("aria-selected", String(index === at));
    tab.tabIndex = index === at ? 0 : -1;
    if (index === at && focus) tab.focus();
  });
  document.querySelectorAll(".mode").forEach((panel, index) => (panel.hidden = index !== at));
}

function tabsOf(modes) {
  const tabs = modes.map((mode, at) => {
    const attributes = { type: "button", role: "tab", id: `tab-${at}`, "aria-controls": `mode-${at}` };
    const tab = make("button", attributes, mode.name);
    tab.addEventListener("click", () => select(at));
    tab.addEventListener("keydown", ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (step) select((at + step + modes.length) % modes.length, true);
    });
    return tab;
  });
  return make("div", { class: "tabs", role: "tablist", "aria-label": "Mode" }, ...tabs);
}

function unfolding() {
  const button = make("button", { type: "button", class: "unfold" }, "Open all reasons");
  button.addEventListener("click", () => {
    const open = button.textContent === "Open all reasons";
    for (const chain of document.querySelectorAll(".chain")) chain.open = open;
    button.textContent = open ? "Close all reasons" : "Open all reasons";
  });
  return button;
}

const page = document.getElementById("page");
page.append(
  make(
    "header",
    {},
    make("h1", {}, analysis.model),
    make("p", { class: "counted" }, analysis.counted),
    terms(Object.entries(analysis.versions), "versions"),
  ),
  make("div", { class: "choices" }, tabsOf(analysis.modes), unfolding()),
  ...analysis.modes.map(panelOf),
);
if (analysis.notes.length) {
  const notes = analysis.notes.map((note) => make("li", {}, note));
  page.append(make("section", { class: "notes" }, make("h2", {}, "Notes"), make("ul", {}, ...notes)));
}
page.append(
  make(
    "footer",
    {},
    "Upper, pale bar: before; lower: after. A part is drawn to the scale of the whole model, a chain to that of the ",
    "largest chain in its part. Written by npu-autopatch analyze.",
  ),
);
select(0);
