// Charts of the last minutes: tokens per second, and the compute time of each stage.

/** @import { Point } from "../live.js" */
/** @import { InstanceStatus, Rates } from "../types.js" */
/** @import uPlot from "uplot" */

import { figures, timeOfDay } from "../format.js";
import { html, useEffect, useRef } from "../vendor/preact.js";

const HEIGHT_PX = 170;
const SPAN_S = 300;
const TICK_S = 60;
/** Share of unfinished steps from which a stage's compute time is unknown: it counts only at a step's end. */
const MAX_UNFINISHED = 0.5;

/**
 * Line of a chart. `color` is a custom property.
 * @typedef {object} Series
 * @property {string} label
 * @property {string} color
 * @property {boolean} [isFilled]
 * @property {string} [unit]
 * @property {"y" | "right"} [scale]
 */

/**
 * Render the charts. Compute time is that of the first instance.
 * @param {{ points: Point[], instances: InstanceStatus[], theme: string }} props
 */
export function Charts({ points, instances, theme }) {
  const instance = instances[0];
  const stages = instance?.stages.map(({ stage }) => stage) ?? [];
  const times = points.map((point) => point.time);
  /** @param {"tokens_per_s" | "prompt_tokens_per_s"} name */
  const totals = (name) => points.map(({ pace }) => (pace ? totalPace(pace, name) : null));
  const last = points.at(-1)?.pace ?? {};
  const decode = figures(totalPace(last, "tokens_per_s"));
  const prefill = figures(totalPace(last, "prompt_tokens_per_s"));
  return html`<div class="charts">
    <section class="panel" aria-label="Tokens per second">
      <header><h2>Tokens per second</h2></header>
      <${Chart}
        theme=${theme}
        label=${`Tokens per second over five minutes. Now: decode ${decode}, prefill ${prefill}`}
        data=${[times, totals("tokens_per_s"), totals("prompt_tokens_per_s")]}
        series=${[
          { label: "decode", color: "--accent", isFilled: true },
          { label: "prefill", color: "--link", scale: "right" },
        ]}
      />
    </section>
    <section class="panel" aria-label="Compute time">
      <header>
        <h2>Compute time by stage</h2>
        ${instances.length > 1 && html`<span class="muted">${instance?.name}</span>`}
      </header>
      <${Chart}
        theme=${theme}
        label="Share of each second that each stage computed, over five minutes"
        data=${[times, ...stages.map((stage) => computeShares(points, instance?.name ?? "", stage))]}
        series=${stages.map((stage) => ({ label: `stage ${stage}`, color: `--stage-${stage % 8}`, unit: " %" }))}
        most=${100}
      />
    </section>
  </div>`;
}

/**
 * @param {Point[]} points
 * @param {string} instance
 * @param {number} stage
 */
function computeShares(points, instance, stage) {
  return points.map(({ pace }) => {
    const shares = pace?.[instance]?.stages.find((each) => each.stage === stage);
    return shares && shares.under_way < MAX_UNFINISHED ? 100 * shares.compute : null;
  });
}

/**
 * Return a rate of all instances together, or null where none is known.
 * @param {Record<string, Rates>} pace
 * @param {"tokens_per_s" | "prompt_tokens_per_s"} name
 */
export function totalPace(pace, name) {
  const values = Object.values(pace)
    .map((each) => each[name])
    .filter((value) => typeof value === "number");
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
}

/**
 * @param {{
 *   data: uPlot.AlignedData, series: Series[], label: string, theme: string, most?: number | null
 * }} props `most` is the top of the scale; null fits it to the data
 */
function Chart({ data, series, label, theme, most = null }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const names = series.map((each) => each.label).join();
  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const created = new window.uPlot(chartOptions(element, series, most), data, element);
    chart.current = created;
    const resized = new ResizeObserver(() => created.setSize({ width: element.clientWidth, height: HEIGHT_PX }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      created.destroy();
      chart.current = null;
    };
  }, [theme, names]);
  useEffect(() => {
    if (!chart.current) return;
    chart.current.setData(data);
    showLastValues(chart.current);
  }, [data]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}

/**
 * Show the last values in the legend, unless the pointer is on the chart.
 * @param {uPlot} chart
 */
function showLastValues(chart) {
  if ((chart.cursor.left ?? -1) < 0) chart.setLegend({ idx: chart.data[0].length - 1 });
}

/**
 * @param {HTMLElement} element
 * @param {Series[]} series
 * @param {number | null} most
 * @returns {uPlot.Options}
 */
function chartOptions(element, series, most) {
  const style = getComputedStyle(element);
  const color = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  const isTwoSided = series.some((each) => each.scale === "right");
  return {
    width: element.clientWidth,
    height: HEIGHT_PX,
    cursor: { y: false, points: { size: 6 } },
    legend: { live: true },
    hooks: { setCursor: [showLastValues] },
    scales: {
      x: { range: (_, _first, last) => [last - SPAN_S, last] },
      y: { range: (_, _least, highest) => [0, most ?? scaleTop(highest)] },
      right: { range: (_, _least, highest) => [0, scaleTop(highest)] },
    },
    axes: chartAxes(color, `11px ${style.fontFamily}`, isTwoSided ? series[0]?.color : undefined),
    series: [
      { value: (_, at) => (at ? timeOfDay(at, { withSeconds: false }) : "–") },
      ...series.map((each) => chartSeries(each, color)),
    ],
  };
}

/** @param {number | null} highest */
function scaleTop(highest) {
  return Math.max(10, (highest ?? 0) * 1.1);
}

/**
 * @param {(name: string) => string} color
 * @param {string} font
 * @param {string | undefined} leftColor colour of the left scale, if there is a right one too
 * @returns {uPlot.Axis[]}
 */
function chartAxes(color, font, leftColor) {
  const grid = { stroke: color("--line"), width: 1 };
  const axis = { stroke: color("--muted"), font, ticks: { show: false }, grid };
  /** @type {uPlot.Axis} */
  const time = {
    ...axis,
    size: 28,
    space: 44,
    incrs: [TICK_S, 2 * TICK_S, 5 * TICK_S],
    values: (_, ticks) => ticks.map((tick) => timeOfDay(tick, { withSeconds: false })),
  };
  const left = { ...axis, size: 40, space: 34, stroke: leftColor ? color(leftColor) : axis.stroke };
  const right = { ...axis, scale: "right", side: 1, size: 44, space: 34, grid: { show: false } };
  return leftColor ? [time, left, right] : [time, left];
}

/**
 * @param {Series} series
 * @param {(name: string) => string} color
 * @returns {uPlot.Series}
 */
function chartSeries({ label, color: name, isFilled = false, unit = "", scale = "y" }, color) {
  return {
    label,
    scale,
    stroke: color(name),
    ...(isFilled ? { fill: `${color(name)}26` } : {}),
    width: 1.5,
    points: { show: false },
    value: (_, number) => (typeof number === "number" ? `${figures(number)}${unit}` : "–"),
  };
}
