// Shared by the tests of the page's modules: HTML of elements, a browser's globals, server-sent events.

/** @typedef {import("preact").ComponentChildren} Children */

const VOID = new Set(["br", "hr", "img", "input"]);

/**
 * Return the HTML of elements as a browser would show it. A component becomes an element of its name.
 * @param {Children} children
 * @returns {string}
 */
export function toHtml(children) {
  if (children === null || children === undefined || typeof children === "boolean") return "";
  if (Array.isArray(children)) return children.map(toHtml).join("");
  if (typeof children !== "object") return escapeHtml(String(children));
  const { type, props } = /** @type {import("preact").VNode<any>} */ (children);
  const { children: inner, text, ...attributes } = props;
  const name = typeof type === "string" ? type : type.name;
  const written = Object.entries(attributes)
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([key, value]) => ` ${key}="${escapeHtml(String(value))}"`);
  return `<${name}${written.join("")}>${VOID.has(name) ? "" : `${toHtml(inner ?? text)}</${name}>`}`;
}

/** @param {string} text */
function escapeHtml(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

/**
 * Define the few globals of a browser that modules use outside components.
 * @param {{ asksKey?: boolean }} [options]
 */
export function setUpBrowser({ asksKey = false } = {}) {
  const document = Object.assign(new EventTarget(), {
    baseURI: "http://head.example/",
    hidden: false,
    documentElement: { dataset: asksKey ? { asks: "key" } : {} },
  });
  const sessionStorage = createStorage();
  const localStorage = createStorage();
  const window = new EventTarget();
  for (const [name, value] of Object.entries({ document, sessionStorage, localStorage, window })) {
    Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
  }
  return { document, window };
}

function createStorage() {
  /** @type {Map<string, string>} */
  const values = new Map();
  return {
    getItem: (/** @type {string} */ name) => values.get(name) ?? null,
    setItem: (/** @type {string} */ name, /** @type {string} */ value) => void values.set(name, value),
    removeItem: (/** @type {string} */ name) => void values.delete(name),
    key: (/** @type {number} */ index) => [...values.keys()][index] ?? null,
    get length() {
      return values.size;
    },
  };
}

/**
 * Write a server-sent event.
 * @param {string} event
 * @param {unknown} data
 */
export function sse(event, data) {
  return `event: ${event}\ndata: ${JSON.stringify(data)}\n\n`;
}

/**
 * Create a response whose body the test writes.
 */
export function createStream() {
  const { readable, writable } = new TransformStream();
  const writer = writable.getWriter();
  const encoder = new TextEncoder();
  return {
    response: new Response(readable, { headers: { "content-type": "text/event-stream" } }),
    write: (/** @type {string} */ text) => writer.write(encoder.encode(text)),
    writeBytes: (/** @type {Uint8Array} */ bytes) => writer.write(bytes),
    close: () => writer.close(),
    abort: () => writer.abort(new DOMException("aborted", "AbortError")),
  };
}

/** Run everything that waits only for promises and streams. */
export async function settle() {
  for (let turn = 0; turn < 5; turn += 1) await new Promise((done) => setImmediate(done));
}
