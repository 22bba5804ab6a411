// The welcome in an empty conversation.

import { Ring } from "../components.js";
import { html } from "../vendor/preact.js";

const DEMO_EXAMPLES = ["What is the capital of France?", "What is 2 plus 3?", "What is the opposite of hot?"];
const EXAMPLES = [
  "What can you help me with?",
  "Explain how you work in three sentences.",
  "Write a haiku about the sea.",
];

/**
 * Render the model's name, the machines it runs on, and example questions.
 * @param {{ model: string | null, placement: string, ask: (text: string) => void, refusal: string }} props
 * `refusal`: why nothing can be sent now; empty if it can
 */
export function Welcome({ model, placement, ask, refusal }) {
  const examples = model?.startsWith("demo") ? DEMO_EXAMPLES : EXAMPLES;
  return html`<div class="welcome">
    <${Ring} size=${72} />
    <h1>${model ? html`Ask <b>${model}</b>` : "Ask something"}</h1>
    <p class="muted">${placement}</p>
    <ul>
      ${examples.map(
        (example) => html`<li key=${example}>
          <button
            type="button"
            disabled=${refusal !== ""}
            title=${refusal || null}
            onClick=${() => ask(example)}
          >${example}</button>
        </li>`,
      )}
    </ul>
  </div>`;
}
