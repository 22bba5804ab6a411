// Unicode's mathematical alphabets. Browsers ignore MathML's `mathvariant` except "normal".

/**
 * First characters of capital letters, small letters, Greek capital and small letters, and digits; 0 where the alphabet
 * has none.
 * @type {Record<string, [capital: number, small: number, greekCapital: number, greekSmall: number, digit: number]>}
 */
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d6a8, 0x1d6c2, 0x1d7ce],
  italic: [0x1d434, 0x1d44e, 0x1d6e2, 0x1d6fc, 0],
  "bold-italic": [0x1d468, 0x1d482, 0x1d71c, 0x1d736, 0],
  script: [0x1d49c, 0x1d4b6, 0, 0, 0],
  "bold-script": [0x1d4d0, 0x1d4ea, 0, 0, 0],
  fraktur: [0x1d504, 0x1d51e, 0, 0, 0],
  "bold-fraktur": [0x1d56c, 0x1d586, 0, 0, 0],
  "double-struck": [0x1d538, 0x1d552, 0, 0, 0x1d7d8],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0, 0, 0x1d7e2],
  "bold-sans-serif": [0x1d5d4, 0x1d5ee, 0x1d756, 0x1d770, 0x1d7ec],
  "sans-serif-italic": [0x1d608, 0x1d622, 0, 0, 0],
  "sans-serif-bold-italic": [0x1d63c, 0x1d656, 0x1d790, 0x1d7aa, 0],
  monospace: [0x1d670, 0x1d68a, 0, 0, 0x1d7f6],
};

/** Characters that Unicode had before the alphabets, whose places there are empty. @type {Record<string, string>} */
const EARLIER = {
  italic: "hℎ",
  script: "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ",
  fraktur: "CℭHℌIℑRℜZℨ",
  "double-struck": "CℂHℍNℕPℙQℚRℝZℤ",
};

/** Greek small letters have other forms, which follow the last one in this order, after ∂. */
const GREEK_FORMS = "∂ϵϑϰϕϱϖ";
const [CAPITAL, SMALL, GREEK_CAPITAL, GREEK_SMALL, DIGIT] = [0, 1, 2, 3, 4];
/** Number of Greek letters from α to ω, with the final sigma. */
const GREEK = 25;

/**
 * Write a text in an alphabet of MathML. A character without a form in it stays as it is.
 * @param {string} text
 * @param {string} variant
 */
export function inAlphabet(text, variant) {
  const firsts = ALPHABETS[variant];
  return firsts ? Array.from(text, (letter) => inForm(letter, variant, firsts)).join("") : text;
}

/**
 * @param {string} letter
 * @param {string} variant
 * @param {number[]} firsts
 */
function inForm(letter, variant, firsts) {
  const earlier = Array.from(EARLIER[variant] ?? "");
  const place = earlier.indexOf(letter);
  if (place >= 0 && place % 2 === 0) return earlier[place + 1] ?? letter;
  const [row, offset] = placeOf(letter);
  const first = firsts[row];
  return first ? String.fromCodePoint(first + offset) : letter;
}

/**
 * Return a letter's row in a table of alphabets and its distance from the first; a row of -1 for others.
 * @param {string} letter
 * @returns {[row: number, offset: number]}
 */
function placeOf(letter) {
  const after = (/** @type {string} */ first) => letter.charCodeAt(0) - first.charCodeAt(0);
  if (/^[A-Z]$/.test(letter)) return [CAPITAL, after("A")];
  if (/^[a-z]$/.test(letter)) return [SMALL, after("a")];
  if (/^[0-9]$/.test(letter)) return [DIGIT, after("0")];
  if (letter === "∇") return [GREEK_CAPITAL, GREEK];
  if (letter === "ϴ") return [GREEK_CAPITAL, after("ϴ") + 17];
  if (/^[Α-ΡΣ-Ω]$/.test(letter)) return [GREEK_CAPITAL, after("Α")];
  if (/^[α-ω]$/.test(letter)) return [GREEK_SMALL, after("α")];
  const form = GREEK_FORMS.indexOf(letter);
  return form >= 0 ? [GREEK_SMALL, GREEK + form] : [-1, 0];
}
