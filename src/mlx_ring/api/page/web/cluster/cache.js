// What is kept of earlier requests, and what it saved.

import { html } from "../vendor/preact.js";
import { bytes, counted, figures, percent } from "../format.js";

export function Cache({ cache }) {
  const { prefix_cache: prefix, speculation } = cache;
  return html`<section class="panel" aria-label="Cache">
    <header><h2>Cache</h2></header>
    <dl>
      <dt>KV held</dt>
      <dd>${bytes(cache.kv_bytes)}${limit(cache)}<span class="muted"> for ${counted(cache.sequences, "sequence")}, kept ones included</span></dd>
      <dt>Prefix cache</dt>
      <dd>${prefix.enabled ? hits(prefix) : html`<span class="muted">${"queries" in prefix ? "off" : "nothing yet"}</span>`}</dd>
      ${prefix.enabled &&
      html`<dt>Kept for later</dt>
        <dd>${counted(prefix.entries, "beginning")}<span class="muted"> of ${counted(prefix.entry_tokens, "token")}, ${figures(prefix.evictions, 5)} made way</span></dd>`}
      <dt>Guessed tokens</dt>
      <dd>${speculation?.draft_tokens ? html`${percent(speculation.acceptance)} right<span class="muted"> of ${figures(speculation.draft_tokens, 6)}</span>` : html`<span class="muted">none yet</span>`}</dd>
      <dt>Put back</dt>
      <dd>${counted(cache.num_preemptions, "time")}<span class="muted"> for want of memory</span></dd>
    </dl>
  </section>`;
}

function hits(prefix) {
  if (!prefix.queries) return html`<span class="muted">nothing looked up yet</span>`;
  return html`${percent(prefix.hits / prefix.queries)} of ${counted(prefix.queries, "prompt")} began alike<span class="muted">, ${percent(prefix.hit_tokens / Math.max(1, prefix.query_tokens))} of their tokens need not be read</span>`;
}

function limit({ workers }) {
  const all = workers.map((worker) => worker.limit_bytes).filter((bytesAllowed) => bytesAllowed);
  return all.length === workers.length && all.length ? ` of ${bytes(all.reduce((sum, each) => sum + each, 0))}` : "";
}
