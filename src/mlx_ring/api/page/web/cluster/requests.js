// Requests that run or wait.

/** @import { CacheStatistics, RequestStatus } from "../types.js" */

import { counted, duration, figures, percent } from "../format.js";
import { html } from "../vendor/preact.js";

/** @type {Record<RequestStatus["state"], string>} */
const STATES = { waiting: "waiting", reading: "reading the prompt", answering: "answering", paused: "paused" };

/**
 * Render the table of requests.
 * @param {{ requests: RequestStatus[], cache: CacheStatistics, showsModel: boolean }} props
 */
export function Requests({ requests, cache: { running, waiting }, showsModel }) {
  const more = running + waiting - requests.length;
  const table = html`<div class="scroll" tabindex="0">
    <table>
      <thead>
        <tr>
          <th>request</th>
          ${showsModel && html`<th>model</th>`}
          <th>state</th>
          ${["prompt", "cached", "output", "age"].map((name) => html`<th key=${name} class="right">${name}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${requests.map((request) => html`<${Row} key=${request.id} request=${request} showsModel=${showsModel} />`)}
      </tbody>
    </table>
  </div>`;
  return html`<section class="panel" aria-label="Requests">
    <header>
      <h2>Requests</h2>
      <span class="muted">${figures(running, 5)} running, ${figures(waiting, 5)} waiting</span>
    </header>
    ${requests.length ? table : html`<p class="muted">No requests.</p>`}
    ${more > 0 && requests.length > 0 && html`<p class="muted">and ${counted(more, "more", "more")}</p>`}
  </section>`;
}

/** @param {{ request: RequestStatus, showsModel: boolean }} props */
function Row({ request, showsModel }) {
  const { id, model, state, prompt_tokens: prompt, cached_tokens: cached, read_tokens: read } = request;
  const progress = state === "reading" ? ` (${percent(read / prompt)})` : "";
  return html`<tr>
    <td><code title=${id}>${id.replace(/^[a-z]+-/, "").slice(0, 8)}</code></td>
    ${showsModel && html`<td title=${model}>${model.split("/").at(-1)}</td>`}
    <td>${STATES[state]}${progress}</td>
    <td class="right">${figures(prompt, 7)}</td>
    <td class="right">${figures(cached, 7)}</td>
    <td class="right">${figures(request.tokens, 7)}</td>
    <td class="right">${duration(request.age_s)}</td>
  </tr>`;
}
