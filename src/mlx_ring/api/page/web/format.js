// Numbers, sizes and times as people read them.

/** @typedef {number | null | undefined} Maybe a number, or nothing where it is unknown */

const UNITS = ["B", "KB", "MB", "GB", "TB"];
const UNKNOWN = "–";

/**
 * Format a size: 13_400_000 gives "13.4 MB".
 * @param {Maybe} count
 */
export function bytes(count) {
  if (count === null || count === undefined) return UNKNOWN;
  let unit = 0;
  let value = count;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${figures(value, unit ? 3 : 4)} ${UNITS[unit]}`;
}

/**
 * Round to a number of significant figures. Whole numbers keep all their digits.
 * @param {Maybe} value
 */
export function figures(value, count = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return UNKNOWN;
  if (Number.isInteger(value) || Math.abs(value) >= 10 ** (count - 1)) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(count)));
}

/**
 * Format a duration: "85 ms", "1.4 s", "3 min 20 s", "2 h 5 min", "4 d".
 * @param {Maybe} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.9995) return `${figures(seconds * 1000, 2)} ms`;
  if (seconds < 60) return `${figures(seconds, 2)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

/**
 * Format a throughput: "1.1 GB/s".
 * @param {Maybe} bytesPerS
 */
export const rate = (bytesPerS) => `${bytes(bytesPerS)}/s`;

/**
 * Format a share: 0.256 gives "26 %".
 * @param {Maybe} share
 */
export const percent = (share) => (share === null || share === undefined ? UNKNOWN : `${Math.round(100 * share)} %`);

/**
 * Format a count with its noun: "1 worker", "2 workers".
 * @param {Maybe} count
 * @param {string} one
 */
export const counted = (count, one, many = `${one}s`) => `${figures(count, 4)} ${count === 1 ? one : many}`;

/**
 * Format Unix seconds as a time of day in the browser's time zone.
 * @param {number} unixS
 */
export function timeOfDay(unixS, { withSeconds = true } = {}) {
  return new Date(unixS * 1000).toLocaleTimeString([], {
    hour: "2-digit",
    minute: "2-digit",
    ...(withSeconds ? { second: "2-digit" } : {}),
    hourCycle: "h23",
  });
}
