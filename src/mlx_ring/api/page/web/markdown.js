// Markdown as models write it, drawn without ever handing text to the browser as HTML.

import { h, useMemo } from "./vendor/preact.js";
import { CopyButton } from "./parts.js";

const DEEPEST = 8;
const FARTHEST = 2048;
// None of these may have two ways to match the same run of spaces: a model writes thousands of them.
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+([^]*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const ESCAPED_BAR = "\0";
const COLUMN_RULE = /^:?-+:?$/;

/** The text as elements; read again only when it has changed. */
export function Markdown({ text }) {
  const drawn = useMemo(() => blocks(text.replaceAll("\r\n", "\n").split("\n"), 0), [text]);
  return h("div", { class: "markdown", dir: "auto" }, drawn);
}

// ---- blocks

function blocks(lines, depth) {
  const drawn = [];
  let place = 0;
  while (place < lines.length) {
    if (!lines[place].trim()) {
      place += 1;
      continue;
    }
    const [element, next] = block(lines, place, depth);
    drawn.push(element);
    place = next;
  }
  return drawn;
}

function block(lines, place, depth) {
  const line = lines[place];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, place, fence);
  const heading = HEADING.exec(line);
  // The page has headings of its own above these.
  if (heading) return [h(`h${Math.min(6, heading[1].length + 2)}`, null, inline(titleOf(heading[2]))), place + 1];
  if (RULE.test(line)) return [h("hr"), place + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, place, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, place, depth);
  if (isTable(lines, place)) return table(lines, place);
  return paragraph(lines, place);
}

/** Without the signs that may close a heading. */
function titleOf(text) {
  const title = text.trim();
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(title[end - 1]) ? title.slice(0, end).trimEnd() : title;
}

function code(lines, place, [, indent, fence, told]) {
  const language = told.trim().split(/\s/)[0];
  const body = [];
  let next = place + 1;
  while (next < lines.length && !closes(lines[next], fence)) {
    body.push(lines[next].startsWith(indent) ? lines[next].slice(indent.length) : lines[next]);
    next += 1;
  }
  return [h(CodeBlock, { text: body.join("\n"), language }), next + 1];
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function CodeBlock({ text, language }) {
  return h(
    "figure",
    { class: "code" },
    h("figcaption", null, h("span", null, language || "text"), h(CopyButton, { text: () => text, what: "code" })),
    h("pre", { tabIndex: 0 }, h("code", null, text)),
  );
}

function quote(lines, place, depth) {
  const inner = [];
  let next = place;
  while (next < lines.length && lines[next].trim() && (QUOTE.test(lines[next]) || !starts(lines[next]))) {
    inner.push(lines[next].replace(QUOTE, ""));
    next += 1;
  }
  return [h("blockquote", null, blocks(inner, depth + 1)), next];
}

/** Items of one kind and indentation; what is indented further belongs to the item before it. */
function list(lines, place, depth) {
  const [, indent, marker] = ITEM.exec(lines[place]);
  const isOrdered = /\d/.test(marker);
  const items = [];
  let next = place;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    if (!found || found[1].length > indent.length + 1 || found[1].length < indent.length) break;
    if (/\d/.test(found[2]) !== isOrdered || RULE.test(lines[next])) break;
    const [item, after] = itemLines(lines, next, found);
    items.push(h("li", null, itemBody(item, depth + 1)));
    next = after;
  }
  const start = isOrdered ? Number.parseInt(marker, 10) : undefined;
  return [h(isOrdered ? "ol" : "ul", start === undefined || start === 1 ? null : { start }, items), next];
}

function itemLines(lines, place, [whole, indent]) {
  const inside = whole.length;
  const item = [lines[place].slice(inside)];
  let next = place + 1;
  while (next < lines.length) {
    const line = lines[next];
    const isBlank = !line.trim();
    const depth = line.length - line.trimStart().length;
    if (isBlank && !belongs(lines[next + 1], indent.length)) break;
    if (!isBlank && depth <= indent.length && (starts(line) || !lines[next - 1].trim())) break;
    item.push(line.slice(Math.min(depth, inside)));
    next += 1;
  }
  while (next < lines.length && !lines[next].trim() && ITEM.test(lines[next + 1] ?? "")) next += 1;
  return [item, next];
}

/** Whether a line after a blank one is still of an item whose marker is indented so far. */
function belongs(line, indent) {
  return line !== undefined && line.trim() !== "" && line.length - line.trimStart().length > indent + 1;
}

/** An item of a single paragraph needs none. */
function itemBody(lines, depth) {
  const last = lines.findIndex((line, place) => place > 0 && (starts(line) || !line.trim()));
  const first = last < 0 ? lines : lines.slice(0, last);
  const isPlain = first.length > 0 && first[0].trim() !== "" && !starts(first[0]);
  if (!isPlain) return blocks(lines, depth);
  return [inline(first.join("\n").trim()), last < 0 ? null : blocks(lines.slice(last), depth)];
}

function isTable(lines, place) {
  return lines[place].includes("|") && cells(lines[place + 1] ?? "").every((cell) => COLUMN_RULE.test(cell));
}

function table(lines, place) {
  const aligned = cells(lines[place + 1]).map(alignment);
  const row = (line, kind) =>
    h("tr", null, cells(line).map((cell, column) => h(kind, { class: aligned[column] ?? null }, inline(cell))));
  let next = place + 2;
  while (next < lines.length && lines[next].trim() && lines[next].includes("|")) next += 1;
  const body = lines.slice(place + 2, next).map((line) => row(line, "td"));
  const drawn = h("table", null, h("thead", null, row(lines[place], "th")), h("tbody", null, body));
  return [h("div", { class: "scroll", tabIndex: 0 }, drawn), next];
}

