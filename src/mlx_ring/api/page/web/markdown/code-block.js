// A block of code with its language, highlighted, and a button that copies it.

/** @import { Token } from "../vendor/highlight.min.js" */

import { CopyButton } from "../components.js";
import { h, useMemo } from "../vendor/preact.js";
import { loadHighlighter, useLibrary } from "./libraries.js";

/** @typedef {import("preact").ComponentChildren} Children */

/** Longest code that is highlighted, in characters. */
const MAX_HIGHLIGHTED = 50_000;

/**
 * Render a block of code. One that still streams is highlighted when it is complete.
 * @param {{ text: string, language: string, isOpen?: boolean }} props
 */
export function CodeBlock({ text, language, isOpen = false }) {
  const isHighlighted = language !== "" && !isOpen && text.length <= MAX_HIGHLIGHTED;
  const highlighter = useLibrary(isHighlighted ? loadHighlighter : null);
  const code = useMemo(() => {
    if (!isHighlighted || !highlighter?.getLanguage(language)) return text;
    return highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children.map(toElement);
  }, [text, language, isHighlighted, highlighter]);
  const caption = [h("span", null, language || "text"), h(CopyButton, { text: () => text, what: "code" })];
  return h(
    "figure",
    { class: "code" },
    h("figcaption", null, caption),
    h("pre", { tabIndex: 0 }, h("code", null, code)),
  );
}

/**
 * Return a token as an element whose class is the first part of its scope, such as `title` of `title.function`.
 * @param {Token} token
 * @returns {Children}
 */
export function toElement(token) {
  if (typeof token === "string") return token;
  const children = token.children.map(toElement);
  const [kind = ""] = (token.scope ?? "").split(/[.:]/);
  return kind && kind !== "language" ? h("span", { class: `token ${kind}` }, children) : children;
}
