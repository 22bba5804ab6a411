// Limit of renders while an answer streams.

/** Longest time between two renders in a hidden tab, which gets no animation frames. */
const RENDER_MS = 250;

/**
 * Limit renders to one for each animation frame.
 * @param {() => void} render
 */
export function throttle(render) {
  let frame = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const cancel = () => {
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    frame = 0;
  };
  const run = () => {
    cancel();
    render();
  };
  const soon = () => {
    if (frame) return;
    frame = requestAnimationFrame(run);
    timer = setTimeout(run, RENDER_MS);
  };
  return { soon, cancel };
}
