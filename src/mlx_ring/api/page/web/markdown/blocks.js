// Blocks of Markdown: headings, code, quotes, lists, tables and paragraphs.

import { h } from "../vendor/preact.js";
import { CodeBlock } from "./code-block.js";
import { findFormula } from "./math.js";
import { formulaElement, parseSpans } from "./spans.js";

/** @typedef {import("preact").VNode<any>} Element */
/** @typedef {import("preact").ComponentChildren} Children */

/**
 * Parsed block and the index of the first line after it.
 * @typedef {[element: Element, next: number]} Block
 */

const MAX_DEPTH = 8;
// Each pattern has only one way to match a run of spaces, because models write thousands of them.
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+([\s\S]*)$/;
/** Start of an item of a task list. */
const TASK = /^\[([ xX])\] (?=\S)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const COLUMN_RULE = /^:?-+:?$/;
const FORMULA = /^ {0,3}(?:\$\$|\\\[)/;
/** Largest number of lines of a formula. */
const MAX_FORMULA_LINES = 60;
const ESCAPED_BAR = "\0";
/** Letters of scripts that run from right to left, such as Hebrew and Arabic. */
const RIGHT_TO_LEFT = /(?=\p{L})[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
/** Letters of all others. */
const LEFT_TO_RIGHT = /(?=\p{L})[^\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
/** Levels between a heading in Markdown and on the page, which has headings of its own above. */
const HEADING_OFFSET = 2;

/**
 * Parse Markdown into elements.
 * @param {string} text
 * @returns {Element[]}
 */
export function parseBlocks(text) {
  return parseLines(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

/**
 * @param {string[]} lines
 * @param {number} depth
 */
function parseLines(lines, depth) {
  const elements = [];
  let place = 0;
  while (place < lines.length) {
    if (isBlank(lines[place])) {
      place += 1;
      continue;
    }
    const [element, next] = parseBlock(lines, place, depth);
    elements.push(element);
    place = next;
  }
  return elements;
}

/**
 * @param {string[]} lines
 * @param {number} place
 * @param {number} depth
 * @returns {Block}
 */
function parseBlock(lines, place, depth) {
  const line = lineAt(lines, place);
  const fence = FENCE.exec(line);
  if (fence) return parseCode(lines, place, fence);
  const formula = FORMULA.test(line) && parseFormula(lines, place);
  if (formula) return formula;
  const heading = HEADING.exec(line);
  if (heading) return [headingElement(heading), place + 1];
  if (RULE.test(line)) return [h("hr", null), place + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return parseQuote(lines, place, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return parseList(lines, place, depth);
  if (isTable(lines, place)) return parseTable(lines, place);
  return parseParagraph(lines, place);
}

/** @param {RegExpExecArray} heading */
function headingElement([, marks = "", text = ""]) {
  return h(`h${Math.min(6, marks.length + HEADING_OFFSET)}`, null, parseSpans(headingText(text)));
}

/**
 * Return the text without the marks that may close a heading.
 * @param {string} text
 */
function headingText(text) {
  const title = text.trim();
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(title.charAt(end - 1)) ? title.slice(0, end).trimEnd() : title;
}

/**
 * Parse fenced code. Without a closing fence it lasts until the end, as it does while an answer streams.
 * @param {string[]} lines
 * @param {number} place
 * @param {RegExpExecArray} opening
 * @returns {Block}
 */
function parseCode(lines, place, [, indent = "", fence = "", info = ""]) {
  const language = info.trim().split(/\s/)[0] ?? "";
  const body = [];
  let next = place + 1;
  while (next < lines.length && !closesFence(lineAt(lines, next), fence)) {
    const line = lineAt(lines, next);
    body.push(line.startsWith(indent) ? line.slice(indent.length) : line);
    next += 1;
  }
  const isOpen = next >= lines.length;
  return [h(CodeBlock, { text: body.join("\n"), language, ...(isOpen && { isOpen }) }), next + 1];
}

/**
 * Parse a formula of its own lines. Return null if its closing mark is missing, or text follows that.
 * @param {string[]} lines
 * @param {number} place
 * @returns {Block | null}
 */
function parseFormula(lines, place) {
  const text = lines
    .slice(place, place + MAX_FORMULA_LINES)
    .join("\n")
    .trimStart();
  const found = findFormula(text, 0);
  if (!found || !/^[ \t]*(?:\n|$)/.test(text.slice(found.next))) return null;
  const height = text.slice(0, found.next).split("\n").length;
  return [formulaElement(found.source, true), place + height];
}

/**
 * @param {string} line
 * @param {string} fence
 */
function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence.charAt(0).repeat(text.length);
}

/**
 * @param {string[]} lines
 * @param {number} place
 * @param {number} depth
 * @returns {Block}
 */
function parseQuote(lines, place, depth) {
  const inner = [];
  let next = place;
  while (!isBlank(lines[next]) && (QUOTE.test(lineAt(lines, next)) || !startsBlock(lineAt(lines, next)))) {
    inner.push(lineAt(lines, next).replace(QUOTE, ""));
    next += 1;
  }
  const quoted = parseLines(inner, depth + 1);
  return [h("blockquote", directionOf(quoted), quoted), next];
}

/**
 * Return the attribute for the direction in which all letters run. Without letters, or with some of each direction,
 * there is none: the block runs as the text around it, whichever word it begins with.
 * @param {Children} content
 * @returns {{ dir?: "ltr" | "rtl" }}
 */
function directionOf(content) {
  const text = textOf(content);
  const isToLeft = RIGHT_TO_LEFT.test(text);
  return isToLeft === LEFT_TO_RIGHT.test(text) ? {} : { dir: isToLeft ? "rtl" : "ltr" };
}

/**
 * Return the text of elements without code and formulas, which are Latin in any language.
 * @param {Children} content
 * @returns {string}
 */
function textOf(content) {
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map(textOf).join("");
  if (!content || typeof content !== "object" || !("props" in content)) return "";
  return content.type === "code" || typeof content.type === "function" ? "" : textOf(content.props.children);
}

// ---- lists

/**
 * Parse items of one kind and indentation. Lines indented further belong to the item before them.
 * @param {string[]} lines
 * @param {number} place
 * @param {number} depth
 * @returns {Block}
 */
function parseList(lines, place, depth) {
  const [, indent = "", marker = ""] = ITEM.exec(lineAt(lines, place)) ?? [];
  const isOrdered = /\d/.test(marker);
  const items = [];
  let next = place;
  while (next < lines.length) {
    const found = ITEM.exec(lineAt(lines, next));
    if (!found) break;
    const [whole, itemIndent = "", itemMarker = ""] = found;
    if (itemIndent.length > indent.length + 1 || itemIndent.length < indent.length) break;
    if (/\d/.test(itemMarker) !== isOrdered || RULE.test(lineAt(lines, next))) break;
    const [item, after] = collectItem(lines, next, whole.length, itemIndent.length);
    items.push(renderItem(item, depth + 1));
    next = after;
  }
  const start = isOrdered ? Number.parseInt(marker, 10) : 1;
  return [h(isOrdered ? "ol" : "ul", { ...directionOf(items), ...(start !== 1 && { start }) }, items), next];
}

/**
 * Render an item. One of a task list shows whether it is done.
 * @param {string[]} lines
 * @param {number} depth
 */
function renderItem(lines, depth) {
  const [mark, state] = TASK.exec(lineAt(lines, 0)) ?? ["", ""];
  if (!mark) return h("li", null, parseItem(lines, depth));
  const isDone = state !== " ";
  const box = h("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "open" });
  return h("li", { class: "task" }, box, parseItem([lineAt(lines, 0).slice(mark.length), ...lines.slice(1)], depth));
}

/**
 * Return an item's lines without their indentation, and the index of the first line after it.
 * @param {string[]} lines
 * @param {number} place
 * @param {number} textColumn where the text after the marker starts
 * @param {number} markerColumn
 * @returns {[item: string[], next: number]}
 */
function collectItem(lines, place, textColumn, markerColumn) {
  const first = lineAt(lines, place).slice(textColumn);
  const item = [first];
  let fence = fenceAfter("", first);
  let hasClosed = false;
  let next = place + 1;
  while (next < lines.length) {
    const following = skipBlank(lines, next);
    if (following === lines.length) break;
    const line = lineAt(lines, following);
    const indent = indentOf(line);
    const isIndented = indent > markerColumn + (following > next && !fence ? 1 : 0);
    const continuesText = following === next && !hasClosed && !startsBlock(line);
    hasClosed = fence !== "" && closesFence(line, fence);
    if (!isIndented && !continuesText && !hasClosed) break;
    for (const blank of lines.slice(next, following)) item.push(blank.slice(textColumn));
    item.push(line.slice(Math.min(indent, textColumn)));
    fence = fenceAfter(fence, line);
    next = following + 1;
  }
  // Blank lines between items do not end the list.
  const following = skipBlank(lines, next);
  return [item, ITEM.test(lineAt(lines, following)) ? following : next];
}

/**
 * Return the index of the next line that is not blank, or the number of lines.
 * @param {string[]} lines
 * @param {number} place
 */
function skipBlank(lines, place) {
  let next = place;
  while (next < lines.length && isBlank(lines[next])) next += 1;
  return next;
}

/**
 * Return the mark of the fence that is open after a line. Empty if none is.
 * @param {string} fence open before it
 * @param {string} line
 */
function fenceAfter(fence, line) {
  if (fence) return closesFence(line, fence) ? "" : fence;
  return FENCE.exec(line.trimStart())?.[2] ?? "";
}

/**
 * Parse an item's content. Text at its start stands without a paragraph, as in a tight list.
 * @param {string[]} lines
 * @param {number} depth
 * @returns {Children}
 */
function parseItem(lines, depth) {
  const first = lineAt(lines, 0);
  if (isBlank(first) || startsBlock(first)) return parseLines(lines, depth);
  const end = lines.findIndex((line, place) => place > 0 && (startsBlock(line) || isBlank(line)));
  if (end < 0) return parseSpans(lines.join("\n").trim());
  return [parseSpans(lines.slice(0, end).join("\n").trim()), parseLines(lines.slice(end), depth)];
}

// ---- tables

/**
 * Return true if a table starts here: its second line has as many rules as its first has cells.
 * @param {string[]} lines
 * @param {number} place
 */
function isTable(lines, place) {
  if (!lineAt(lines, place).includes("|")) return false;
  const rules = splitRow(lineAt(lines, place + 1));
  return rules.every((cell) => COLUMN_RULE.test(cell)) && rules.length === splitRow(lineAt(lines, place)).length;
}

/**
 * @param {string[]} lines
 * @param {number} place
 * @returns {Block}
 */
function parseTable(lines, place) {
  const alignments = splitRow(lineAt(lines, place + 1)).map(alignment);
  /** @param {string} line @param {"td" | "th"} kind */
  const row = (line, kind) => {
    const cells = splitRow(line).map((cell, column) =>
      h(kind, { class: alignments[column] ?? null }, parseSpans(cell)),
    );
    return h("tr", null, cells);
  };
  let next = place + 2;
  while (!isBlank(lines[next]) && lineAt(lines, next).includes("|")) next += 1;
  const head = h("thead", null, row(lineAt(lines, place), "th"));
  const body = h(
    "tbody",
    null,
    lines.slice(place + 2, next).map((line) => row(line, "td")),
  );
  const direction = directionOf([head, body]);
  return [h("div", { class: "scroll", ...direction, tabIndex: 0 }, h("table", null, head, body)), next];
}

/** @param {string} line */
function splitRow(line) {
  const row = line.trim().replaceAll("\\|", ESCAPED_BAR).replace(/^\|/, "").replace(/\|$/, "");
  return row.split("|").map((cell) => cell.trim().replaceAll(ESCAPED_BAR, "|"));
}

/** @param {string} rule */
function alignment(rule) {
  if (!rule.endsWith(":")) return null;
  return rule.startsWith(":") ? "centred" : "right";
}

// ---- paragraphs and lines

/**
 * @param {string[]} lines
 * @param {number} place
 * @returns {Block}
 */
function parseParagraph(lines, place) {
  let next = place + 1;
  while (!isBlank(lines[next]) && !startsBlock(lineAt(lines, next)) && !isTable(lines, next)) next += 1;
  return [h("p", null, parseSpans(lines.slice(place, next).join("\n").trim())), next];
}

/**
 * Return true if a line starts a block that interrupts a paragraph.
 * @param {string} line
 */
function startsBlock(line) {
  return [FENCE, FORMULA, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(line));
}

/**
 * @param {string[]} lines
 * @param {number} place
 */
function lineAt(lines, place) {
  return lines[place] ?? "";
}

/** @param {string | undefined} line */
function isBlank(line) {
  return !line?.trim();
}

/** @param {string} line */
function indentOf(line) {
  return line.length - line.trimStart().length;
}
