// The KV cache, the prefix cache, speculative decoding and preemptions.

/** @import { CacheStatistics, CacheWorker, PrefixCache } from "../types.js" */

import { bytes, counted, figures, percent } from "../format.js";
import { html } from "../vendor/preact.js";

/** @typedef {import("preact").ComponentChildren} Children */

/**
 * Render the panel of caches.
 * @param {{ cache: CacheStatistics }} props
 */
export function Cache({ cache }) {
  const { prefix_cache: prefix, sequences, num_preemptions: preemptions } = cache;
  const limit = totalLimit(cache.workers);
  return html`<section class="panel" aria-label="Cache">
    <header><h2>Cache</h2></header>
    <dl>
      <dt>KV cache</dt>
      <dd>
        ${bytes(cache.kv_bytes)}${limit === null ? "" : ` of ${bytes(limit)}`}
        <span class="muted"> for ${counted(sequences, "sequence")}, cached prefixes included</span>
      </dd>
      <dt>Prefix cache</dt>
      <dd>${prefix.enabled ? prefixHits(prefix) : muted("queries" in prefix ? "off" : "no data yet")}</dd>
      ${prefix.enabled && html`<dt>Cached prefixes</dt><dd>${prefixEntries(prefix)}</dd>`}
      ${isOnDisk(prefix) && html`<dt>KV on disk</dt><dd>${onDisk(prefix)}</dd>`}
      ${!!prefix.moved_tokens && html`<dt>KV from other workers</dt><dd>${counted(prefix.moved_tokens, "token")}</dd>`}
      <dt>Speculative decoding</dt>
      <dd>${acceptance(cache)}</dd>
      <dt>Preemptions</dt>
      <dd>${figures(preemptions, 6)}${preemptions > 0 && muted(" because KV memory ran out")}</dd>
    </dl>
  </section>`;
}

/**
 * Return the share of prompts that found a cached prefix, or null while none was looked up.
 * @param {PrefixCache} prefix
 */
export function prefixHitRate({ queries = 0, hits = 0 }) {
  return queries ? hits / queries : null;
}

/** @param {PrefixCache} prefix */
function prefixHits(prefix) {
  const { queries = 0, query_tokens: tokens = 0, hit_tokens: hitTokens = 0 } = prefix;
  if (!queries) return muted("no lookups yet");
  const reused = percent(hitTokens / Math.max(1, tokens));
  return html`${percent(prefixHitRate(prefix))} of ${counted(queries, "prompt")} hit<span class="muted">
    , ${reused} of prompt tokens reused</span>`;
}

/** @param {PrefixCache} prefix */
function prefixEntries({ entries = 0, entry_tokens: tokens = 0, evictions = 0 }) {
  return html`${counted(entries, "prefix", "prefixes")}<span class="muted">
    , ${counted(tokens, "token")}, ${figures(evictions, 5)} evicted</span>`;
}

/** @param {PrefixCache} prefix */
function isOnDisk({ restored_tokens: restored = 0, saved_tokens: saved = 0 }) {
  return restored + saved > 0;
}

/** @param {PrefixCache} prefix */
function onDisk({ restored_tokens: restored = 0, peer_tokens: peers = 0, saved_tokens: saved = 0 }) {
  return html`${counted(restored, "token")} restored<span class="muted">
    ${!!peers && html`, ${figures(peers, 6)} of them from other machines`}, ${figures(saved, 6)} saved</span>`;
}

/** @param {CacheStatistics} cache */
function acceptance({ speculation }) {
  if (!speculation?.draft_tokens) return muted("no drafts yet");
  const drafts = figures(speculation.draft_tokens, 6);
  return html`${percent(speculation.acceptance)} accepted<span class="muted"> of ${drafts} draft tokens</span>`;
}

/** @param {Children} text */
function muted(text) {
  return html`<span class="muted">${text}</span>`;
}

/**
 * Return the workers' limits together, or null where one is unknown.
 * @param {CacheWorker[]} workers
 */
function totalLimit(workers) {
  let total = 0;
  for (const { limit_bytes: limit } of workers) {
    if (!limit) return null;
    total += limit;
  }
  return total || null;
}
