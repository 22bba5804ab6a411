// Shows /openapi.json, and lets a person try each route. Nothing is loaded from elsewhere, and a key never enters a URL.

const at = (id) => document.getElementById(id);
const DEEPEST = 6;
let api = null;
let key = "";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

async function load() {
  at("trouble").textContent = "";
  const answer = await fetch("openapi.json", { headers: headers() });
  at("key-form").hidden = answer.status !== 401;
  if (!answer.ok) {
    if (answer.status !== 401 || key) at("trouble").textContent = (await answer.json()).error.message;
    return;
  }
  api = await answer.json();
  at("title").textContent = `${api.info.title} ${api.info.version}`;
  at("description").textContent = api.info.description;
  at("routes").replaceChildren(...api.tags.flatMap((tag) => section(tag.name)));
}

function section(tag) {
  const found = [];
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, about] of Object.entries(methods))
      if (about.tags.includes(tag)) found.push(route(path, method, about));
  return [make("h2", {}, tag), ...found];
}

function route(path, method, about) {
  const head = make("summary", {},
    make("span", { class: `method ${method}` }, method.toUpperCase()),
    make("code", {}, path), " ", make("span", { class: "dim" }, about.summary));
  const box = make("details", { class: "route" }, head);
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(...inside(path, method, about));
  });
  return box;
}

function inside(path, method, about) {
  const parts = about.description ? [make("p", {}, about.description)] : [];
  const body = about.requestBody?.content["application/json"];
  if (about.parameters) parts.push(make("h3", {}, "Parameters"), make("ul", { class: "fields" },
    ...about.parameters.map((each) => make("li", {},
      make("code", { class: each.required ? "needed" : "" }, each.name),
      ` in ${each.in} `, make("span", { class: "dim" }, each.description ?? "")))));
  if (body) parts.push(make("h3", {}, "Body"), fields(body.schema, 0));
  parts.push(make("h3", {}, "Answers"), answers(about.responses), trial(path, method, about, body));
  return parts;
}

function answers(responses) {
  return make("table", {}, ...Object.entries(responses).map(([status, about]) => make("tr", {},
    make("td", {}, make("code", {}, status)),
    make("td", {}, about.description, ...Object.entries(about.content ?? {}).map(([type, content]) =>
      make("details", {}, make("summary", {}, make("code", {}, type)), fields(content["x-each"] ?? content.schema, 0)))))));
}

function resolve(schema) {
  const name = schema.$ref?.split("/").pop();
  return name ? api.components.schemas[name] : schema;
}

function word(schema) {
  const named = schema.$ref?.split("/").pop();
  const inner = resolve(schema);
  const several = inner.anyOf ?? inner.oneOf;
  if (several) return [...new Set(several.map(word))].join(" or ");
  if (inner.const !== undefined) return JSON.stringify(inner.const);
  if (inner.enum) return inner.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (inner.type === "array") return inner.items ? `list of ${word(inner.items)}` : "list";
  const low = inner.minimum ?? inner.exclusiveMinimum;
  const high = inner.maximum ?? inner.exclusiveMaximum;
  const range = low === undefined && high === undefined ? "" : ` ${number(low)}…${number(high)}`;
  return (named && inner.type === "object" ? named.split("__").pop() : inner.type ?? "anything") + range;
}

// What JavaScript would round is a power of two here, or one less.
function number(bound) {
  if (bound === undefined || Math.abs(bound) <= Number.MAX_SAFE_INTEGER) return bound ?? "";
  const power = `2^${Math.round(Math.log2(Math.abs(bound)))}`;
  return bound < 0 ? `-${power}` : `${power} - 1`;
}

// The objects that a value may hold, with their fields.
function objects(schema) {
  const inner = resolve(schema);
  if (inner.properties) return [inner];
  const several = inner.anyOf ?? inner.oneOf ?? (inner.items ? [inner.items] : []);
  return several.flatMap(objects);
}

function fields(schema, depth) {
  if (depth > DEEPEST) return make("span", {}, "…");
  const found = objects(schema);
  if (!found.length) return make("span", { class: "dim" }, word(schema));
  return make("div", {}, ...found.map((object) => make("ul", { class: "fields" },
    ...Object.entries(object.properties).map(([name, each]) => field(name, each, object.required ?? [], depth)))));
}

function field(name, schema, required, depth) {
  const line = [make("code", { class: required.includes(name) ? "needed" : "" }, name), " ",
    make("span", { class: "dim" }, word(schema), schema.description ? `: ${schema.description}` : "")];
  if (!objects(schema).length) return make("li", {}, ...line);
  const box = make("details", {}, make("summary", {}, ...line));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(fields(schema, depth + 1));
  });
  return make("li", {}, box);
}

function trial(path, method, about, body) {
  const inputs = (about.parameters ?? []).map((each) =>
    [each, make("input", { placeholder: each.name, "aria-label": each.name })]);
  const text = body ? make("textarea", { spellcheck: "false", "aria-label": "body" }) : null;
  if (text) text.value = JSON.stringify(body.example ?? {}, null, 2);
  const out = make("pre", { hidden: "" });
  let stop = null;
  const send = async () => {
    stop?.abort();
    stop = new AbortController();
    out.hidden = false;
    out.textContent = "…";
    try {
      const answer = await fetch(address(path, inputs), {
        method: method.toUpperCase(),
        headers: { ...headers(), ...(text ? { "content-type": "application/json" } : {}) },
        body: text?.value,
        signal: stop.signal,
      });
      out.textContent = `${answer.status} ${answer.statusText}\n\n`;
      await show(answer, out);
    } catch (error) {
      out.append(`\n${error.message}`);
    }
  };
  return make("div", {}, make("h3", {}, "Try it"), ...inputs.map(([, input]) => input), text,
    make("div", {}, make("button", { type: "button", onclick: send }, "Send"), " ",
      make("button", { type: "button", onclick: () => stop?.abort() }, "Stop")), out);
}

function address(path, inputs) {
  const query = new URLSearchParams();
  for (const [each, input] of inputs) {
    if (each.in === "path") path = path.replace(`{${each.name}}`, input.value.split("/").map(encodeURIComponent).join("/"));
    else if (input.value) query.set(each.name, input.value);
  }
  return path.slice(1) + (query.size ? `?${query}` : "") || ".";
}

async function show(answer, out) {
  if (answer.headers.get("content-type")?.startsWith("application/json")) {
    out.append(JSON.stringify(await answer.json(), null, 2));
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) out.append(part.value);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  load();
});
load();
