// The last lines of the head's log and of its workers' logs.

/** @import { LogLine } from "../types.js" */

import { CopyButton, onValue } from "../components.js";
import { timeOfDay } from "../format.js";
import { html, useLayoutEffect, useRef, useState } from "../vendor/preact.js";

/** @type {Record<string, number>} */
const SEVERITY = { DEBUG: 0, INFO: 1, WARNING: 2, ERROR: 3, CRITICAL: 4 };
const LEVELS = [
  ["DEBUG", "all levels"],
  ["INFO", "info and above"],
  ["WARNING", "warnings and above"],
  ["ERROR", "errors"],
];
/** Distance from the end at which the log still follows new lines. */
const NEAR_END_PX = 30;

/** @param {string} level */
const severity = (level) => SEVERITY[level] ?? 1;

/**
 * Render the log.
 * @param {{ lines: LogLine[] }} props
 */
export function Logs({ lines }) {
  const [minimum, setMinimum] = useState("INFO");
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const follows = useRef(true);
  const shown = lines.filter((line) => severity(line.level) >= severity(minimum));
  useLayoutEffect(() => {
    if (follows.current && scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  }, [lines, minimum]);
  const onScroll = () => {
    if (!scroller.current) return;
    const { scrollTop, scrollHeight, clientHeight } = scroller.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  };
  const onChange = onValue(setMinimum);
  return html`<section class="panel" aria-label="Log">
    <header>
      <h2>Log</h2>
      <span class="muted">last ${lines.length} lines of the head and its workers</span>
      <label class="push"><span class="visually-hidden">Minimum level</span>
        <select value=${minimum} onChange=${onChange}>
          ${LEVELS.map(
            ([level, label]) => html`<option key=${level} value=${level} selected=${level === minimum}>
              ${label}
            </option>`,
          )}
        </select>
      </label>
      <${CopyButton} text=${() => shown.map(plainText).join("\n")} what="log" />
    </header>
    <div class="log" tabindex="0" role="log" aria-live="off" ref=${scroller} onScroll=${onScroll}>
      ${shown.length === 0 && html`<p class="muted">${lines.length ? "No lines at this level." : "No lines yet."}</p>`}
      ${shown.map((line) => html`<${Line} key=${line.number} line=${line} />`)}
    </div>
  </section>`;
}

/** @param {{ line: LogLine }} props */
function Line({ line: { level, unix_time_s: time, process, text } }) {
  const label = level === "INFO" ? "" : level.toLowerCase();
  return html`<p class=${level.toLowerCase()}>
    <time>${timeOfDay(time)}</time> <b>${label}</b> <span class="muted">${process}</span> ${text}
  </p>`;
}

/** @param {LogLine} line */
function plainText({ unix_time_s: time, level, process, logger, text }) {
  return `${new Date(time * 1000).toISOString()} ${level} ${process} ${logger}: ${text}`;
}
