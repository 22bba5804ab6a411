// What classic scripts define. Only the type checker reads this file.

import type uPlotConstructor from "uplot";

declare global {
  interface Window {
    uPlot: typeof uPlotConstructor;
  }
}
