// The page: a history in memory, sent for each answer, stored nowhere.
"use strict";

const $ = (id) => document.getElementById(id);
const history = [];
const hidden = [];
let found = [];
let chosen = -1;
let asked = 0;
let searched = 0;
let timer = 0;
let token = ""; // in memory only

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const label = (item) => item.title || item.item_id;

function naming(item) {
  const name = element("span", { class: "name" }, label(item));
  if (item.title) name.append(element("span", { class: "id" }, item.item_id));
  return name;
}

function button(text, name, kind, press) {
  const made = element("button", { type: "button", class: kind, "aria-label": name, title: name }, text);
  made.addEventListener("click", press);
  return made;
}

async function answer(path, body) {
  const headers = token ? { authorization: "Bearer " + token } : {};
  const options = body ? { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body) } : { headers };
  const response = await fetch(path, options);
  $("access").hidden = response.status !== 401;
  if (!response.ok) {
    const { detail } = await response.json().catch(() => ({ detail: response.statusText }));
    throw new Error(typeof detail === "string" ? detail : detail[0].msg);
  }
  return response.json();
}

function warn(text) {
  $("warning").textContent = text;
  $("warning").hidden = !text;
}

// Search: a combobox with a list, as the ARIA practices have it. Focus stays in the field.

function close() {
  $("found").hidden = true;
  $("search").setAttribute("aria-expanded", "false");
  $("search").removeAttribute("aria-activedescendant");
  chosen = -1;
}

function choose(place) {
  const rows = $("found").querySelectorAll("[role=option]");
  if (!rows.length) return;
  chosen = (place + rows.length) % rows.length;
  rows.forEach((row, n) => row.setAttribute("aria-selected", String(n === chosen)));
  rows[chosen].scrollIntoView({ block: "nearest" });
  $("search").setAttribute("aria-activedescendant", rows[chosen].id);
}

async function find() {
  const turn = ++searched;
  const text = $("search").value.trim();
  if (!text) return close();
  let reply;
  try {
    reply = await answer("items?limit=20&q=" + encodeURIComponent(text.slice(0, 200)));
  } catch (error) {
    return warn("The search failed: " + error.message);
  }
  if (turn !== searched) return;
  found = reply.items;
  const rows = found.map((item, n) => {
    const row = element("li", { role: "option", id: "option-" + n, "aria-selected": "false" }, naming(item));
    // Before the field loses focus, which would close the list.
    row.addEventListener("mousedown", (event) => event.preventDefault());
    row.addEventListener("click", () => add(item));
    return row;
  });
  if (!rows.length) rows.push(element("li", { class: "note", role: "presentation" }, "Nothing in the catalogue matches."));
  if (reply.more) rows.push(element("li", { class: "note", role: "presentation" }, "There are more: type on."));
  $("found").replaceChildren(...rows);
  $("found").hidden = false;
  $("search").setAttribute("aria-expanded", "true");
  chosen = -1;
  $("search").removeAttribute("aria-activedescendant");
  $("status").textContent = found.length + (reply.more ? " items and more" : found.length === 1 ? " item" : " items") + " found";
}

$("search").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(find, 80);
});
$("search").addEventListener("blur", close);
$("search").addEventListener("keydown", (event) => {
  const open = !$("found").hidden;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    if (!open) find();
    else choose(event.key === "ArrowDown" ? chosen + 1 : chosen < 0 ? -1 : chosen - 1);
  } else if (event.key === "Enter" && open && found.length) {
    event.preventDefault();
    add(found[Math.max(chosen, 0)]);
  } else if (event.key === "Escape") {
    if (open) close();
    else $("search").value = "";
  }
});

// The history

function add(item) {
  searched++; // what is still being searched for is not wanted any more
  clearTimeout(timer);
  history.push(item);
  $("search").value = "";
  close();
  changed("Added " + label(item) + ".");
}

function remove(place) {
  const [item] = history.splice(place, 1);
  changed("Removed " + label(item) + ".");
  const rest = $("history").querySelectorAll("button");
  (rest[Math.min(place, rest.length - 1)] || $("search")).focus();
}

function changed(news) {
  $("history").replaceChildren(...history.map((item, place) => element("li", {},
    element("span", { class: "rank", "aria-hidden": "true" }, String(place + 1)), naming(item),
    button("✕", "Remove " + label(item), "icon", () => remove(place)))));
  $("empty").hidden = history.length > 0;
  $("clear").hidden = history.length === 0;
  $("unhide").hidden = hidden.length === 0;
  $("unhide").textContent = "Show " + hidden.length + " hidden again";
  recommend(news);
}

