// Charts of the last minutes: tokens per second, and the compute time of each stage. A chart has one scale.

/** @import { Point } from "../live.js" */
/** @import { InstanceStatus, Rates } from "../types.js" */
/** @import uPlot from "uplot" */

import { figures, timeOfDay } from "../format.js";
import { describeInstance } from "../status.js";
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
 */

/**
 * Chart with one scale, whose unit is written on it. `most` is the top of the scale; null fits it to the data.
 * @typedef {object} ChartSpec
 * @property {string} title
 * @property {string} note what the chart covers, if not everything
 * @property {string} label for people who do not see it
 * @property {string} unit
 * @property {(number | null)[][]} data times first, then the values of each line
 * @property {Series[]} series
 * @property {number | null} most
 */

/**
 * Render the charts.
 * @param {{ points: Point[], instances: InstanceStatus[], theme: string }} props
 */
export function Charts({ points, instances, theme }) {
  return html`<div class="charts">
    ${chartsOf(points, instances).map(
      (chart) => html`<section key=${chart.title} class="panel" aria-label=${chart.title}>
        <header><h2>${chart.title}</h2>${chart.note && html`<span class="muted">${chart.note}</span>`}</header>
        <${Chart} theme=${theme} ...${chart} />
      </section>`,
    )}
  </div>`;
}

/**
 * Return what the charts show. Compute time is that of the first instance.
 * @param {Point[]} points
 * @param {InstanceStatus[]} instances
 * @returns {ChartSpec[]}
 */
export function chartsOf(points, instances) {
  const instance = instances[0];
  const stages = instance?.stages.map(({ stage }) => stage) ?? [];
  const times = points.map((point) => point.time);
  const last = points.at(-1)?.pace ?? {};
  /**
   * @param {"tokens_per_s" | "prompt_tokens_per_s"} name
   * @param {string} title
   * @param {Series} line
   * @returns {ChartSpec}
   */
  const speed = (name, title, line) => ({
    title,
    note: "",
    label: `${title}, in tokens per second over five minutes. Now: ${figures(totalPace(last, name))}`,
    unit: "tokens/s",
    data: [times, points.map(({ pace }) => (pace ? totalPace(pace, name) : null))],
    series: [line],
    most: null,
  });
  return [
    speed("tokens_per_s", "Answers", { label: "decode", color: "--accent", isFilled: true }),
    speed("prompt_tokens_per_s", "Prompts", { label: "prefill", color: "--link", isFilled: true }),
    {
      title: "Compute time by stage",
      note: instances.length > 1 ? `of ${describeInstance(instance, instances)}` : "",
      label: "Share of each second that each stage computed, over five minutes",
      unit: "% of the time",
      data: [times, ...stages.map((stage) => computeShares(points, instance?.name ?? "", stage))],
      series: stages.map((stage) => ({ label: `stage ${stage}`, color: `--stage-${stage % 8}` })),
      most: 100,
    },
  ];
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

/** @param {ChartSpec & { theme: string }} props */
function Chart({ data: values, series, label, unit, theme, most }) {
  const data = /** @type {uPlot.AlignedData} */ (values);
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const names = series.map((each) => each.label).join();
  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const created = new window.uPlot(chartOptions(element, series, unit, most), data, element);
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
  }, [values]);
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
 * @param {string} unit
 * @param {number | null} most
 * @returns {uPlot.Options}
 */
function chartOptions(element, series, unit, most) {
  const style = getComputedStyle(element);
  const color = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  return {
    width: element.clientWidth,
    height: HEIGHT_PX,
    cursor: { y: false, points: { size: 6 } },
    legend: { live: true },
    hooks: { setCursor: [showLastValues] },
    scales: {
      x: { range: (_, _first, last) => [last - SPAN_S, last] },
      y: { range: (_, _least, highest) => [0, most ?? scaleTop(highest)] },
    },
    axes: chartAxes(color, `11px ${style.fontFamily}`, unit),
    series: [
      { value: (_, at) => (at ? timeOfDay(at, { withSeconds: false }) : "–") },
      ...series.map((each) => chartSeries(each, unit, color)),
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
 * @param {string} unit of the only scale
 * @returns {uPlot.Axis[]}
 */
export function chartAxes(color, font, unit) {
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
  const left = { ...axis, size: 40, space: 34, label: unit, labelFont: font, labelSize: 16, labelGap: 0 };
  return [time, left];
}

/**
 * @param {Series} series
 * @param {string} unit
 * @param {(name: string) => string} color
 * @returns {uPlot.Series}
 */
export function chartSeries({ label, color: name, isFilled = false }, unit, color) {
  return {
    label,
    scale: "y",
    stroke: color(name),
    ...(isFilled ? { fill: `${color(name)}26` } : {}),
    width: 1.5,
    points: { show: false },
    value: (_, number) => (typeof number === "number" ? `${figures(number)} ${unit}` : "–"),
  };
}
