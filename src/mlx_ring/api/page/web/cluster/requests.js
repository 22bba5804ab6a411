// Requests that run or wait.

import { html } from "../vendor/preact.js";
import { counted, duration, figures, percent } from "../format.js";

const STATES = { waiting: "waits", reading: "reads its prompt", answering: "answers" };

export function Requests({ requests, cache, several }) {
  const hidden = cache.running + cache.waiting - requests.length;
  return html`<section class="panel" aria-label="Requests">
    <header><h2>Requests</h2><span class="muted">${figures(cache.running, 5)} running, ${figures(cache.waiting, 5)} waiting</span></header>
    ${requests.length === 0
      ? html`<p class="muted">Nobody is asking anything just now.</p>`
      : html`<div class="scroll" tabindex="0">
          <table>
            <thead>
              <tr><th>request</th>${several && html`<th>model</th>`}<th>state</th><th class="right">prompt</th><th class="right">cached</th><th class="right">answer</th><th class="right">age</th></tr>
            </thead>
            <tbody>
              ${requests.map(
                (request) => html`<tr key=${request.id}>
                  <td><code title=${request.id}>${request.id.replace(/^[a-z]+-/, "").slice(0, 8)}</code></td>
                  ${several && html`<td title=${request.model}>${request.model.split("/").at(-1)}</td>`}
                  <td>${STATES[request.state]}${request.state === "reading" ? ` (${percent(request.read_tokens / request.prompt_tokens)})` : ""}</td>
                  <td class="right">${figures(request.prompt_tokens, 7)}</td>
                  <td class="right">${figures(request.cached_tokens, 7)}</td>
                  <td class="right">${figures(request.tokens, 7)}</td>
                  <td class="right">${duration(request.age_s)}</td>
                </tr>`,
              )}
            </tbody>
          </table>
        </div>`}
    ${hidden > 0 && requests.length > 0 && html`<p class="muted">and ${counted(hidden, "more", "more")}</p>`}
  </section>`;
}
