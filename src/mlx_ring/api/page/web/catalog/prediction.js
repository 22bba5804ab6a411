// A prediction of the memory and speed of a model on this cluster.

/** @import { Answer, Outcome } from "../types.js" */

import { ApiError, request } from "../api.js";
import { BusyButton, Notice, onSingleClick, withCommands } from "../components.js";
import { bytes, counted, duration, figures } from "../format.js";
import { html, useState } from "../vendor/preact.js";

/**
 * Render a button that asks for a prediction, and the answer.
 * @param {{ model: string }} props
 */
export function Prediction({ model }) {
  const [text, setText] = useState("");
  const [isBusy, setBusy] = useState(false);
  const predict = async () => {
    setBusy(true);
    setText(await readPrediction(model));
    setBusy(false);
  };
  return html`<p class="row prediction">
    <${BusyButton} isBusy=${isBusy} disabled=${!model} act=${predict}>
      ${isBusy ? "Planning" : "Predict memory and speed"}
    </${BusyButton}>
    <span class="muted" role="status">${withCommands(text)}</span>
  </p>`;
}

/** @param {string} model */
async function readPrediction(model) {
  try {
    const response = await request("cluster/what-if", { body: { model } });
    /** @type {Answer} */
    const { outcomes, remarks = [] } = await response.json();
    return [...outcomes.map(describeOutcome), ...remarks].join(" ");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return error.message;
  }
}

/** Speeds in tokens/s: people read about so fast, and of less than the second one nobody has use in a chat. */
const [READING_SPEED, LEAST_SPEED] = [5, 1];
/** Longest time to the first token for which people wait in a chat, in seconds. */
const PATIENCE_S = 60;

const [GOOD, SLOW_START, SLOW, TOO_SLOW] = ["runs well here", "slow with long prompts", "slow here", "too slow here"];

/** Verdicts from the best on, each with the value whose highest is listed first. */
const VERDICTS = /** @type {[name: string, value: (outcome: Outcome) => number][]} */ ([
  [GOOD, ({ memory_bytes = 0 }) => memory_bytes],
  [SLOW_START, ({ first_token_s = 0 }) => -first_token_s],
  [SLOW, ({ tokens_per_s = 0 }) => tokens_per_s],
  [TOO_SLOW, ({ tokens_per_s = 0 }) => tokens_per_s],
]);

/**
 * Return in a few words whether a model is of use in a chat here.
 * @param {Pick<Outcome, "fits" | "tokens_per_s" | "first_token_s">} outcome
 */
export function verdict({ fits, tokens_per_s: speed = 0, first_token_s: first = 0 }) {
  if (!fits) return "does not fit";
  if (speed < LEAST_SPEED) return TOO_SLOW;
  if (speed < READING_SPEED) return SLOW;
  return first > PATIENCE_S ? SLOW_START : GOOD;
}

/**
 * Return the name with which the server finds a popular model: "Qwen3-0.6B 4-bit" gives "qwen3-0.6b-4-bit". Null for
 * one with several number formats, which has no such name.
 * @param {string} label
 */
export function loadableName(label) {
  return label.includes(" and ") ? null : label.toLowerCase().replaceAll(" ", "-");
}

/**
 * Render the button that predicts popular models on this cluster, and those that fit, the best first.
 * @param {{ load: (model: string) => void }} props
 */
export function Recommendations({ load }) {
  const [outcomes, setOutcomes] = useState(/** @type {Outcome[] | null} */ (null));
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const look = async () => {
    setBusy(true);
    setProblem("");
    try {
      /** @type {Answer} */
      const answer = await (await request("cluster/what-if", { body: { what_fits: true } })).json();
      setOutcomes(answer.outcomes);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    } finally {
      setBusy(false);
    }
  };
  const fitting = rank(outcomes ?? []);
  return html`<div class="recommendations">
    <${BusyButton} isBusy=${isBusy} act=${look}>
      ${isBusy ? "Planning" : "Which models run well here?"}
    </${BusyButton}>
    ${problem && html`<${Notice} tone="bad">${withCommands(problem)}</${Notice}>`}
    ${outcomes && !fitting.length && html`<p class="muted">None of ${outcomes.length} popular models fits here.</p>`}
    ${
      fitting.length > 0 &&
      html`<ul>
        ${fitting.map((outcome) => {
          const name = loadableName(outcome.model);
          return html`<li key=${outcome.model}>
            <span class="grow">
              <span class="name">${outcome.model}</span>
              <span class="muted">${describeSpeeds(outcome)}</span>
            </span>
            <b class="verdict">${verdict(outcome)}</b>
            ${
              name !== null &&
              html`<button
                type="button"
                aria-label=${`Load ${outcome.model}`}
                onClick=${onSingleClick(() => load(name))}
              >Load</button>`
            }
          </li>`;
        })}
      </ul>`
    }
  </div>`;
}

/**
 * Return the models that fit, by their verdict. Among those that run well the largest is first, among the others the
 * fastest.
 * @param {Outcome[]} outcomes
 */
export function rank(outcomes) {
  const fitting = outcomes.filter(({ fits }) => fits);
  return VERDICTS.flatMap(([name, value]) =>
    fitting.filter((each) => verdict(each) === name).sort((one, two) => value(two) - value(one)),
  );
}

/** @param {Outcome} outcome */
function describeSpeeds({ memory_bytes, tokens_per_s_range: speeds, first_token_s, prompt_tokens: prompt }) {
  const [low = 0, high = 0] = speeds ?? [];
  const asked = `with a prompt of ${counted(prompt, "token")}`;
  const first = first_token_s ? `, first token after ${duration(first_token_s)} ${asked}` : "";
  return `${bytes(memory_bytes)} of memory, ${figures(low, 2)} to ${figures(high, 2)} tokens/s${first}`;
}

/**
 * Return a prediction as a sentence.
 * @param {Outcome} outcome
 */
export function describeOutcome(outcome) {
  const { fits, why, memory_bytes, tokens_per_s_range: speeds, first_token_s } = outcome;
  if (!fits) return `It does not fit: ${why}`;
  const [low = 0, high = 0] = speeds ?? [];
  const first = first_token_s ? `, first token after ${duration(first_token_s)}` : "";
  const judged = verdict(outcome);
  const end = `${judged[0]?.toUpperCase()}${judged.slice(1)}`;
  return `Predicted: ${bytes(memory_bytes)} of memory, ${figures(low)} to ${figures(high)} tokens/s${first}. ${end}.`;
}
