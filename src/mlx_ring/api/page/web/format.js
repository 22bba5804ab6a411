// Numbers as people read them.

const UNITS = ["B", "KB", "MB", "GB", "TB"];

/** 13_400_000 -> "13.4 MB". */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  let value = count;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${figures(value, unit ? 3 : 4)} ${UNITS[unit]}`;
}

/** To so many significant figures, whole numbers whole. */
export function figures(value, count = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 10 ** (count - 1)) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(count)));
}

/** Seconds -> "85 ms", "1.4 s", "3 min 20 s", "2 h 5 min", "4 d". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${figures(seconds * 1000, 2)} ms`;
  if (seconds < 60) return `${figures(seconds, 2)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

/** Bytes a second -> "1.1 GB/s". */
export const rate = (bytesPerS) => `${bytes(bytesPerS)}/s`;

/** 0.256 -> "26 %". */
export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);

/** One worker, 2 workers. */
export const counted = (count, one, many = `${one}s`) => `${figures(count, 4)} ${count === 1 ? one : many}`;

/** Unix seconds -> the time of day, in this browser's manner. */
export function timeOfDay(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}
