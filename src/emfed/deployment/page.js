"use strict";
// Everything is put in as text, never as markup: words of sites may hold anything.
const at = (id) => document.getElementById(id);
const size = (n) => n < 1000 ? `${n} B` : n < 1e6 ? `${(n / 1000).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`;
const short = (n) => typeof n === "number" ? String(Number(n.toPrecision(4))) : n === null || n === undefined ? "" : String(n);
const clock = (seconds) => seconds ? new Date(1000 * seconds).toLocaleTimeString() : "";

function cell(row, value, number) {
  const made = document.createElement("td");
  made.textContent = value;
  if (number) made.className = "number";
  row.append(made);
}

function fill(id, rows) {
  at(id).replaceChildren(...rows.map((values) => {
    const row = document.createElement("tr");
    for (const value of values) cell(row, short(value), typeof value === "number");
    return row;
  }));
}

function draw(history) {
  const known = history.filter((h) => h[1] > 0);
  if (known.length < 2) return;
  const logs = known.map((h) => Math.log10(h[1]));
  const low = Math.min(...logs), high = Math.max(...logs, low + 1e-9);
  const first = known[0][0], last = known[known.length - 1][0];
  at("line").setAttribute("points", known.map((h, i) =>
    `${(640 * (h[0] - first) / Math.max(1, last - first)).toFixed(1)},${(155 - 150 * (logs[i] - low) / (high - low)).toFixed(1)}`).join(" "));
}

function components(arrays, part) {
  const lists = Object.entries(arrays).filter(([, value]) => Array.isArray(value));
  const number = Math.max(0, ...lists.map(([name, value]) => name === "weights" ? value.length : 0));
  const each = lists.filter(([, value]) => number && value.length === number);
  const rest = Object.entries(arrays).filter(([name]) => !each.some(([other]) => other === name));
  const words = (value) => [value].flat(9).slice(0, 24).map(short).join(", ");
  const rows = [...Array(number).keys()].map((k) => [`${part} ${k}`, ...each.map(([, value]) => words(value[k]))]);
  at("heads").replaceChildren(...["", ...each.map(([name]) => name)].map((name) => {
    const head = document.createElement("th");
    head.scope = "col";
    head.textContent = name;
    return head;
  }));
  fill("components", [...rows, ...rest.map(([name, value]) => [name, words(value)])]);
}

function ask(pending) {
  at("asking").hidden = !pending.length;
  at("asked").replaceChildren(...pending.map((fit) => {
    const form = document.createElement("form"), words = document.createElement("p");
    form.method = "post";
    form.action = "answer";
    words.textContent = fit.words;
    const hidden = document.createElement("input");
    hidden.type = "hidden"; hidden.name = "fit"; hidden.value = fit.fit;
    form.append(words, hidden);
    for (const [value, text] of [["yes", "Take part"], ["no", "Do not take part"]]) {
      const button = document.createElement("button");
      button.name = "answer"; button.value = value; button.textContent = text;
      form.append(button);
    }
    return form;
  }));
}

let asked = "";
function show(state) {
  at("title").textContent = state.title || "emfed";
  document.title = `${state.state || ""} ${state.title || "emfed"}`;
  at("headline").textContent = state.line || "";
  at("health").replaceChildren(...(state.reasons || []).map((words) => {
    const item = document.createElement("li");
    item.textContent = words;
    return item;
  }));
  for (const section of document.querySelectorAll("[data-part]"))
    section.hidden = !state[section.dataset.part] || !Object.keys(state[section.dataset.part]).length;
  fill("sites", Object.entries(state.sites || {}).map(([name, s]) => [name,
    (s.in ? "in" : "not in") + (s.connected ? ", connected" : ", away"), clock(s.last), s.refusal]));
  const counted = state.counted, began = state.began;
  at("counted").textContent = counted && began
    ? `${counted.sites} of ${began.sites} sites that began are in the model, with ${counted.rows} of ${began.rows} rows.` : "";
  at("unconfirmed").textContent = state.state === "finished"
    ? "All sites have signed this model." : "Unconfirmed: all sites sign the model at the end.";
  fill("traffic", Object.entries(state.traffic || {}).flatMap(([way, kinds]) =>
    Object.entries(kinds).map(([kind, row]) => [kind, way, row[0], size(row[1])])));
  fill("messages", (state.messages || []).map((m) => [m.time, m.kind, m.bytes, m.content]));
  fill("rules", Object.entries(state.rules || {}).map(([name, value]) => [name, value === null ? "no limit" : value]));
  const left = [];
  if (typeof state.gain === "number") left.push(`A round gains ${short(state.gain)} ${state.per_row || "nats per row"}.`);
  if (typeof state.left === "number") left.push(`About ${short(state.left)} are left to gain.`);
  if (typeof state.rounds_left === "number") {
    const limited = state.rounds_left >= state.rounds - state.round;
    left.push(`${limited ? "At most" : "About"} ${Math.ceil(state.rounds_left)} rounds are left.`);
  }
  if (typeof state.epsilon === "number") left.push(`Epsilon spent: ${short(state.epsilon)}.`);
  at("left").textContent = left.join(" ");
  draw(state.history || []);
  components(state.components || {}, state.part || "component");
  const now = JSON.stringify(state.pending || []);
  if (now !== asked) { asked = now; ask(state.pending || []); }
}

const events = new EventSource("events");
events.onmessage = (event) => { at("live").textContent = "live"; show(JSON.parse(event.data)); };
events.onerror = () => { at("live").textContent = "no connection to the program; trying again"; };
