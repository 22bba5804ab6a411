// The last minutes: tokens per second, and what each stage did.

import { html, useEffect, useRef } from "../vendor/preact.js";
import { figures } from "../format.js";

const HEIGHT = 170;
const SPAN_S = 300;

/** `points` as `Live` has them; one chart of tokens, and one of stages for the instance with that name. */
export function Charts({ points, instance, isOneOfMany, stages, theme }) {
  const times = points.map((point) => point.time);
  const sum = (name) => points.map(({ pace }) => (pace ? total(pace, name) : null));
  const share = (stage) =>
    points.map(({ pace }) => {
      const found = pace?.[instance]?.stages.find((each) => each.stage === stage);
      // Of a step that takes longer than a look nothing is known before its end.
      return found && found.under_way < 0.5 ? 100 * found.compute : null;
    });
  const last = points.at(-1)?.pace ?? {};
  return html`<div class="charts">
    <section class="panel" aria-label="Tokens per second">
      <header><h2>Tokens per second</h2></header>
      <${Chart}
        theme=${theme}
        label=${`Tokens per second over five minutes; now ${figures(total(last, "tokens_per_s"))} generated, ${figures(total(last, "prompt_tokens_per_s"))} read of prompts`}
        data=${[times, sum("tokens_per_s"), sum("prompt_tokens_per_s")]}
        series=${[
          { label: "generated", color: "--accent", fill: true },
          { label: "read of prompts", color: "--muted", scale: "read" },
        ]}
      />
    </section>
    <section class="panel" aria-label="Time computing">
      <header><h2>Time spent computing, by stage</h2>${isOneOfMany && html`<span class="muted">${instance}</span>`}</header>
      <${Chart}
        theme=${theme}
        label="Share of each second that each stage computed, over five minutes"
        data=${[times, ...stages.map(share)]}
        series=${stages.map((stage) => ({ label: `stage ${stage}`, color: `--stage-${stage % 8}`, unit: " %" }))}
        most=${100}
      />
    </section>
  </div>`;
}

/** Of all instances; null where nothing is known of any. */
export function total(pace, name) {
  const values = Object.values(pace)
    .map((each) => each[name])
    .filter((value) => value !== null && value !== undefined);
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
}

function Chart({ data, series, label, theme, most = null }) {
  const place = useRef(null);
  const chart = useRef(null);
  const names = series.map((each) => each.label).join();
  useEffect(() => {
    const element = place.current;
    const made = new window.uPlot(options(element, series, most), data, element);
    chart.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
      chart.current = null;
    };
  }, [theme, names]);
  useEffect(() => {
    chart.current?.setData(data);
    toLast(chart.current);
  }, [data]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}

/** Where nobody points, the legend tells the last values. */
function toLast(chart) {
  if (chart && (chart.cursor.left ?? -1) < 0) chart.setLegend({ idx: chart.data[0].length - 1 });
}

function options(element, series, most) {
  const style = getComputedStyle(element);
  const color = (name) => style.getPropertyValue(name).trim();
  const font = `11px ${style.fontFamily}`;
  const axis = { stroke: color("--muted"), font, ticks: { show: false }, grid: { stroke: color("--line"), width: 1 } };
  const value = (unit) => (_, number) => (number === null || number === undefined ? "–" : `${figures(number)}${unit}`);
  const hasSecond = series.some((each) => each.scale);
  return {
    width: element.clientWidth,
    height: HEIGHT,
    cursor: { y: false, points: { size: 6 } },
    legend: { live: true },
    hooks: { setCursor: [toLast] },
    scales: {
      x: { range: (_, _least, last) => [last - SPAN_S, last] },
      y: { range: (_, _least, highest) => [0, most ?? Math.max(10, (highest ?? 0) * 1.1)] },
      read: { range: (_, _least, highest) => [0, Math.max(10, (highest ?? 0) * 1.1)] },
    },
    axes: [
      { ...axis, size: 28, space: 44, values: (_, ticks) => ticks.map(clock) },
      { ...axis, size: 40, space: 34, stroke: hasSecond ? color(series[0].color) : axis.stroke },
      ...(hasSecond ? [{ ...axis, scale: "read", side: 1, size: 44, space: 34, grid: { show: false } }] : []),
    ],
    series: [
      { value: (_, at) => (at ? clock(at) : "–") },
      ...series.map(({ label, color: name, fill, unit = "", scale = "y" }) => ({
        label,
        scale,
        stroke: color(name),
        fill: fill ? `${color(name)}26` : undefined,
        width: 1.5,
        points: { show: false },
        value: value(unit),
      })),
    ],
  };
}

function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}
