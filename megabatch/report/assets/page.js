// Draws the page's figures from the JSON beside it. All text of a run reaches the page as text, never as markup.
"use strict";
(() => {
  const root = document.documentElement;
  let data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = () => root.dataset.theme === "dark";
  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (key) => (data.colors[key] || data.colors.other)[dark() ? 1 : 0];
  // Plotly reads a small markup language in its labels; what comes from a run must not speak it.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");

  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let size = value, unit = 0;
    while (size >= 1024 && unit < 4) { size /= 1024; unit += 1; }
    return `${Number(size.toPrecision(3))} ${units[unit]}`;
  };
  const seconds = (value) => value < 1e-3 ? `${(value * 1e6).toPrecision(3)} us`
    : value < 1 ? `${(value * 1e3).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;

  const hover = (figure, one) => one.y.map((y, i) => {
    const show = (v) => figure.y.percent ? `${(100 * v).toFixed(2)} %` : figure.y.title.endsWith("[s]") ? seconds(v) : String(Number(v.toPrecision(5)));
    const spread = one.low.length && one.low[i] !== one.high[i] ? ` (${show(one.low[i])} to ${show(one.high[i])})` : "";
    const count = one.n.length && one.n[i] > 1 ? `, n = ${one.n[i].toLocaleString("en")}` : "";
    const label = one.labels.length ? `, ${one.labels[i]}` : "";
    return plain(`${show(y)}${label}${spread}${count}${one.tag === "measured" ? "" : `, ${one.tag}`}`);
  });

  const trace = (figure, one) => {
    const paint = color(one.color), bars = one.mark === "bars";
    // A modelled line belongs to its measured points: one entry of the legend shows or hides both.
    const twin = one.tag === "simulated" && figure.series.some((other) => other !== one && other.color === one.color);
    const result = {
      name: plain(one.name), x: one.x.map((x) => typeof x === "string" ? plain(x) : x), y: one.y, type: bars ? "bar" : "scatter",
      customdata: hover(figure, one), hovertemplate: "%{fullData.name}: %{customdata}<extra></extra>", showlegend: !twin, legendgroup: one.color,
    };
    if (bars && figure.horizontal) return { ...result, x: result.y, y: result.x, orientation: "h", marker: { color: paint } };
    if (bars) return { ...result, marker: { color: paint } };
    // A branch of the run ends and its trunk goes on from an earlier epoch: the line has a gap there.
    if (typeof one.x[0] === "number") {
      for (let i = one.x.length - 1; i > 0; i -= 1) {
        if (one.x[i] < one.x[i - 1]) for (const key of ["x", "y", "customdata"]) result[key] = [...result[key].slice(0, i), null, ...result[key].slice(i)];
      }
    }
    const few = one.x.length <= 40;
    result.mode = one.mark === "points" ? "markers" : few && one.tag === "measured" ? "lines+markers" : "lines";
    result.line = { color: paint, width: 2, dash: one.dashed ? "dash" : "solid", shape: one.mark === "steps" ? "hv" : "linear" };
    result.marker = { color: paint, size: one.mark === "points" ? 9 : 6 };
    if (one.labels.length && one.labels.length <= 12 && innerWidth >= 640) {
      Object.assign(result, { mode: "markers+text", text: one.labels.map(plain), textposition: "bottom right", cliponaxis: false, textfont: { size: 11, color: paint } });
    }
    if (one.low.length) {
      result.error_y = { type: "data", symmetric: false, array: one.high.map((h, i) => h - one.y[i]), arrayminus: one.low.map((l, i) => one.y[i] - l), color: paint, thickness: 1.2, width: 4 };
    }
    return result;
  };

  const powersOfTwo = (values, asBytes) => {
    const positive = values.filter((v) => typeof v === "number" && v > 0);
    if (!positive.length) return {};
    let low = Infinity, high = -Infinity;
    for (const v of positive) { low = Math.min(low, v); high = Math.max(high, v); }
    const first = Math.floor(Math.log2(low)), last = Math.ceil(Math.log2(high)), every = Math.max(1, Math.ceil((last - first) / 7));
    const tickvals = [];
    for (let power = first; power <= last; power += every) tickvals.push(2 ** power);
    return { tickvals, ticktext: tickvals.map((v) => asBytes ? bytes(v) : v.toLocaleString("en")) };
  };

  const axis = (spec, values) => {
    const result = {
      title: { text: plain(spec.title), standoff: 10, font: { size: 13 } }, gridcolor: style("--grid"), zerolinecolor: style("--line"), linecolor: style("--line"),
      automargin: true, tickfont: { size: 12 },
    };
    if (spec.kind === "log" || spec.kind === "log2") result.type = "log";
    if (spec.kind === "log") result.exponentformat = "power";
    if (spec.kind === "log2") Object.assign(result, powersOfTwo(values, spec.title.includes("bytes")));
    if (spec.kind === "category") result.type = "category";
    if (spec.kind === "linear") result.separatethousands = true;
    if (spec.percent) result.tickformat = ".0%";
    if (spec.from_zero && spec.kind === "linear") result.rangemode = "tozero";
    return result;
  };

  const layout = (figure) => {
    const every = (key) => figure.series.flatMap((one) => one[key]);
    const apart = figure.marks.length > 1 ? (figure.series[0].x.at(-1) - figure.series[0].x[0]) * (innerWidth < 640 ? 0.25 : 0.12) : 0;
    const side = figure.horizontal ? [figure.y, { ...figure.x, title: "" }] : [figure.x, figure.y];
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "inherit", color: style("--ink"), size: 13 },
      margin: { l: 58, r: 14, t: 10, b: 48 }, barmode: "stack", bargap: 0.35, showlegend: figure.series.length > 1,
      legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
      hovermode: figure.x.kind === "log2" || figure.horizontal ? "closest" : "x unified", hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink") } },
      xaxis: axis(side[0], every("x")), yaxis: { ...axis(side[1], every("y")), ...(figure.horizontal ? { autorange: "reversed" } : {}) }, dragmode: "zoom",
      shapes: figure.marks.map(([x]) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: style("--soft"), width: 1, dash: "dot" } })),
      annotations: figure.marks.filter(([x], i) => i + 1 === figure.marks.length || figure.marks[i + 1][0] - x > apart).map(([x, text]) => ({ x, yref: "paper", y: 1, yanchor: "top", xanchor: "left", text: plain(text), showarrow: false, font: { size: 11, color: style("--soft") } })),
    };
  };
  const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: "hover" };

  const draw = () => {
    for (const figure of data.figures) {
      const place = document.getElementById(`plot-${figure.key}`);
      // On a narrow screen the legend stands in a column of its own height.
      if (place) place.style.height = innerWidth < 640 && figure.series.length > 2 ? `${240 + 20 * figure.series.length}px` : "";
      if (place) Plotly.react(place, figure.series.map((one) => trace(figure, one)), layout(figure), options);
    }
    root.dataset.drawn = String(Number(root.dataset.drawn || 0) + 1);
  };

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

  window.megabatchReport = { draw, csv, bytes, seconds, color, style, get data() { return data; } };
  // Text first: the browser paints what stands above before the figures take its time.
  requestAnimationFrame(() => setTimeout(() => { draw(); window.megabatchTorus?.start(data.torus); }, 0));

  if (data.live) {
    const status = document.getElementById("live");
    let version = data.version;
    const poll = async () => {
      try {
        const answer = await fetch(`/update?version=${encodeURIComponent(version)}`, { cache: "no-store" });
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
