// Draws the page's figures from the JSON beside it. All text of a run reaches the page as text, never as markup.
"use strict";
(() => {
  const root = document.documentElement;
  let data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = () => root.dataset.theme === "dark";
  const color = (key) => (data.colors[key] || data.colors.other)[dark() ? 1 : 0];

  const draw = () => {
    for (const figure of data.figures) {
      const place = document.getElementById(`plot-${figure.key}`);
      if (place) megabatchPlot.draw(place, figure, color);
    }
    root.dataset.drawn = String(Number(root.dataset.drawn || 0) + 1);
  };
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });

  const csvCell = (value) => {
    let cell = String(value);
    if (typeof value === "string" && /^[=@+\-\t]/.test(cell)) cell = `'${cell}`;
    return /[",\n\r]/.test(cell) ? `"${cell.replace(/"/g, '""')}"` : cell;
  };
  const csv = (figure) => {
    const rows = [["series", "tag", figure.x.title, figure.y.title, "low", "high", "n"]];
    for (const one of figure.series) {
      one.x.forEach((x, i) => rows.push([one.name, one.tag, x, one.y[i], one.low[i] ?? "", one.high[i] ?? "", one.n[i] ?? ""]));
    }
    return rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
  };

  const setTheme = (name) => {
    root.dataset.theme = name;
    const button = document.getElementById("theme");
    button.setAttribute("aria-pressed", String(name === "dark"));
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", name === "dark" ? "Use light colors" : "Use dark colors");
  };
  const stored = () => { try { return localStorage.getItem("megabatch-theme"); } catch { return null; } };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-csv], button[data-copy]");
    if (!button) return;
    if (button.dataset.copy) {
      navigator.clipboard?.writeText(document.getElementById(button.dataset.copy).textContent).then(() => { button.textContent = "Copied"; }, () => {});
      return;
    }
    const figure = data.figures.find((one) => one.key === button.dataset.csv);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv(figure)], { type: "text/csv" }));
    link.download = `${figure.key}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(dark() ? "light" : "dark");
    try { localStorage.setItem("megabatch-theme", root.dataset.theme); } catch { /* a page from disk may not store */ }
    draw();
    window.megabatchTorus?.repaint();
  });
  setTheme(stored() || root.dataset.theme || "light");

  window.megabatchReport = { draw, csv, color, bytes: megabatchPlot.bytes, seconds: megabatchPlot.seconds, get data() { return data; } };
  // Text first: the browser paints what stands above before the figures take its time.
  requestAnimationFrame(() => setTimeout(() => { draw(); window.megabatchTorus?.start(data.torus); }, 0));

  if (data.live) {
    const status = document.getElementById("live");
    let version = data.version;
    const poll = async () => {
      try {
        const answer = await fetch(`/latest?version=${encodeURIComponent(version)}`, { cache: "no-store" });
        if (answer.status === 200) {
          const fresh = await answer.json();
          const open = [...document.querySelectorAll("main details[open]")].map((one) => one.id);
          const changed = fresh.layout !== data.layout;
          for (const [id, html] of Object.entries(fresh.parts)) {
            const place = document.getElementById(id);
            if (place && (id !== "figures" || changed)) place.innerHTML = html;
          }
          for (const id of open) document.getElementById(id)?.setAttribute("open", "");
          data = fresh.data;
          version = data.version;
          draw();
          if (changed) window.megabatchTorus?.start(data.torus);
          root.dataset.updates = String(Number(root.dataset.updates || 0) + 1);
        }
        status.textContent = "live";
        status.className = "chip good";
      } catch {
        status.textContent = "the server has stopped";
        status.className = "chip bad";
      }
      setTimeout(poll, 2000);
    };
    setTimeout(poll, 1000);
  }
})();
