// The progress of an answer as the server sees it, and how full the context is.

/** @typedef {import("preact").ComponentChildren} Children */
/** @import { RequestStatus } from "../types.js" */
/** @import { Conversation } from "./conversation.js" */

import { Bar, withCommands } from "../components.js";
import { counted, duration, figures, percent } from "../format.js";
import { html, useRef } from "../vendor/preact.js";
import { MAX_STREAMS } from "./answer-slots.js";
import { isAnswer } from "./conversation.js";

/** Share of the context from which the gauge warns. */
const ALMOST_FULL = 0.9;

/** @typedef {{ tokens: number, ageS: number, rate: number | null }} Sample the last speed, and what it follows from */

/**
 * Return the server's request of an answer, or undefined while the server has not listed it.
 * @param {RequestStatus[]} requests
 * @param {string} id the answer's
 */
export function requestOf(requests, id) {
  return id ? requests.find((request) => request.id === `${id}-0`) : undefined;
}

/**
 * Return the speed after another state of the request: that since the state before.
 * @param {Sample | null} before
 * @param {Pick<RequestStatus, "tokens" | "age_s">} request
 * @returns {Sample}
 */
export function nextSample(before, { tokens, age_s: ageS }) {
  if (!before || ageS < before.ageS) return { tokens, ageS, rate: null };
  if (ageS === before.ageS) return before;
  return { tokens, ageS, rate: before.tokens ? (tokens - before.tokens) / (ageS - before.ageS) : null };
}

/** @typedef {{ id: string, read: number, ageS: number }} Start where the reading of a prompt is known to have been */

/**
 * Return from where the speed of the reading is counted: the last state of the wait, or the first one of the reading.
 * @param {Start | null} before
 * @param {Pick<RequestStatus, "id" | "state" | "read_tokens" | "age_s">} request
 * @returns {Start}
 */
export function startOfReading(before, { id, state, read_tokens: read, age_s: ageS }) {
  return before?.id === id && state === "reading" ? before : { id, read, ageS };
}

/**
 * Describe how far the prompt is read.
 * @param {Pick<RequestStatus, "prompt_tokens" | "read_tokens" | "cached_tokens" | "age_s">} request
 * @param {Pick<Start, "read" | "ageS">} start
 */
export function describePrefill(request, start) {
  const { prompt_tokens: prompt, read_tokens: read, cached_tokens: cached, age_s: ageS } = request;
  const computed = read - Math.max(start.read, cached);
  const left = computed > 0 ? ` About ${duration(((ageS - start.ageS) * (prompt - read)) / computed)} left.` : "";
  return `Reading the prompt: ${figures(read, 7)} of ${counted(prompt, "token")} (${percent(read / prompt)}).${left}`;
}

/**
 * Render what an answer waits for, or how fast it comes.
 * @param {{
 *   request: RequestStatus | undefined, isEmpty: boolean, isPaused: boolean, isQueued: boolean, waitsFor: string
 * }} props
 */
export function AnswerProgress({ request, isEmpty, isPaused, isQueued, waitsFor }) {
  const sample = useRef(/** @type {Sample | null} */ (null));
  const start = useRef(/** @type {Start | null} */ (null));
  if (request) start.current = startOfReading(start.current, request);
  if (request?.state === "answering") sample.current = nextSample(sample.current, request);
  if (isQueued) return muted(`Waiting: ${MAX_STREAMS} other answers of this browser stream already`);
  if (waitsFor) return muted(["Waiting: the question is sent again by itself. ", withCommands(waitsFor)]);
  if (isPaused) return muted("A machine or the connection was lost; the answer continues soon");
  if (request?.state === "waiting") return muted("Waiting for other requests");
  if (request?.state === "reading" && start.current) {
    return html`<progress value=${request.read_tokens} max=${request.prompt_tokens} aria-label="Prompt read"></progress>
      ${muted(describePrefill(request, start.current))}`;
  }
  if (isEmpty) return muted("Waiting for the first token");
  const rate = sample.current?.rate;
  return typeof rate === "number" && request
    ? muted(`${figures(rate)} tokens/s, ${counted(request.tokens, "token")}`)
    : null;
}

/** @param {Children} text */
function muted(text) {
  return html`<span class="muted">${text}</span>`;
}

/**
 * Return the tokens that a conversation takes, or null before the first answer.
 * @param {Conversation} conversation
 * @param {RequestStatus | undefined} request of the answer that streams
 */
export function contextTokens({ messages }, request) {
  if (request) return request.prompt_tokens + request.tokens;
  const last = messages.findLast((message) => isAnswer(message) && message.figures.promptTokens);
  if (!last || !isAnswer(last)) return null;
  return (last.figures.promptTokens ?? 0) + (last.figures.tokens ?? 0);
}

/**
 * Render how much of the model's context a conversation takes.
 * @param {{ used: number | null, limit: number | undefined }} props
 */
export function ContextGauge({ used, limit }) {
  if (used === null || !limit) return null;
  const isAlmostFull = used >= ALMOST_FULL * limit;
  const text = `${figures(used, 7)} of ${counted(limit, "token")}`;
  const label = `Context: ${text}${isAlmostFull ? ", almost full" : ""}`;
  const advice = isAlmostFull ? ", almost full: start a new chat soon" : "";
  const parts = [{ name: "context", value: used, style: isAlmostFull ? "link" : "kv" }];
  return html`<span class=${`gauge${isAlmostFull ? " full" : ""}`} title="Tokens of this chat, and the model's limit">
    <${Bar} parts=${parts} total=${limit} label=${label} />
    <span aria-hidden="true">${figures(used, 7)} of ${figures(limit, 7)}${advice}</span>
  </span>`;
}
