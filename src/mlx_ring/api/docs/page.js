// Shows /openapi.json and sends requests to its routes.
// It loads nothing from other servers and puts no key into an address.

/**
 * JSON schema, as far as this page shows it.
 * @typedef {object} Schema
 * @property {string} [$ref]
 * @property {string} [type]
 * @property {string} [description]
 * @property {Schema[]} [anyOf]
 * @property {Schema[]} [oneOf]
 * @property {Schema} [items]
 * @property {Record<string, Schema>} [properties]
 * @property {string[]} [required]
 * @property {unknown} [const]
 * @property {unknown[]} [enum]
 * @property {number} [minimum]
 * @property {number} [maximum]
 * @property {number} [exclusiveMinimum]
 * @property {number} [exclusiveMaximum]
 */

/**
 * Content of one media type; `x-each` is the schema of each event of a stream.
 * @typedef {{ schema: Schema, example?: unknown, "x-each"?: Schema }} Content
 */

/** @typedef {{ name: string, in: string, required?: boolean, description?: string }} Parameter */

/**
 * @typedef {object} Operation
 * @property {string[]} tags
 * @property {string} summary
 * @property {string} [description]
 * @property {Parameter[]} [parameters]
 * @property {{ content: Record<string, Content> }} [requestBody]
 * @property {Record<string, { description: string, content?: Record<string, Content> }>} responses
 */

/** @typedef {{ path: string, method: string, operation: Operation }} Route */

/**
 * @typedef {object} OpenApi
 * @property {{ title: string, version: string, description: string }} info
 * @property {{ name: string }[]} tags
 * @property {Record<string, Record<string, Operation>>} paths
 * @property {{ schemas: Record<string, Schema> }} components
 */

const MAX_DEPTH = 6;
/** @type {Record<string, Schema>} */
let schemas = {};
let apiKey = "";

const title = elementById("title", HTMLElement);
const description = elementById("description", HTMLElement);
const problem = elementById("problem", HTMLElement);
const routes = elementById("routes", HTMLElement);
const keyForm = elementById("key-form", HTMLFormElement);
const keyField = elementById("key", HTMLInputElement);

// ---- elements

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
function elementById(id, type) {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new TypeError(`The page has no ${type.name} named ${id}.`);
  return element;
}

/**
 * Create an element. An attribute that is undefined is left out.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | undefined>} [attributes]
 * @param {(string | Node)[]} children
 * @returns {HTMLElementTagNameMap[T]}
 */
function create(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/**
 * Create a disclosure whose content is created when it first opens.
 * @param {HTMLElement} summary
 * @param {() => Node[]} createContent
 * @param {string} [style] class
 */
function createDetails(summary, createContent, style) {
  const details = create("details", { class: style }, summary);
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(...createContent());
  });
  return details;
}

/**
 * @param {string} text
 * @param {() => void} onClick
 */
function createButton(text, onClick) {
  const button = create("button", { type: "button" }, text);
  button.addEventListener("click", onClick);
  return button;
}

// ---- routes

async function load() {
  problem.textContent = "";
  const response = await fetch("openapi.json", { headers: keyHeaders() });
  keyForm.hidden = response.status !== 401;
  if (!response.ok) {
    if (response.status !== 401 || apiKey) problem.textContent = (await response.json()).error.message;
    return;
  }
  /** @type {OpenApi} */
  const api = await response.json();
  schemas = api.components.schemas;
  title.textContent = `${api.info.title} ${api.info.version}`;
  description.textContent = api.info.description;
  const found = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  );
  const sections = api.tags.flatMap(({ name }) => [
    create("h2", {}, name),
    ...found.filter(({ operation }) => operation.tags.includes(name)).map(createRoute),
  ]);
  routes.replaceChildren(...sections);
}

/** @returns {Record<string, string>} */
function keyHeaders() {
  return apiKey ? { authorization: `Bearer ${apiKey}` } : {};
}

/** @param {Route} route */
function createRoute(route) {
  const { path, method, operation } = route;
  const summary = create(
    "summary",
    {},
    create("span", { class: `method ${method}` }, method.toUpperCase()),
    create("code", {}, path),
    " ",
    create("span", { class: "dim" }, operation.summary),
  );
  return createDetails(summary, () => describeRoute(route), "route");
}

/**
 * @param {Route} route
 * @returns {Node[]}
 */
function describeRoute(route) {
  const { description: text, parameters, requestBody, responses } = route.operation;
  const body = requestBody?.content["application/json"];
  /** @type {HTMLElement[]} */
  const parts = text ? [create("p", {}, text)] : [];
  if (parameters) parts.push(create("h3", {}, "Parameters"), createParameters(parameters));
  if (body) parts.push(create("h3", {}, "Body"), createFields(body.schema, 0));
  parts.push(create("h3", {}, "Responses"), createResponses(responses), createTrial(route, body));
  return parts;
}

/** @param {Parameter[]} parameters */
function createParameters(parameters) {
  const items = parameters.map(({ name, in: place, required = false, description: text = "" }) =>
    create("li", {}, createName(name, required), ` in ${place} `, create("span", { class: "dim" }, text)),
  );
  return create("ul", { class: "fields" }, ...items);
}

/** @param {Operation["responses"]} responses */
function createResponses(responses) {
  const rows = Object.entries(responses).map(([status, { description: text, content = {} }]) => {
    const bodies = Object.entries(content).map(([type, body]) =>
      create(
        "details",
        {},
        create("summary", {}, create("code", {}, type)),
        createFields(body["x-each"] ?? body.schema, 0),
      ),
    );
    return create("tr", {}, create("td", {}, create("code", {}, status)), create("td", {}, text, ...bodies));
  });
  return create("table", {}, ...rows);
}

// ---- schemas

