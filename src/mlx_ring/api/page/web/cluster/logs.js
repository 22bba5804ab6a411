// The last lines of the head's log, and of what its own workers say.

import { html, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { timeOfDay } from "../format.js";
import { CopyButton } from "../parts.js";

const WEIGHT = { DEBUG: 0, INFO: 1, WARNING: 2, ERROR: 3, CRITICAL: 4 };
const NEAR_PX = 30;

export function Logs({ lines }) {
  const [least, setLeast] = useState("INFO");
  const place = useRef(null);
  const follows = useRef(true);
  const shown = lines.filter((line) => (WEIGHT[line.level] ?? 1) >= WEIGHT[least]);
  useLayoutEffect(() => {
    if (follows.current && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [lines, least]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = place.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
  };
  return html`<section class="panel" aria-label="Log">
    <header>
      <h2>Log</h2>
      <span class="muted">the last ${lines.length} lines of the head and its workers</span>
      <label class="push"><span class="unseen">Least level</span>
        <select value=${least} onChange=${(event) => setLeast(event.target.value)}>
          ${[["DEBUG", "all"], ["INFO", "from info"], ["WARNING", "from warning"], ["ERROR", "errors"]].map(
            ([level, name]) => html`<option key=${level} value=${level} selected=${level === least}>${name}</option>`,
          )}
        </select>
      </label>
      <${CopyButton} text=${() => shown.map(asText).join("\n")} what="log" />
    </header>
    <div class="log" tabindex="0" role="log" aria-live="off" ref=${place} onScroll=${onScroll}>
      ${shown.length === 0 && html`<p class="muted">Nothing was logged${lines.length ? " of that level" : " yet"}.</p>`}
      ${shown.map(
        (line) => html`<p key=${line.number} class=${line.level.toLowerCase()}>
          <time>${timeOfDay(line.unix_time_s)}</time> <b>${line.level === "INFO" ? "" : line.level.toLowerCase()}</b> <span class="muted">${line.process}</span> ${line.text}
        </p>`,
      )}
    </div>
  </section>`;
}

const asText = (line) => `${new Date(line.unix_time_s * 1000).toISOString()} ${line.level} ${line.process} ${line.logger}: ${line.text}`;
