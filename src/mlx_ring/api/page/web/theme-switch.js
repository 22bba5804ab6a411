// The switch between the system's theme, light and dark. `theme.js` applies the choice.

import { html, useEffect, useState } from "./vendor/preact.js";

const STORED_THEME = "mlx-ring.theme";
/** @type {Record<string, string>} */
const NEXT = { system: "light", light: "dark", dark: "system" };
/** @type {Record<string, string>} */
const ICONS = { system: "M8 2a6 6 0 0 1 0 12z", light: "", dark: "M8 2a6 6 0 0 1 0 12a6 6 0 0 1 0-12z" };

/**
 * Return the theme on the screen ("light" or "dark") and the choice behind it ("system" included).
 * @returns {{ theme: string, choice: string }}
 */
export function useTheme() {
  const [theme, setTheme] = useState(currentTheme);
  useEffect(() => {
    const onChange = () => setTheme(currentTheme());
    addEventListener("themechange", onChange);
    return () => removeEventListener("themechange", onChange);
  }, []);
  return theme;
}

function currentTheme() {
  const { theme = "light", themeChoice = "system" } = document.documentElement.dataset;
  return { theme, choice: themeChoice };
}

/**
 * Render the button that changes the theme.
 * @param {{ choice: string }} props
 */
export function ThemeSwitch({ choice }) {
  return html`<button
    type="button"
    class="quiet theme"
    onClick=${() => choose(NEXT[choice] ?? "system")}
    aria-label=${`Theme: ${choice}. Change theme.`}
    title=${`Theme: ${choice}`}
  >
    <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
      <circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" />
      <path d=${ICONS[choice]} fill="currentColor" />
    </svg>
  </button>`;
}

/** @param {string} choice */
function choose(choice) {
  try {
    if (choice === "system") localStorage.removeItem(STORED_THEME);
    else localStorage.setItem(STORED_THEME, choice);
  } catch {
    // Storage is blocked: the choice lasts until the page closes.
  }
  dispatchEvent(new CustomEvent("themechoice", { detail: choice }));
}
