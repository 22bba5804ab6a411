import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { bytes, counted, duration, figures, percent, rate } from "../../../src/mlx_ring/api/page/web/format.js";

/** @type {Record<string, [text: string, expected: string][]>} */
const CASES = {
  bytes: [
    [bytes(0), "0 B"],
    [bytes(999), "999 B"],
    [bytes(1000), "1 KB"],
    [bytes(13_400_000), "13.4 MB"],
    [bytes(999_600_000), "1 GB"],
    [bytes(25_276_502_016), "25.3 GB"],
    [bytes(5e15), "5,000 TB"],
    [bytes(null), "–"],
  ],
  rate: [[rate(1.1e9), "1.1 GB/s"]],
  figures: [
    [figures(0), "0"],
    [figures(12_345), "12,345"],
    [figures(1.2345), "1.23"],
    [figures(123.4), "123"],
    [figures(0.012345, 2), "0.012"],
    [figures(Number.NaN), "–"],
    [figures(undefined), "–"],
  ],
  duration: [
    [duration(0), "0 ms"],
    [duration(0.0854), "85 ms"],
    [duration(0.9999), "1 s"],
    [duration(1.44), "1.4 s"],
    [duration(200), "3 min 20 s"],
    [duration(3600), "1 h 0 min"],
    [duration(7500), "2 h 5 min"],
    [duration(4 * 86_400), "4 d"],
    [duration(null), "–"],
  ],
  percent: [
    [percent(0.256), "26 %"],
    [percent(0), "0 %"],
    [percent(null), "–"],
  ],
  counted: [
    [counted(1, "worker"), "1 worker"],
    [counted(2, "worker"), "2 workers"],
    [counted(0, "prefix", "prefixes"), "0 prefixes"],
    [counted(1200, "token"), "1,200 tokens"],
  ],
};

for (const [name, cases] of Object.entries(CASES)) {
  describe(name, () => {
    for (const [text, expected] of cases) test(expected, () => assert.equal(text, expected));
  });
}
