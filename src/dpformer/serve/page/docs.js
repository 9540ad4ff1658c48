// The API as /openapi.json describes it; nothing is loaded from elsewhere.
"use strict";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function resolved(schema, document) {
  return schema && schema.$ref ? document.components.schemas[schema.$ref.split("/").pop()] : schema || {};
}

function kind(schema, document) {
  if (schema.$ref) return kind(resolved(schema, document), document);
  if (schema.anyOf) return schema.anyOf.map((one) => kind(one, document)).join(" or ");
  if (schema.type === "array") return "list of " + kind(schema.items || {}, document);
  return [].concat(schema.type || "any").join(" or ");
}

function limits(schema) {
  const names = { maxItems: "at most", minItems: "at least", maximum: "up to", minimum: "from", maxLength: "at most" };
  return Object.entries(names).filter(([key]) => key in schema).map(([key, word]) => `${word} ${schema[key]}`).join(", ");
}

function fields(schema, document) {
  const rows = Object.entries(schema.properties || {}).map(([name, one]) => element("tr", {},
    element("td", {}, element("code", {}, name)), element("td", {}, kind(one, document)),
    element("td", {}, [one.description, limits(one), "default" in one ? "default " + JSON.stringify(one.default) : ""].filter(Boolean).join("; "))));
  return element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, ...rows)));
}

function route(path, method, about, document) {
  const parts = [element("h2", {}, element("code", {}, method.toUpperCase() + " " + path)), element("p", {}, about.description || "")];
  const body = about.requestBody && resolved(about.requestBody.content["application/json"].schema, document);
  if (body) {
    parts.push(element("h3", {}, "Request"), fields(body, document));
    const example = (body.examples || [])[0];
    if (example) parts.push(element("pre", {}, JSON.stringify(example, null, 2)));
  }
  if (about.parameters) parts.push(element("h3", {}, "Parameters"),
    fields({ properties: Object.fromEntries(about.parameters.map((one) => [one.name, { ...one.schema, description: one.description }])) }, document));
  const json = ((about.responses["200"] || {}).content || {})["application/json"];
  const answer = json && resolved(json.schema, document);
  if (answer && answer.properties) parts.push(element("h3", {}, "Answer"), fields(answer, document));
  return element("section", { class: "card" }, ...parts);
}

async function start() {
  try {
    const document_ = await (await fetch("openapi.json")).json();
    document.getElementById("about").textContent = document_.info.description;
    const sections = Object.entries(document_.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, about]) => route(path, method, about, document_)));
    document.getElementById("routes").replaceChildren(...sections);
  } catch (error) {
    document.getElementById("warning").textContent = "The description cannot be read: " + error.message;
    document.getElementById("warning").hidden = false;
  }
}

start();
