// Requests to this server, with the API key if it requires one.

const STORED_KEY = "mlx-ring.key";

/** The key while the browser blocks storage: it lasts until the page closes. */
let keyInMemory = "";

/** The API key. It lasts as long as the tab and is sent only in the Authorization header. */
export const apiKey = {
  /** Return the key, or an empty string. */
  get() {
    try {
      return sessionStorage.getItem(STORED_KEY) ?? keyInMemory;
    } catch {
      return keyInMemory;
    }
  },

  /** @param {string} value */
  set(value) {
    keyInMemory = value;
    try {
      sessionStorage.setItem(STORED_KEY, value);
    } catch {
      // Storage is blocked: the key in memory serves.
    }
  },

  forget() {
    keyInMemory = "";
    try {
      sessionStorage.removeItem(STORED_KEY);
    } catch {
      // Storage is blocked: there was nothing to remove.
    }
  },
};

/** Failed request. `message` is a sentence for people. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{ status?: number, code?: string | null, retryAfterS?: number | null }} [details]
   */
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Send a request to this server and return its response. With a body it is a POST.
 * @param {string} path
 * @param {{ body?: unknown, signal?: AbortSignal, accept?: string, lastEventId?: string }} [options]
 * @returns {Promise<Response>}
 * @throws {ApiError} if the server refuses the request or cannot be reached
 */
export async function request(path, { body, signal, accept = "application/json", lastEventId } = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept };
  if (lastEventId) headers["last-event-id"] = lastEventId;
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  /** @type {RequestInit} */
  const options = { headers, cache: "no-store", redirect: "error", credentials: "same-origin" };
  if (signal) options.signal = signal;
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await reportUnreachable(() => fetch(new URL(path, document.baseURI), options));
  if (!response.ok) throw await readError(response);
  return response;
}

/**
 * Read the server-sent events of a response.
 * @param {Response} response
 * @param {() => void} [onBytes] called for every chunk, comments included
 * @param {boolean} [withComments] whether comments are events too, named "comment"
 * @returns {AsyncGenerator<{ event: string, data: string, id: string | null }>} id: null if the server gives none;
 *   empty if there is no way back to the event
 */
export async function* readEvents(response, onBytes, withComments = false) {
  /** @type {string[]} */
  let data = [];
  let event = "message";
  let id = /** @type {string | null} */ (null);
  for await (const line of readPieces(response, "\n", onBytes)) {
    if (line.startsWith(":")) {
      if (withComments) yield { event: "comment", data: line.slice(1).trim(), id: null };
    } else if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("id:")) id = line.slice(3).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (!line) {
      if (data.length) yield { event, data: data.join("\n"), id };
      [data, event, id] = [[], "message", null];
    }
  }
}

/**
 * Read the pieces of a response that a separator ends.
 * @param {Response} response
 * @param {string} separator
 * @param {() => void} [onBytes] called for every chunk
 * @returns {AsyncGenerator<string>}
 */
async function* readPieces(response, separator, onBytes = () => {}) {
  if (!response.body) return;
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reportUnreachable(() => reader.read());
      if (done) return;
      onBytes();
      const pieces = (rest + decoder.decode(value, { stream: true })).split(separator);
      rest = pieces.pop() ?? "";
      yield* pieces;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * @template T
 * @param {() => Promise<T>} call
 * @returns {Promise<T>}
 */
async function reportUnreachable(call) {
  try {
    return await call();
  } catch (error) {
    if (isAbort(error) || error instanceof ApiError) throw error;
    throw new ApiError("Cannot reach the server. It has stopped, or the network is down.", { code: "unreachable" });
  }
}

/**
 * Return true if an error comes from an AbortController.
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof Error && error.name === "AbortError";
}

/** @param {Response} response */
async function readError(response) {
  /** @type {{ message?: string, code?: string | null }} */
  let error = {};
  try {
    const { error: given } = await response.json();
    error = typeof given === "string" ? { message: given } : (given ?? {});
  } catch {
    // A proxy answered, not the server: the status is all there is.
  }
  const status = `${response.status} ${response.statusText}`.trim();
  const retryAfterS = Number(response.headers.get("retry-after"));
  return new ApiError(error.message ?? `The server answered ${status}.`, {
    status: response.status,
    code: error.code ?? null,
    retryAfterS: retryAfterS > 0 ? retryAfterS : null,
  });
}
