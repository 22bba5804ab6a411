// Globals of classic scripts. Only the type checker reads this file.

import type uPlotConstructor from "uplot";
import type { Katex } from "./vendor/katex.min.js";

declare global {
  interface Window {
    uPlot: typeof uPlotConstructor;
    katex: Katex;
  }
}
