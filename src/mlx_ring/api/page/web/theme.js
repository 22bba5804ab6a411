// Before anything is drawn: a theme that was chosen here wins over the system's.
(() => {
  try {
    const chosen = localStorage.getItem("mlx-ring.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing follows the system.
  }
})();
