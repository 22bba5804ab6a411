// Markdown within a line: emphasis, code, links.

import { h } from "../vendor/preact.js";
import { findFormula, MathText } from "./math.js";

/** @typedef {import("preact").VNode<any>} Element */

/**
 * Parsed element and the index of the first character after it.
 * @typedef {[element: Element, next: number]} Span
 */

const MAX_DEPTH = 8;
/** Longest link in characters: no link is searched for beyond. */
const MAX_LINK = 2048;
const MAX_TICKS = 16;
const ESCAPABLE = /[\\`*_{}[\]()#+\-.!|>~<$&]/;
const BARE_LINK = /^https?:\/\/[^\s<>"'`]+/;
/** Characters that end a sentence or a mark, and no address. */
const AFTER_LINK = ".,;:!?]}*_";
const LINE_BREAK = /^<br {0,3}\/?>\n?/i;
/** Longest reference to a character, in characters. */
const MAX_REFERENCE = 10;
const REFERENCE = /^&(?:([a-z]+\d*)|#(\d+)|#x([\da-f]+));/i;
/** Characters that models write by name. Other names stay as they are. @type {Record<string, string>} */
const NAMED = {
  ...{ nbsp: "\u00a0", lt: "<", gt: ">", amp: "&", quot: '"', apos: "'", vert: "|", bull: "•" },
  ...{ lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»", middot: "·" },
  ...{ hellip: "…", ndash: "–", mdash: "—", larr: "←", rarr: "→", copy: "©", deg: "°" },
  ...{ uarr: "↑", darr: "↓", harr: "↔", rArr: "⇒", reg: "®", trade: "™", euro: "€", pound: "£", sect: "§" },
  ...{ times: "×", minus: "−", le: "≤", ge: "≥", ne: "≠", plusmn: "±", divide: "÷", asymp: "≈", infin: "∞" },
  ...{ frac12: "½", frac14: "¼", frac34: "¾", sup2: "²", sup3: "³", radic: "√", sum: "∑", micro: "µ" },
  ...{ alpha: "α", beta: "β", gamma: "γ", delta: "δ", Delta: "Δ", epsilon: "ε", theta: "θ", lambda: "λ" },
  ...{ mu: "μ", pi: "π", rho: "ρ", sigma: "σ", Sigma: "Σ", tau: "τ", phi: "φ", omega: "ω", Omega: "Ω" },
};
const IN_WORD = /[\p{L}\p{N}_]/u;
const SAFE_PROTOCOLS = ["http:", "https:", "mailto:"];

/** @typedef {(string | Element)[]} Content */

/**
 * Where spans are parsed. `unclosed` has marks that nothing closes: they are not searched for again.
 * @typedef {{ depth: number, isInLink: boolean, unclosed: Set<string> }} Scope
 */

/** @type {[mark: string, element: (inner: Content) => Element][]} */
const EMPHASIS = [
  ["***", (inner) => h("strong", null, h("em", null, inner))],
  ["**", (inner) => h("strong", null, inner)],
  ["__", (inner) => h("strong", null, inner)],
  ["~~", (inner) => h("s", null, inner)],
  ["*", (inner) => h("em", null, inner)],
  ["_", (inner) => h("em", null, inner)],
];

/**
 * Parse the Markdown within a line or paragraph. Each of its lines stays a line of its own.
 * @param {string} text
 * @param {number} [depth]
 * @param {boolean} [isInLink] whether it is the text of a link, which has no links within
 * @returns {Content}
 */
export function parseSpans(text, depth = 0, isInLink = false) {
  /** @type {Content} */
  const content = [];
  /** @type {Scope} */
  const scope = { depth, isInLink, unclosed: new Set() };
  let plain = "";
  let place = 0;
  while (place < text.length) {
    const span = depth < MAX_DEPTH ? parseSpan(text, place, scope) : null;
    if (span) {
      if (plain) content.push(plain);
      plain = "";
      content.push(span[0]);
      place = span[1];
    } else if (text[place] === "\\" && ESCAPABLE.test(text.charAt(place + 1))) {
      plain += text[place + 1];
      place += 2;
    } else if (text[place] === "&") {
      const [character, length] = parseReference(text.slice(place, place + MAX_REFERENCE));
      plain += character;
      place += length;
    } else {
      plain += text[place];
      place += 1;
    }
  }
  if (plain) content.push(plain);
  return content;
}

/**
 * Return the character that a reference at the start stands for, and the reference's length. Without one, return the
 * text's first character.
 * @param {string} text
 * @returns {[character: string, length: number]}
 */
function parseReference(text) {
  const [whole = "", name, decimal, hexadecimal] = REFERENCE.exec(text) ?? [];
  if (name) return Object.hasOwn(NAMED, name) ? [NAMED[name] ?? "", whole.length] : ["&", 1];
  if (!whole) return ["&", 1];
  const code = decimal ? Number.parseInt(decimal, 10) : Number.parseInt(hexadecimal ?? "", 16);
  const isCharacter = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  return [isCharacter ? String.fromCodePoint(code) : "\ufffd", whole.length];
}

/**
 * Return an address with the characters that its references stand for.
 * @param {string} address
 */
function decodeAddress(address) {
  return address.replaceAll(/&#?[a-z\d]{1,7};/gi, (reference) => {
    const [character, length] = parseReference(reference);
    return character + reference.slice(length);
  });
}

/**
 * Parse the element that starts here. Return null without one.
 * @param {string} text
 * @param {number} place
 * @param {Scope} scope
 * @returns {Span | null}
 */
function parseSpan(text, place, scope) {
  switch (text[place]) {
    case "\\":
      return text[place + 1] === "\n" ? [h("br", null), place + 2] : parseFormula(text, place);
    case "$":
      return parseFormula(text, place);
    case "`":
      return parseCodeSpan(text, place);
    case "!": // A picture of another server is not loaded: its text links to it.
      if (text[place + 1] !== "[") return null;
      return scope.isInLink ? parseLinkedImage(text, place + 1, scope) : parseLink(text, place + 1, scope);
    case "[":
      return scope.isInLink ? null : parseLink(text, place, scope);
    case "<":
      return parseLineBreak(text, place) ?? (scope.isInLink ? null : parseAngledLink(text, place));
    case "h":
      return scope.isInLink ? null : parseBareLink(text, place);
    case "\n":
      return [h("br", null), place + 1];
    case "*":
    case "_":
    case "~":
      return parseEmphasis(text, place, scope);
    default:
      return null;
  }
}

/**
 * Parse the tag of a line break, the only one that Markdown cannot write within a table.
 * @param {string} text
 * @param {number} place
 * @returns {Span | null}
 */
function parseLineBreak(text, place) {
  const [tag = ""] = LINE_BREAK.exec(text.slice(place, place + 10)) ?? [];
  return tag ? [h("br", null), place + tag.length] : null;
}

/**
 * @param {string} text
 * @param {number} place
 * @returns {Span | null}
 */
function parseFormula(text, place) {
  const found = findFormula(text, place);
  return found && [formulaElement(found.source, found.isDisplay), found.next];
}

/**
 * Return the element of a formula.
 * @param {string} source
 * @param {boolean} isDisplay
 */
export function formulaElement(source, isDisplay) {
  return h(MathText, { text: source, ...(isDisplay && { isDisplay }) });
}

/**
 * @param {string} text
 * @param {number} place
 * @returns {Span | null}
 */
function parseCodeSpan(text, place) {
  const ticks = /^`+/.exec(text.slice(place, place + MAX_TICKS))?.[0] ?? "";
  const start = place + ticks.length;
  const end = text.indexOf(ticks, start);
  if (end < 0) return null;
  const code = text.slice(start, end).replaceAll("\n", " ");
  return [h("code", null, code.length > 2 ? code.replace(/^ (.*) $/, "$1") : code), end + ticks.length];
}

/**
 * @param {string} text
 * @param {number} place
 * @param {Scope} scope
 * @returns {Span | null}
 */
function parseEmphasis(text, place, { depth, isInLink, unclosed }) {
  for (const [mark, element] of EMPHASIS) {
    if (unclosed.has(mark) || !text.startsWith(mark, place)) continue;
    const start = place + mark.length;
    if (start >= text.length || /\s/.test(text.charAt(start))) continue;
    if (mark.startsWith("_") && IN_WORD.test(text.charAt(place - 1))) continue;
    const end = findClosingMark(text, start, mark);
    if (end > 0) return [element(parseSpans(text.slice(start, end), depth + 1, isInLink)), end + mark.length];
    unclosed.add(mark);
  }
  return null;
}

/**
 * Return the index of the closing mark, or -1. It follows a character that is no space; `_` is not inside a word.
 * @param {string} text
 * @param {number} start
 * @param {string} mark
 */
function findClosingMark(text, start, mark) {
  for (let end = text.indexOf(mark, start + 1); end > 0; end = text.indexOf(mark, end + 1)) {
    const isBehindText = !/[\s\\]/.test(text.charAt(end - 1));
    const isLonger = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const isInWord = mark.startsWith("_") && IN_WORD.test(text.charAt(end + mark.length));
    if (isBehindText && !isLonger && !isInWord) return end;
  }
  return -1;
}

// ---- links

/**
 * @param {string} text
 * @param {number} place
 * @param {Scope} scope
 * @returns {Span | null}
 */
function parseLink(text, place, { depth }) {
  const found = findLink(text, place);
  const target = found && safeTarget(found.address);
  return target ? [linkElement(target, linkText(found, depth)), found.next] : null;
}

/**
 * Parse a picture within a link's text, such as a badge: it stands there as its own text.
 * @param {string} text
 * @param {number} place
 * @param {Scope} scope
 * @returns {Span | null}
 */
function parseLinkedImage(text, place, { depth }) {
  const found = findLink(text, place);
  return found && [h("span", null, linkText(found, depth)), found.next];
}

/**
 * Link or picture: its text, its address, and the index of the first character after it.
 * @typedef {{ label: string, address: string, next: number }} Link
 */

/**
 * @param {string} text
 * @param {number} place
 * @returns {Link | null}
 */
function findLink(text, place) {
  const near = text.slice(place, place + MAX_LINK);
  if (!near.includes("](")) return null;
  const middle = findClosingBracket(near, 0, "[", "]");
  if (middle < 0 || near[middle + 1] !== "(") return null;
  const end = findClosingBracket(near, middle + 1, "(", ")");
  if (end < 0) return null;
  const [written = ""] = near
    .slice(middle + 2, end)
    .trim()
    .split(/\s+/);
  const address = decodeAddress(written.replaceAll(/\\([()_*~])/g, "$1"));
  return { label: near.slice(1, middle), address, next: place + end + 1 };
}

/**
 * Return what stands for a link: its address if it has no text.
 * @param {Link} link
 * @param {number} depth
 * @returns {Content}
 */
function linkText({ label, address }, depth) {
  return label.trim() ? parseSpans(label, depth + 1, true) : [address];
}

/**
 * Return the index of the bracket that closes the one at a place, in the same line, or -1.
 * @param {string} text
 * @param {number} place
 * @param {string} opening
 * @param {string} closing
 */
function findClosingBracket(text, place, opening, closing) {
  let open = 0;
  for (let end = place; end < text.length && text[end] !== "\n"; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === opening) open += 1;
    else if (text[end] === closing) open -= 1;
    if (open === 0) return end;
  }
  return -1;
}

/**
 * @param {string} text
 * @param {number} place
 * @returns {Span | null}
 */
function parseAngledLink(text, place) {
  const [whole = "", written = ""] = /^<(https?:\/\/[^\s<>]+)>/.exec(text.slice(place, place + MAX_LINK)) ?? [];
  const address = decodeAddress(written);
  const target = safeTarget(address);
  return target ? [linkElement(target, [address]), place + whole.length] : null;
}

/**
 * @param {string} text
 * @param {number} place
 * @returns {Span | null}
 */
function parseBareLink(text, place) {
  if (!text.startsWith("http", place) || /\w/.test(text.charAt(place - 1))) return null;
  const [found = ""] = BARE_LINK.exec(text.slice(place, place + MAX_LINK)) ?? [];
  const written = found.slice(0, endOfLink(found));
  const address = decodeAddress(written);
  const target = safeTarget(address);
  return target ? [linkElement(target, [address]), place + written.length] : null;
}

/**
 * Return where an address ends. A closing bracket belongs to it if the address opens it.
 * @param {string} address with what may follow it
 */
function endOfLink(address) {
  let surplus = address.split(")").length - address.split("(").length;
  let end = address.length;
  while (end > 0 && (AFTER_LINK.includes(address.charAt(end - 1)) || (address[end - 1] === ")" && surplus > 0))) {
    if (address[end - 1] === ")") surplus -= 1;
    end -= 1;
  }
  return end;
}

/**
 * Return an address of the web or of mail, or null for any other, because a model may write any.
 * @param {string} address
 */
function safeTarget(address) {
  try {
    const url = new URL(address);
    return SAFE_PROTOCOLS.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/**
 * @param {string} href
 * @param {Content} content
 */
function linkElement(href, content) {
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}
