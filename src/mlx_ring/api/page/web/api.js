// Requests to this server, with the API key where it asks for one.

const KEY = "mlx-ring.key";

/** What the server, or the way to it, answered instead of what was asked for. `message` is a sentence for people. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }
}

/** In a browser that keeps nothing, the key until the page is left. */
let held = "";

/** The key lives as long as the tab, and goes nowhere but into the Authorization header. */
export const key = {
  get: () => stored(() => sessionStorage.getItem(KEY)) ?? held,
  set: (value) => {
    held = value;
    stored(() => sessionStorage.setItem(KEY, value));
  },
  forget: () => {
    held = "";
    stored(() => sessionStorage.removeItem(KEY));
  },
};

/** Ask this server; the answer is one that went well. */
export async function request(path, { body, signal, accept = "application/json" } = {}) {
  const headers = { accept };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { headers, signal, cache: "no-store", redirect: "error", credentials: "same-origin" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await reached(() => fetch(new URL(path, document.baseURI), options));
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The server-sent events of a response, each `{event, data}`; comments are left out. */
export async function* events(response, onBytes = () => {}) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reached(() => reader.read());
      if (done) return;
      onBytes();
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const told = readEvent(block);
        if (told !== null) yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function readEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

async function reached(call) {
  try {
    return await call();
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The server does not answer: it has stopped, or the network is down.", { code: "unreachable" });
  }
}

async function refusal(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // Something in between answered, and not the server.
  }
  const message = told.message ?? `The server answered ${response.status} ${response.statusText}.`.replace(" .", ".");
  const retryAfter = Number(response.headers.get("retry-after"));
  return new ApiError(message, {
    status: response.status,
    code: told.code ?? null,
    param: told.param ?? null,
    retryAfterS: retryAfter > 0 ? retryAfter : null,
  });
}

function stored(call) {
  try {
    return call();
  } catch {
    return null;
  }
}
