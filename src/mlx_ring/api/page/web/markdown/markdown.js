// Markdown as models write it. Text never reaches the browser as HTML.

import { h, useMemo } from "../vendor/preact.js";
import { parseBlocks } from "./blocks.js";

/**
 * Render Markdown. The text is parsed again only after a change.
 * @param {{ text: string }} props
 */
export function Markdown({ text }) {
  const elements = useMemo(() => parseBlocks(text), [text]);
  return h("div", { class: "markdown", dir: "auto" }, elements);
}
