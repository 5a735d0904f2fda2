// The status page: asks for status.json every second and brings the document up to date in place, so that what is
// focused, selected or folded open stays so.
"use strict";

const EVERY_MS = 1000;
const PARTS = {
  route: "route", queue: "queue", prefill: "prefill", transfer: "transfer", adopt: "adopt",
  first_decode: "first decode", decode: "decode", waiting: "no token yet",
};
const POOL_STATES = ["held", "cached", "quarantined"];
const SPACES = { PAGE: "pages", WINDOW_PAGE: "window pages", REQUEST_SLOT: "request slots" };
const get = (id) => document.getElementById(id);

// ---- building and keeping elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function name(element, label) {
  if (element.getAttribute("aria-label") !== label) {
    element.setAttribute("aria-label", label);
    element.title = label;
  }
}

/** Children of `parent` as `items` say: kept by key, made where new, removed where gone, in order. */
function keep(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const id = key(item);
    let child = old.get(id);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = id;
    }
    old.delete(id);
    update(child, item);
    const place = before === null ? parent.firstChild : before.nextSibling;
    if (place !== child) parent.insertBefore(child, place);
    before = child;
  }
  for (const child of old.values()) child.remove();
}

// ---- numbers

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function scaled(value, units, step) {
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= step; unit += 1; }
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toPrecision(3)} ${units[unit]}`;
}
const bytes = (count) => scaled(count, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const speed = (rate) => scaled(rate, ["B/s", "kB/s", "MB/s", "GB/s"], 1000);
const short = (id) => (id.length > 12 ? `${id.slice(0, 10)}…` : id);

// ---- header and totals

function showHeader(status) {
  say(get("model"), status.model);
  document.title = `${status.ready ? "" : "⚠ "}Sluice: ${status.model}`;
  badge(get("ready"), status.ready ? "good" : "bad", status.ready ? "serving" : "not serving");
  keep(get("alarms"), status.alarms, (text) => text, () => make("p", { class: "alarm" }), say);
}

function badge(element, kind, text) {
  element.className = `badge ${kind}`;
  say(element, text);
}

function showTotals({ totals, now_unix_s, started_unix_s }) {
  const values = [
    ["requests", totals.answers_per_s.toFixed(2), "/s"],
    ["output", totals.tokens_per_s.toFixed(totals.tokens_per_s < 100 ? 1 : 0), "tok/s"],
    ["first token, median", duration(totals.ttft_p50_s), ""],
    ["first token, 95 %", duration(totals.ttft_p95_s), ""],
    ["running", String(totals.running), ""],
    ["waiting for a pair", String(totals.waiting), ""],
    ["answered", String(totals.answers - totals.failures), `+ ${totals.failures} failed`],
    ["router up for", duration(now_unix_s - started_unix_s), ""],
  ];
  keep(get("totals"), values, ([label]) => label,
    ([label]) => make("div", {}, make("dt", {}, label), make("dd", {}, make("span"), make("small"))),
    (box, [, value, unit]) => { say(box.querySelector("span"), value); say(box.querySelector("small"), unit); });
}

// ---- agreement matrix

const KINDS = { agreed: "good", refused: "bad", lost: "bad", connecting: "warn", draining: "warn", unknown: "" };
const sorted = (names) => [...new Set(names)].sort();

function showMatrix(status) {
  const prefills = sorted([...status.pairs.map((p) => p.prefill), ...pods(status, "prefill")]);
  const decodes = sorted([...status.pairs.map((p) => p.decode), ...pods(status, "decode")]);
  const cells = new Map(status.pairs.map((pair) => [`${pair.decode} ${pair.prefill}`, pair]));
  const rows = [{ head: true, id: "head" }, ...decodes.map((decode) => ({ decode, id: decode }))];
  keep(get("matrix"), rows, (row) => row.id, () => make("tr"), (tr, row) => {
    const columns = [{ id: "corner", row }, ...prefills.map((prefill) => ({ id: prefill, row, prefill }))];
    keep(tr, columns, (column) => column.id, makeCell, (cell, column) => {
      if (cell.className === "pair") showPair(cell, cells.get(`${column.row.decode} ${column.prefill}`));
    });
  });
}

const pods = (status, role) => status.pods.filter((pod) => pod.role === role).map((pod) => pod.address);

function makeCell({ row, prefill }) {
  const label = (role, address) => [`${role} `, make("span", { class: "mono" }, address)];
  if (row.head) return prefill ? make("th", { scope: "col" }, ...label("prefill", prefill)) : make("td");
  return prefill ? make("td", { class: "pair" }) : make("th", { scope: "row" }, ...label("decode", row.decode));
}

function showPair(cell, pair) {
  if (!cell.firstChild) {
    cell.append(make("span", { class: "badge" }), make("p", { class: "why" }), make("p", { class: "facts" }),
      make("details", {}, make("summary", {}, "last canary, by component"), make("table", {}, make("tbody"))));
  }
  const state = pair ? pair.state : "unknown";
  badge(cell.querySelector(".badge"), KINDS[state] ?? "", state);
  say(cell.querySelector(".why"), pair && (state !== "agreed" || !pair.usable) ? pair.reason : "");
  say(cell.querySelector(".facts"), pair ? facts(pair).join(" · ") : "");
  const crossed = pair && pair.canary ? pair.canary.components : [];
  cell.querySelector("details").hidden = crossed.length === 0;
  keep(cell.querySelector("tbody"), crossed, (one) => one.component,
    (one) => make("tr", {}, make("td", { class: "mono" }, one.component), make("td", { class: "num" }), make("td", { class: "num" })),
    (tr, one) => {
      say(tr.children[1], bytes(one.bytes));
      say(tr.children[2], one.bytes_per_s ? speed(one.bytes_per_s) : "");
    });
}

function facts(pair) {
  const found = [];
  if (pair.state === "refused") found.push(`every difference: sluice layout diff ${pair.prefill} ${pair.decode}`);
  if (pair.digest) found.push(`agreement ${pair.digest.slice(0, 12)}`);
  if (pair.in_flight) found.push(`${pair.in_flight} in flight`);
  if (pair.breaker !== "closed") found.push(`breaker ${pair.breaker}`);
  if (pair.quarantined_attempts) found.push(`${pair.quarantined_attempts} quarantined`);
  const canary = pair.canary;
  if (canary && !canary.failure) {
    const largest = canary.components.reduce((a, b) => (a && a.bytes >= b.bytes ? a : b), null);
    const rate = largest && largest.bytes_per_s ? ` at ${speed(largest.bytes_per_s)}` : "";
    found.push(`canary ${duration(canary.age_s)} ago, ${duration(canary.seconds)}${rate}`);
  }
  if (canary && canary.transport) found.push(`over ${canary.transport}`);
  return found;
}

// ---- recent requests

const axis = () => document.querySelector("input[name=axis]:checked").value;
const sum = (spans) => spans.reduce((seconds, span) => seconds + span.seconds, 0);
const total = (answer) => sum(answer.spans);
const OUTCOMES = { stop: "good", length: "good", running: "busy", cancelled: "" };

function showAnswers({ answers, now_unix_s }) {
  const byClock = axis() === "clock";
  const shown = (answer) => (axis() === "first" ? answer.spans.filter((span) => span.part !== "decode") : answer.spans);
  const from = Math.min(now_unix_s, ...answers.map((answer) => answer.started_unix_s));
  const longest = Math.max(0.001, ...answers.map((answer) => sum(shown(answer))));
  const scale = byClock ? Math.max(0.001, now_unix_s - from) : longest;
  say(get("axis-end"), answers.length ? (byClock ? `${duration(scale)} ago … now` : `0 … ${duration(scale)}`) : "");
  get("no-answers").hidden = answers.length > 0;
  keep(document.querySelector("#answers tbody"), answers, (answer) => answer.request_id + answer.started_unix_s,
    makeAnswer, (tr, answer) => showAnswer(tr, answer, shown(answer), byClock ? answer.started_unix_s - from : 0, scale));
}

function makeAnswer(answer) {
  const cell = () => make("td", { class: "num" });
  return make("tr", {},
    make("td", { class: "who" }, make("span", { class: "mono" }, short(answer.request_id.replace(/^(chat)?cmpl-/, ""))),
      " ", make("span", { class: "badge" }), make("span", { class: "quiet" })),
    make("td", { class: "bar-cell" }, make("div", { class: "track" }, make("div", { class: "bar", role: "img" }))),
    cell(), cell(), cell(), cell(), cell());
}

function showAnswer(tr, answer, spans, offset_s, scale_s) {
  const [who, bar, first, all, prompt, output, acceptance] = tr.children;
  badge(who.querySelector(".badge"), OUTCOMES[answer.outcome] ?? "bad", answer.outcome);
  const tries = answer.attempts > 1 ? `, attempt ${answer.attempts}` : "";
  say(who.querySelector(".quiet"), answer.decode ? `${answer.prefill} → ${answer.decode}${tries}` : "no pair yet");
  who.title = `request ${answer.request_id}\nattempt ${answer.attempt_id}`;
  const block = bar.querySelector(".bar");
  block.classList.toggle("running", answer.outcome === "running" && spans.length === answer.spans.length);
  block.style.left = `${(100 * offset_s) / scale_s}%`;
  block.style.width = `${(100 * sum(spans)) / scale_s}%`;
  name(block, answer.spans.map((span) => `${PARTS[span.part]} ${duration(span.seconds)}`).join(", "));
  const whole = sum(spans) || 1;
  keep(block, spans, (span) => span.part, (span) => {
    const piece = make("i");
    piece.style.background = `var(--${span.part})`;
    return piece;
  }, (piece, span) => { piece.style.width = `${(100 * span.seconds) / whole}%`; });
  say(first, duration(answer.ttft_s));
  say(all, duration(total(answer)));
  say(prompt, answer.cached_tokens ? `${answer.prompt_tokens} (${answer.cached_tokens} cached)` : `${answer.prompt_tokens}`);
  say(output, `${answer.output_tokens}`);
  say(acceptance, answer.acceptance_tokens === null ? "–" : answer.acceptance_tokens.toFixed(2));
}

// ---- pods and their pools

function showPods(status) {
  const order = (pod) => `${pod.role === "prefill" ? 0 : 1} ${pod.address}`;
  const all = [...status.pods].sort((a, b) => (order(a) < order(b) ? -1 : 1));
  keep(get("pods"), all, order, (pod) => make("article", { class: "pod" },
    make("h3", {}, pod.role, " ", make("span", { class: "mono" }, pod.address), make("span", { class: "badge" })),
    make("p", { class: "why" }), make("p", { class: "facts" }), make("div", { class: "pools" })), showPod);
}

function showPod(card, pod) {
  badge(card.querySelector(".badge"), pod.ready ? "good" : "bad", pod.ready ? "ready" : "not ready");
  const why = card.querySelector(".why");
  why.hidden = !pod.reason;
  say(why, pod.reason);
  const words = [];
  if (pod.name) words.push(pod.name);
  words.push(`${pod.running}${pod.capacity ? ` of ${pod.capacity}` : ""} running`, `${pod.queued} queued`);
  if (pod.retractions) words.push(`${pod.retractions} retractions`);
  if (pod.drafting && pod.drafting.steps) {
    words.push(`acceptance ${pod.drafting.recent_tokens.toFixed(2)} over ${pod.drafting.steps} steps`);
  }
  if (pod.epoch) words.push(`epoch ${pod.epoch.slice(0, 8)}`);
  say(card.querySelector(".facts"), words.join(" · "));
  keep(card.querySelector(".pools"), pod.pools, (pool) => pool.space, () => make("div", { class: "pool" },
    make("div", { class: "label" }, make("span"), make("span", { class: "quiet" })),
    make("div", { class: "stack", role: "img" }), make("ul")), showPool);
}

function showPool(box, pool) {
  const [left, right] = box.querySelector(".label").children;
  const used = POOL_STATES.filter((state) => pool[state]).map((state) => `${pool[state]} ${state}`);
  say(left, SPACES[pool.space] ?? pool.space);
  say(right, `${used.join(", ") || "all free"} of ${pool.total}`);
  const stack = box.querySelector(".stack");
  name(stack, `${SPACES[pool.space] ?? pool.space}: ${[...used, `${pool.free} free`].join(", ")} of ${pool.total}`);
  keep(stack, POOL_STATES, (state) => state, (state) => {
    const piece = make("i");
    piece.style.background = `var(--${state})`;
    return piece;
  }, (piece, state) => {
    piece.style.width = `${pool.total ? (100 * pool[state]) / pool.total : 0}%`;
    piece.style.minWidth = pool[state] ? "2px" : "0";
  });
  const share = pool.total ? (pool.total - pool.free) / pool.total : 0;
  keep(box.querySelector("ul"), pool.components, (one) => one.name,
    (one) => make("li", {}, make("span", { class: "mono" }, one.name), make("span"), make("span")),
    (li, one) => { say(li.children[1], bytes(Math.round(one.bytes * share))); say(li.children[2], `of ${bytes(one.bytes)}`); });
}

// ---- the loop

function legend(id, entries) {
  get(id).append(...entries.map(([variable, label]) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = `var(--${variable})`;
    return make("li", {}, swatch, label);
  }));
}

let newest = null;
let heard_ms = 0;

function show(status) {
  showHeader(status);
  showTotals(status);
  showMatrix(status);
  showAnswers(status);
  showPods(status);
}

async function look() {
  if (document.hidden && newest !== null) return;
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`the router answers ${answer.status}`);
    newest = await answer.json();
    heard_ms = performance.now();
    show(newest);
    say(get("freshness"), "live");
  } catch (error) {
    const ago = newest === null ? "never heard of it" : `shown is ${duration((performance.now() - heard_ms) / 1000)} old`;
    say(get("freshness"), `no answer from the router (${error.message}); ${ago}`);
    badge(get("ready"), "bad", "router unreachable");
  }
}

async function run() {
  for (;;) {
    await look();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

legend("legend", Object.entries(PARTS).filter(([part]) => part !== "waiting"));
legend("pool-legend", [["held", "held"], ["cached", "cached"], ["quarantined", "quarantined"], ["free", "free"]]);
document.querySelector(".switch").addEventListener("change", () => newest && show(newest));
document.addEventListener("visibilitychange", () => document.hidden || look());
run();
