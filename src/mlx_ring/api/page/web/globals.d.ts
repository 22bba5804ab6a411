// Globals of classic scripts. Only the type checker reads this file.

import type uPlotConstructor from "uplot";

declare global {
  interface Window {
    uPlot: typeof uPlotConstructor;
  }
}