function cells(line) {
  const trimmed = line.trim().replaceAll("\\|", ESCAPED_BAR).replace(/^\|/, "").replace(/\|$/, "");
  return trimmed.split("|").map((cell) => cell.trim().replaceAll(ESCAPED_BAR, "|"));
}

function alignment(rule) {
  if (rule.endsWith(":")) return rule.startsWith(":") ? "centred" : "right";
  return null;
}

function paragraph(lines, place) {
  let next = place + 1;
  while (next < lines.length && lines[next].trim() && !starts(lines[next]) && !isTable(lines, next)) next += 1;
  return [h("p", null, inline(lines.slice(place, next).join("\n").trim())), next];
}

/** Whether a line begins something other than the rest of a paragraph. */
function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

// ---- inside a line

const ESCAPED = /[\\`*_{}[\]()#+\-.!|>~<]/;
const BARE_LINK = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/;
const SPANS = [
  ["***", (inner) => h("strong", null, h("em", null, inner))],
  ["**", (inner) => h("strong", null, inner)],
  ["__", (inner) => h("strong", null, inner)],
  ["~~", (inner) => h("s", null, inner)],
  ["*", (inner) => h("em", null, inner)],
  ["_", (inner) => h("em", null, inner)],
];

function inline(text, depth = 0) {
  const drawn = [];
  const open = new Set();
  let plain = "";
  let place = 0;
  const put = (element, next) => {
    if (plain) drawn.push(plain);
    plain = "";
    drawn.push(element);
    place = next;
  };
  while (place < text.length) {
    const found = depth < DEEPEST ? element(text, place, depth, open) : null;
    if (found) {
      put(...found);
    } else if (text[place] === "\\" && ESCAPED.test(text[place + 1] ?? "")) {
      plain += text[place + 1];
      place += 2;
    } else {
      plain += text[place];
      place += 1;
    }
  }
  if (plain) drawn.push(plain);
  return drawn;
}

/** The element that begins here, and where it ends; null where none does. `open` has the marks that nothing closes. */
function element(text, place, depth, open) {
  switch (text[place]) {
    case "`":
      return codeSpan(text, place);
    case "[":
      return link(text, place, depth);
    case "<":
      return angled(text, place);
    case "h":
      return bareLink(text, place);
    case "\n":
      return / {2}$/.test(text.slice(Math.max(0, place - 2), place)) ? [h("br"), place + 1] : null;
    case "*":
    case "_":
    case "~":
      return span(text, place, depth, open);
    default:
      return null;
  }
}

function codeSpan(text, place) {
  const ticks = /^`+/.exec(text.slice(place, place + 16))[0];
  const end = text.indexOf(ticks, place + ticks.length);
  if (end < 0) return null;
  const inner = text.slice(place + ticks.length, end).replaceAll("\n", " ");
  return [h("code", null, inner.length > 2 ? inner.replace(/^ (.*) $/, "$1") : inner), end + ticks.length];
}

function span(text, place, depth, open) {
  for (const [mark, draw] of SPANS) {
    if (open.has(mark) || !text.startsWith(mark, place)) continue;
    const begin = place + mark.length;
    if (begin >= text.length || /\s/.test(text[begin])) continue;
    if (mark[0] === "_" && /\w/.test(text[place - 1] ?? "")) continue;
    const end = closing(text, begin, mark);
    if (end > 0) return [draw(inline(text.slice(begin, end), depth + 1)), end + mark.length];
    open.add(mark);
  }
  return null;
}

/** Where a span ends: at its mark, behind something that is no space, and not inside a word for `_`. */
function closing(text, begin, mark) {
  for (let end = text.indexOf(mark, begin + 1); end > 0; end = text.indexOf(mark, end + 1)) {
    const isBehindText = !/[\s\\]/.test(text[end - 1]);
    const isLonger = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const isInWord = mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "");
    if (isBehindText && !isLonger && !isInWord) return end;
  }
  return -1;
}

function link(text, place, depth) {
  const near = text.slice(place, place + FARTHEST);
  const middle = near.indexOf("](");
  const end = middle < 0 ? -1 : near.indexOf(")", middle);
  if (end < 0 || near.slice(0, end).includes("\n")) return null;
  const target = safeTarget(near.slice(middle + 2, end).trim().split(/\s+/)[0]);
  if (!target) return null;
  return [anchor(target, inline(near.slice(1, middle), depth + 1)), place + end + 1];
}

function angled(text, place) {
  const found = /^<(https?:\/\/[^\s<>]+)>/.exec(text.slice(place, place + FARTHEST));
  const target = found && safeTarget(found[1]);
  return target ? [anchor(target, found[1]), place + found[0].length] : null;
}

function bareLink(text, place) {
  if (!text.startsWith("http", place) || /\w/.test(text[place - 1] ?? "")) return null;
  const found = BARE_LINK.exec(text.slice(place, place + FARTHEST));
  const target = found && safeTarget(found[0]);
  return target ? [anchor(target, found[0]), place + found[0].length] : null;
}

/** Only addresses of the web and of mail: a model may write any. */
function safeTarget(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(href, inner) {
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, inner);
}