$("clear").addEventListener("click", () => {
  history.length = 0;
  changed("The history is empty.");
  $("search").focus();
});
$("unhide").addEventListener("click", () => {
  hidden.length = 0;
  changed("Nothing is hidden.");
  $("k").focus();
});
for (const name of ["k", "where", "seen"]) $(name).addEventListener("change", () => changed(""));

// Recommendations

async function recommend(news = "") {
  const turn = ++asked;
  const body = { histories: [history.map((item) => item.item_id)], k: Number($("k").value), exclude: hidden.map((item) => item.item_id), where: $("where").value.trim() || null, seen: $("seen").checked };
  let ranking;
  try {
    ranking = (await answer("recommend", body)).rankings[0];
  } catch (error) {
    if (turn === asked) warn("No recommendations: " + error.message);
    return;
  }
  if (turn !== asked) return; // a newer question is under way
  warn("");
  $("by").textContent = ranking.ranked_by === "history" ? "After this history, best first." : "No history yet: ranked by " + ranking.ranked_by + ".";
  if (ranking.missing) $("by").textContent += ` Only ${ranking.items.length} items are left.`;
  const held = $("ranked").contains(document.activeElement);
  const scores = ranking.items.map((item) => item.score);
  const best = Math.max(...scores), least = Math.min(...scores);
  $("ranked").replaceChildren(...ranking.items.map((item) => row(item, best > least ? (item.score - least) / (best - least) : 1)));
  if (!ranking.items.length) $("ranked").replaceChildren(element("li", {}, "Nothing is left to recommend."));
  if (held) ($("ranked").querySelector("button") || $("search")).focus();
  const first = ranking.items[0];
  $("status").textContent = news + (first ? " First of " + ranking.items.length + ": " + label(first) + "." : " Nothing is left to recommend.");
}

function row(item, share) {
  const space = "http://www.w3.org/2000/svg";
  const bar = document.createElementNS(space, "svg");
  const fill = document.createElementNS(space, "rect");
  bar.setAttribute("aria-hidden", "true");
  fill.setAttribute("width", 4 + 96 * share + "%");
  fill.setAttribute("height", "100%");
  bar.append(fill);
  const score = element("span", { class: "score" }, bar, element("span", { class: "hidden" }, "score "), element("span", {}, item.score.toFixed(2)));
  return element("li", {}, element("span", { class: "rank" }, String(item.rank)), naming(item), score,
    button("Add", "Add " + label(item) + " to the history", "add", () => add(item)),
    button("✕", "Hide " + label(item), "icon", () => { hidden.push(item); changed("Hidden " + label(item) + "."); }));
}

// What is served, and what it promises

async function start() {
  try {
    const [health, privacy, version] = await Promise.all([answer("healthz"), answer("privacy"), answer("version")]);
    const s = privacy.statement;
    const guaranteed = s.private && !s.insecure.length;
    $("version").textContent = `${version.run} (${version.sha256.slice(0, 12)}), dpformer ${version.dpformer}`;
    $("served").textContent = `${version.run}: ${health.model} over ${health.items.toLocaleString("en")} items`;
    $("where-help").textContent = `An SQL condition such as: ${health.columns[0]} <> 'a'. Columns: ${health.columns.join(", ")}. Enter applies it.`;
    $("budget").textContent = s.private ? `ε = ${(Math.ceil(s.epsilon * 1000 - 1e-6) / 1000)}, δ = ${s.delta.toExponential()}` : "Not private";
    if (guaranteed) $("reading").textContent = `For each of the ${s.users.toLocaleString("en")} people it was trained on, with all of their events. ${s.attack.reading}`;
    else {
      $("budget").classList.add("warning");
      $("reading").textContent = s.insecure.concat(s.private ? [] : ["Trained without noise: people's data may be read from it."]).join(" ");
    }
    $("served-users").textContent = privacy.served;
    $("statement").replaceChildren(...privacy.text.split("\n").map((line) => element("p", {}, line)));
    for (const option of [...$("k").options]) if (Number(option.value) > health.max_k) option.remove();
  } catch (error) {
    return warn("The server does not answer: " + error.message);
  }
  changed("");
}

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  warn("");
  start();
});
start();