/** @param {Schema} schema */
function refName(schema) {
  return schema.$ref?.split("/").pop();
}

/**
 * @param {Schema} schema
 * @returns {Schema}
 */
function resolve(schema) {
  const name = refName(schema);
  return name ? (schemas[name] ?? {}) : schema;
}

/**
 * Describe a schema's type in a few words.
 * @param {Schema} schema
 * @returns {string}
 */
function describeType(schema) {
  const inner = resolve(schema);
  const several = inner.anyOf ?? inner.oneOf;
  if (several) return [...new Set(several.map(describeType))].join(" or ");
  if (inner.const !== undefined) return JSON.stringify(inner.const);
  if (inner.enum) return inner.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (inner.type === "array") return inner.items ? `list of ${describeType(inner.items)}` : "list";
  const name = refName(schema);
  if (name && inner.type === "object") return name.split("__").pop() ?? name;
  const low = inner.minimum ?? inner.exclusiveMinimum;
  const high = inner.maximum ?? inner.exclusiveMaximum;
  const range = low === undefined && high === undefined ? "" : ` ${formatBound(low)}…${formatBound(high)}`;
  return (inner.type ?? "anything") + range;
}

/**
 * Format a bound. Those that JavaScript would round are powers of two, or one less.
 * @param {number | undefined} bound
 */
function formatBound(bound) {
  if (bound === undefined) return "";
  if (Math.abs(bound) <= Number.MAX_SAFE_INTEGER) return String(bound);
  const power = `2^${Math.round(Math.log2(Math.abs(bound)))}`;
  return bound < 0 ? `-${power}` : `${power} - 1`;
}

/**
 * Return the objects that a value may hold.
 * @param {Schema} schema
 * @returns {Schema[]}
 */
function findObjects(schema) {
  const inner = resolve(schema);
  if (inner.properties) return [inner];
  const several = inner.anyOf ?? inner.oneOf ?? (inner.items ? [inner.items] : []);
  return several.flatMap(findObjects);
}

/**
 * @param {string} name
 * @param {boolean} isRequired
 */
function createName(name, isRequired) {
  return create("code", { class: isRequired ? "required" : undefined }, name);
}

/**
 * @param {Schema} schema
 * @param {number} depth
 * @returns {HTMLElement}
 */
function createFields(schema, depth) {
  if (depth > MAX_DEPTH) return create("span", {}, "…");
  const objects = findObjects(schema);
  if (!objects.length) return create("span", { class: "dim" }, describeType(schema));
  const lists = objects.map(({ properties = {}, required = [] }) => {
    const fields = Object.entries(properties).map(([name, field]) =>
      createField(name, field, required.includes(name), depth),
    );
    return create("ul", { class: "fields" }, ...fields);
  });
  return create("div", {}, ...lists);
}

/**
 * @param {string} name
 * @param {Schema} schema
 * @param {boolean} isRequired
 * @param {number} depth
 */
function createField(name, schema, isRequired, depth) {
  const text = schema.description ? `: ${schema.description}` : "";
  const line = [createName(name, isRequired), " ", create("span", { class: "dim" }, describeType(schema), text)];
  if (!findObjects(schema).length) return create("li", {}, ...line);
  return create(
    "li",
    {},
    createDetails(create("summary", {}, ...line), () => [createFields(schema, depth + 1)]),
  );
}

// ---- trying a route

/**
 * @param {Route} route
 * @param {Content | undefined} body
 */
function createTrial({ path, method, operation }, body) {
  const inputs = (operation.parameters ?? []).map((parameter) => ({
    parameter,
    input: create("input", { placeholder: parameter.name, "aria-label": parameter.name }),
  }));
  const text = body ? create("textarea", { spellcheck: "false", "aria-label": "body" }) : null;
  if (text) text.value = JSON.stringify(body?.example ?? {}, null, 2);
  const output = create("pre", { hidden: "" });
  let abort = new AbortController();
  const send = async () => {
    abort.abort();
    abort = new AbortController();
    output.hidden = false;
    output.textContent = "…";
    try {
      const response = await fetch(trialAddress(path, inputs), {
        method: method.toUpperCase(),
        headers: { ...keyHeaders(), ...(text ? { "content-type": "application/json" } : {}) },
        body: text?.value ?? null,
        signal: abort.signal,
      });
      output.textContent = `${response.status} ${response.statusText}\n\n`;
      await showBody(response, output);
    } catch (error) {
      output.append(`\n${error instanceof Error ? error.message : error}`);
    }
  };
  const buttons = [createButton("Send", send), " ", createButton("Stop", () => abort.abort())];
  return create(
    "div",
    {},
    create("h3", {}, "Try it"),
    ...inputs.map(({ input }) => input),
    ...(text ? [text] : []),
    create("div", {}, ...buttons),
    output,
  );
}

/**
 * Return the address of a trial, relative to this page.
 * @param {string} path
 * @param {{ parameter: Parameter, input: HTMLInputElement }[]} inputs
 */
function trialAddress(path, inputs) {
  const query = new URLSearchParams();
  let address = path.slice(1);
  for (const { parameter, input } of inputs) {
    const { name, in: place } = parameter;
    const segments = input.value.split("/").map(encodeURIComponent);
    if (place === "path") address = address.replace(`{${name}}`, segments.join("/"));
    else if (input.value) query.set(name, input.value);
  }
  return address + (query.size ? `?${query}` : "") || ".";
}

/**
 * Show a response's body as it arrives, JSON with indentation.
 * @param {Response} response
 * @param {HTMLElement} output
 */
async function showBody(response, output) {
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    output.append(JSON.stringify(await response.json(), null, 2));
    return;
  }
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) output.append(part.value);
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = keyField.value;
  load();
});
load();
