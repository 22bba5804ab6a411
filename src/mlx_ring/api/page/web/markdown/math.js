// Formulas in LaTeX, as MathML.

/** @import { MathTree } from "../vendor/katex.min.js" */

import { h, useLayoutEffect, useRef } from "../vendor/preact.js";
import { loadKatex, useLibrary } from "./libraries.js";
import { inAlphabet } from "./math-alphabets.js";

/** Longest formula in characters: no closing mark is searched for beyond. */
const MAX_FORMULA = 4000;
/** Bounds of what a formula may take: a macro could expand for ever, or a rule fill the page. */
const LIMITS = { maxExpand: 500, maxSize: 20 };

/**
 * Found formula: its source, and the index of the first character after it.
 * @typedef {{ source: string, isDisplay: boolean, next: number }} Formula
 */

/** What follows the dollar of a shell's variable, such as $PATH. */
const VARIABLE = /^[A-Z_]{2}/;

/** @type {[open: string, close: string, isDisplay: boolean][]} */
const MARKS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

/**
 * Return the formula that starts here, or null. A price such as $5 is none.
 * @param {string} text
 * @param {number} place
 * @returns {Formula | null}
 */
export function findFormula(text, place) {
  const found = MARKS.find(([open]) => text.startsWith(open, place));
  if (!found) return null;
  const [open, close, isDisplay] = found;
  const start = place + open.length;
  const near = text.slice(start, start + MAX_FORMULA);
  const end = open === "$" ? closingDollar(near) : near.indexOf(close);
  const source = near.slice(0, Math.max(0, end)).trim();
  return source ? { source, isDisplay, next: start + end + close.length } : null;
}

/**
 * Return the index of the dollar that closes a formula, or -1.
 * @param {string} near text after the opening one
 */
function closingDollar(near) {
  if (/^[\s$]/.test(near)) return -1;
  for (let end = near.indexOf("$"); end > 0; end = near.indexOf("$", end + 1)) {
    const isEscaped = near[end - 1] === "\\";
    if (isEscaped || /\s/.test(near.charAt(end - 1)) || /[\d$]/.test(near.charAt(end + 1))) continue;
    if (VARIABLE.test(near.slice(end + 1, end + 3))) continue;
    return isPrice(near.slice(0, end)) ? -1 : end;
  }
  return -1;
}

/**
 * Return true if a text after a dollar begins with a price. After its number there are no signs of a formula, or there
 * are words or another dollar.
 * @param {string} text
 */
function isPrice(text) {
  if (!/^\d/.test(text)) return false;
  if (!/[\\^_={}+*/<>-]/.test(text) || /(?<!\\)\$/.test(text)) return true;
  return !/\\[a-z]/i.test(text) && (text.match(/\p{L}{2,}/gu) ?? []).length > 1;
}

/**
 * Render a formula. Its source stands there until the library is loaded, and where it is no valid LaTeX.
 * @param {{ text: string, isDisplay?: boolean }} props
 */
export function MathText({ text, isDisplay = false }) {
  const katex = useLibrary(loadKatex);
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  useLayoutEffect(() => {
    const options = { ...LIMITS, displayMode: isDisplay, output: "mathml", strict: "ignore", trust: false };
    const element = place.current;
    if (!katex || !element) return;
    try {
      const tree = katex.__renderToDomTree(text, options);
      adaptTree(tree);
      element.replaceChildren(tree.toNode());
    } catch {
      element.replaceChildren(sourceElement(text));
    }
  }, [katex, text, isDisplay]);
  const kind = isDisplay ? "div" : "span";
  const name = isDisplay ? "math display" : "math";
  if (!katex) return h(kind, { key: "source", class: name }, h("code", null, text));
  return h(kind, { key: "formula", class: name, ref: place, ...(isDisplay && { tabIndex: 0 }) });
}

/** @param {string} text */
function sourceElement(text) {
  const code = document.createElement("code");
  code.textContent = text;
  return code;
}

/**
 * Write what browsers do not show in another way. Alphabets of symbols become characters of their own, those of words
 * and enclosing lines become classes. Remove inline styles, which the page's security policy refuses: they are only
 * frames and bold shadows. Remove relative lengths such as +6pt too, because browsers read them as absolute
 * ones and cut the formula off.
 * @param {MathTree} tree
 */
export function adaptTree(tree) {
  const { attributes = {} } = tree;
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style" || value.startsWith("+")) delete attributes[name];
  }
  const { mathvariant, notation } = attributes;
  if (mathvariant && mathvariant !== "normal") {
    delete attributes.mathvariant;
    if (tree.type === "mtext") attributes.class = mathvariant;
    // Without the attribute, a browser would slant a single letter that has no form of its own in the alphabet.
    else if (!setAlphabet(tree, mathvariant) && tree.type === "mi") attributes.mathvariant = "normal";
  }
  if (tree.type === "menclose") {
    tree.type = "mrow";
    delete attributes.notation;
    attributes.class = notation ?? "";
  }
  for (const child of tree.children ?? []) adaptTree(child);
}

/**
 * Write the texts below a tree in another alphabet. Return true if all their characters have such a form.
 * @param {MathTree} tree
 * @param {string} variant
 * @returns {boolean}
 */
function setAlphabet(tree, variant) {
  if (tree.text === undefined) return (tree.children ?? []).map((child) => setAlphabet(child, variant)).every(Boolean);
  const before = tree.text;
  tree.text = inAlphabet(before, variant);
  return Array.from(before).every((letter) => inAlphabet(letter, variant) !== letter);
}
