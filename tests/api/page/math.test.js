import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { adaptTree } from "../../../src/mlx_ring/api/page/web/markdown/math.js";
import { inAlphabet } from "../../../src/mlx_ring/api/page/web/markdown/math-alphabets.js";

const VENDORED = new URL("../../../src/mlx_ring/api/page/web/vendor/katex.min.js", import.meta.url);

/** KaTeX as the page has it. Its file is a script, not a module. */
const katex = (() => {
  const module = { exports: /** @type {any} */ ({}) };
  new Function("module", "exports", readFileSync(VENDORED, "utf8"))(module, module.exports);
  return module.exports;
})();

/** Return what a browser shows of a formula, without its source. @param {string} source */
function toMathml(source) {
  const tree = katex.__renderToDomTree(source, { output: "mathml" });
  adaptTree(tree);
  const [, shown = ""] = /<semantics>(.*)<annotation/s.exec(tree.toMarkup()) ?? [];
  return shown.replace(/^<mrow>(.*)<\/mrow>$/s, "$1");
}

/** @type {[source: string, shown: string][]} */
const CASES = [
  ["\\mathbb{R}", "<mi>ℝ</mi>"],
  ["\\mathbb{A}", "<mi>𝔸</mi>"],
  ["\\mathcal{L}", "<mi>ℒ</mi>"],
  ["\\mathscr{A}", "<mi>𝒜</mi>"],
  ["\\mathfrak{g}", "<mi>𝔤</mi>"],
  ["\\mathfrak{C}", "<mi>ℭ</mi>"],
  ["\\mathbf{v}", "<mi>𝐯</mi>"],
  ["\\mathbf{1}", "<mn>𝟏</mn>"],
  ["\\boldsymbol{\\beta}", "<mi>𝜷</mi>"],
  ["\\mathsf{S}", "<mi>𝖲</mi>"],
  ["\\mathtt{T}", "<mi>𝚃</mi>"],
  ["\\mathit{hi}", "<mi>h</mi><mi>i</mi>"],
  ["\\mathrm{d}", '<mi mathvariant="normal">d</mi>'],
  ["R", "<mi>R</mi>"],
  ["\\textbf{for}", '<mtext class="bold">for</mtext>'],
  ["\\cancel{y}", '<mrow class="updiagonalstrike"><mi>y</mi></mrow>'],
  ["\\xcancel{y}", '<mrow class="updiagonalstrike downdiagonalstrike"><mi>y</mi></mrow>'],
  ["\\fbox{a}", '<mrow class="box"><mstyle scriptlevel="0" displaystyle="false"><mtext>a</mtext></mstyle></mrow>'],
];

for (const [source, shown] of CASES) {
  test(`${source} is shown as it is written, though browsers ignore its attribute or element`, () => {
    assert.equal(toMathml(source), shown);
  });
}

test("alphabets have the character that Unicode names, which normalizes to the plain letter", () => {
  const letters = "AZaz09ΑΩαωϑϖ∇BCEFHILMNPQRZegho";
  for (const variant of ["bold", "italic", "bold-italic", "script", "fraktur", "double-struck", "sans-serif-italic"]) {
    assert.equal(inAlphabet(letters, variant).normalize("NFKC"), letters.normalize("NFKC"), variant);
  }
  assert.doesNotMatch(inAlphabet(letters, "bold"), /[A-Za-z0-9Α-ω∇]/);
});
