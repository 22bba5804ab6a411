// A block of code with its language and a button that copies it.

import { CopyButton } from "../components.js";
import { h } from "../vendor/preact.js";

/**
 * Render a block of code.
 * @param {{ text: string, language: string }} props
 */
export function CodeBlock({ text, language }) {
  const caption = [h("span", null, language || "text"), h(CopyButton, { text: () => text, what: "code" })];
  return h(
    "figure",
    { class: "code" },
    h("figcaption", null, caption),
    h("pre", { tabIndex: 0 }, h("code", null, text)),
  );
}
