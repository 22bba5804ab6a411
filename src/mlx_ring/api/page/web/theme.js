// Sets the theme before the first paint: the chosen one, or the system's.
// It is a classic script, because modules run only after the document is parsed.
(() => {
  const root = document.documentElement;
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

  function storedChoice() {
    try {
      return localStorage.getItem("mlx-ring.theme");
    } catch {
      return null; // Storage is blocked: follow the system.
    }
  }

  /** @param {string | null | undefined} choice */
  function apply(choice) {
    const system = systemIsDark.matches ? "dark" : "light";
    const isChosen = choice === "light" || choice === "dark";
    root.dataset.themeChoice = isChosen ? choice : "system";
    root.dataset.theme = isChosen ? choice : system;
    dispatchEvent(new Event("themechange"));
  }

  apply(storedChoice());
  systemIsDark.addEventListener("change", () => apply(root.dataset.themeChoice));
  addEventListener("themechoice", (event) => apply(/** @type {CustomEvent<string>} */ (event).detail));
})();
