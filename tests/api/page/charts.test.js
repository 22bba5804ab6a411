import assert from "node:assert/strict";
import { test } from "node:test";
import { chartAxes, chartSeries, chartsOf } from "../../../src/mlx_ring/api/page/web/cluster/charts.js";
import { detailsOf } from "../../../src/mlx_ring/api/page/web/cluster/pipeline.js";
import { TrustHint } from "../../../src/mlx_ring/api/page/web/components.js";
import { setUpBrowser, toHtml } from "./support.js";

setUpBrowser();

const GROUP = { backend: "ring", why: "all on one machine" };
/** @param {string} name @returns {any} */
const instance = (name) => ({
  name,
  model: "demo",
  epoch: 3,
  stages: [
    { stage: 0, ranks: [{ pid: 7280, node: "mini" }], group: GROUP },
    { stage: 1, ranks: [], group: null },
  ],
});
/** @type {any} */
const POINTS = [
  {
    time: 10,
    pace: {
      "demo-1": {
        tokens_per_s: 40,
        prompt_tokens_per_s: 900,
        stages: [{ stage: 0, compute: 0.25, link: 0, under_way: 0 }],
      },
    },
  },
  { time: 11, pace: null },
];
const color = (/** @type {string} */ name) => `<${name}>`;

test("each chart has one scale with its unit on it, and every value has that unit", () => {
  const charts = chartsOf(POINTS, [instance("demo-1")]);
  assert.deepEqual(
    charts.map(({ unit }) => unit),
    ["tokens/s", "tokens/s", "% of the time"],
  );
  for (const { unit, series, data } of charts) {
    assert.deepEqual(
      chartAxes(color, "11px x", unit).map(({ label = null, scale = null }) => [label, scale]),
      [
        [null, null],
        [unit, null],
      ],
    );
    const lines = series.map((line) => chartSeries(line, unit, color));
    assert.deepEqual(new Set(lines.map(({ scale }) => scale)), new Set(["y"]));
    for (const { value } of lines) assert.equal(/** @type {any} */ (value)(null, 25), `25 ${unit}`);
    assert.equal(data.length, series.length + 1);
  }
  assert.deepEqual(
    charts.map(({ data }) => data[1]),
    [
      [40, null],
      [900, null],
      [25, null],
    ],
  );
});

test("a chart of one of several replicas says which, without the instance's internal name", () => {
  const all = [instance("demo-1"), instance("demo-2")];
  assert.deepEqual(
    [chartsOf(POINTS, all), chartsOf(POINTS, all.slice(1))].map((charts) => charts[2]?.note),
    ["of replica 1 of demo", ""],
  );
});

test("the names of logs and metrics are details of a pipeline", () => {
  assert.deepEqual(detailsOf(instance("demo-1")), [
    ["name in logs and metrics", "demo-1"],
    ["epoch", "3. It grows each time its workers are put together anew."],
    ["worker processes", "7280 on mini"],
    ["group of stage 0", "MLX's ring: all on one machine"],
  ]);
});

test("a sentence about an interface that nobody trusts comes with the commands that trust one", () => {
  const untrusted = [
    "and pro names none. Start it with --trusted-interface NAME, for example a Thunderbolt cable's.",
    "it would be faster, but no interface between these machines is trusted.",
    "demo joins a and b, but their trusted interfaces have no network in common.",
  ];
  for (const text of untrusted) {
    const hint = toHtml(TrustHint({ text }));
    assert.match(hint, /mlx-ring serve MODEL --nodes 2 --trusted-interface NAME/);
    assert.match(hint, /mlx-ring join --trusted-interface NAME/);
  }
  assert.equal(TrustHint({ text: "The model does not fit." }), null);
});
