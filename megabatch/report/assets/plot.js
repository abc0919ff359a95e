// Draws one figure as SVG: scales, marks, legend, hover, zoom. All text of a run is set as text, never as markup.
"use strict";
window.megabatchPlot = (() => {
  const SVG = "http://www.w3.org/2000/svg", RIGHT = 14, TOP = 14, BOTTOM = 46, LETTER = 6.7;
  const make = (name, attributes, parent, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  };
  const html = (name, className, parent, text = "") => {
    const element = document.createElement(name);
    element.className = className;
    element.textContent = text;
    parent.appendChild(element);
    return element;
  };

  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let size = value, unit = 0;
    while (size >= 1024 && unit < 4) { size /= 1024; unit += 1; }
    return `${Number(size.toPrecision(3))} ${units[unit]}`;
  };
  const seconds = (value) => {
    if (value === 0) return "0";
    const [size, unit] = Math.abs(value) < 1e-3 ? [value * 1e6, "us"] : Math.abs(value) < 1 ? [value * 1e3, "ms"] : [value, "s"];
    return `${Number(size.toPrecision(3))} ${unit}`;
  };
  const short = (value) => Math.abs(value) >= 1e6 ? `${Number((value / 1e6).toPrecision(3))}M` : Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 });
  const label = (axis, value) => (axis.ticks.find(([v]) => v === value) || [])[1] || plain(axis, value);
  const plain = (axis, value) => axis.percent ? `${Number((100 * value).toPrecision(6))} %` : axis.title.endsWith("[s]") ? seconds(value)
    : axis.title.includes("[bytes]") ? bytes(value) : short(value);
  const exact = (axis, value) => axis.percent ? `${(100 * value).toFixed(2)} %` : axis.title.endsWith("[s]") ? seconds(value) : String(Number(value.toPrecision(5)));
  const valueText = (figure, one, i) => {
    const show = (v) => exact(figure.y, v);
    const spread = one.low.length && one.low[i] !== one.high[i] ? ` (${show(one.low[i])} to ${show(one.high[i])})` : "";
    const count = one.n.length && one.n[i] > 1 ? `, n = ${one.n[i].toLocaleString("en")}` : "";
    return `${show(one.y[i])}${one.labels.length ? `, ${one.labels[i]}` : ""}${spread}${count}${one.tag === "measured" ? "" : `, ${one.tag}`}`;
  };

  // ---- scales: a value to a part of the axis from 0 to 1, and the ticks that fit into `room` places
  const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const linear = (axis, values, room, exactEnds) => {
    let [low, high] = extent(values);
    if (!(low <= high)) [low, high] = [0, 1];
    if (axis.from_zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const pad = exactEnds ? 0 : 0.05 * (high - low);
    [low, high] = [axis.from_zero && low === 0 ? 0 : low - pad, high + pad];
    const rough = (high - low) / room, power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.7) || 10 * power;
    const ticks = [];
    for (let i = Math.ceil(low / every - 1e-9); i * every <= high + 1e-9 * every && ticks.length < 50; i += 1) ticks.push(i * every);
    return { to: (v) => (v - low) / (high - low), from: (part) => low + part * (high - low), ticks };
  };
  const logarithmic = (axis, values, room, exactEnds) => {
    const log = axis.kind === "log2" ? Math.log2 : Math.log10, base = axis.kind === "log2" ? 2 : 10;
    let [low, high] = extent(values.filter((v) => v > 0).map(log));
    if (!(low <= high)) [low, high] = [0, 1];
    const pad = exactEnds ? 0 : 0.05 * (high - low || 1);
    [low, high] = [low - pad, high + pad];
    const steps = base === 10 && high - low < 2.5 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil((high - low) * steps.length / room));
    const ticks = axis.ticks.map(([v]) => v);
    if (!ticks.length) for (let power = Math.floor(low); power <= high; power += every) for (const m of steps) ticks.push(m * base ** power);
    return { to: (v) => v > 0 ? (log(v) - low) / (high - low) : NaN, from: (part) => base ** (low + part * (high - low)), ticks: ticks.filter((v) => log(v) >= low - 1e-9 && log(v) <= high + 1e-9) };
  };
  const category = (values) => {
    const names = [...new Set(values)], place = new Map(names.map((name, i) => [name, (i + 0.5) / names.length]));
    return { to: (v) => place.get(v), from: (part) => names[Math.min(names.length - 1, Math.max(0, Math.floor(part * names.length)))], ticks: names, band: 1 / names.length };
  };
  const scale = (axis, values, room, exactEnds = false) => {
    if (axis.kind === "category") return category([...axis.ticks.map(([v]) => v), ...values]);
    const above = (v) => axis.floor === null ? v : Math.max(v, axis.floor);
    const made = (axis.kind === "linear" ? linear : logarithmic)(axis, values.map(above), room, exactEnds);
    return { ...made, to: (v) => made.to(above(v)) };
  };

  // A modelled line belongs to its measured points: one entry of the legend shows or hides both.
  const owner = (figure, one) => (one.tag === "simulated" && figure.series.find((other) => other !== one && other.color === one.color)) || one;
  const stacks = (series) => {
    const floor = new Map();
    return series.map((one) => one.mark !== "bars" ? [] : one.x.map((x, i) => {
      const low = one.group ? floor.get(x) || 0 : 0;
      floor.set(x, low + one.y[i]);
      return [low, low + one.y[i]];
    }));
  };

  const draw = (place, figure, color) => {
    const state = place.chart || (place.chart = { hidden: new Set(), zoom: null });
    Object.assign(state, { figure, color });
    place.replaceChildren();
    const legend = document.getElementById(`legend-${figure.key}`);
    const shown = figure.series.filter((one) => !state.hidden.has(owner(figure, one).name));
    drawLegend(legend, figure, state, color, () => draw(place, figure, color));
    const width = Math.max(220, place.clientWidth), height = Math.max(140, place.clientHeight);
    const isLying = figure.horizontal, across = isLying ? figure.y : figure.x, upwards = isLying ? figure.x : figure.y;
    const inside = ([x]) => !state.zoom || typeof x === "string" || (x >= state.zoom[0] && x <= state.zoom[1]);
    const bars = stacks(shown), ys = [], xs = state.zoom ? [] : figure.x.ticks.map(([v]) => v);
    shown.forEach((one, index) => one.x.forEach((x, i) => {
      if (!inside([x])) return;
      xs.push(x);
      ys.push(...(one.mark === "bars" ? bars[index][i] : [one.y[i]]), ...(one.low.length ? [one.low[i], one.high[i]] : []), ...(one.single[i] || []));
    }));
    ys.push(...(figure.band || []));
    const roomY = Math.max(2, Math.floor((height - TOP - BOTTOM) / 46));
    const vertical = scale(upwards, isLying ? xs : ys, roomY);
    const textY = vertical.ticks.map((v) => upwards.kind === "category" ? v : label(upwards, v));
    const title = isLying ? "" : upwards.title;
    const left = Math.min(width * 0.4, Math.max(...textY.map((t) => t.length * LETTER), 20) + (title ? 34 : 14));
    const w = width - left - RIGHT, h = height - TOP - BOTTOM;
    const span = state.zoom && across.kind !== "category" ? [...state.zoom] : null;
    const horizontal = scale(across, span || (isLying ? ys : xs), Math.max(2, Math.floor(w / (isLying ? 90 : 74))), Boolean(span));
    const px = (v) => left + horizontal.to(v) * w, py = (v) => TOP + (upwards.kind === "category" ? vertical.to(v) : 1 - vertical.to(v)) * h;

    const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "drawing", "aria-hidden": "true" }, place);
    const axes = make("g", { class: "axes" }, svg);
    vertical.ticks.forEach((v, i) => {
      make("line", { x1: left, x2: left + w, y1: py(v), y2: py(v), class: "grid" }, axes);
      make("text", { x: left - 7, y: py(v) + 4, "text-anchor": "end", class: "tick y" }, axes, cut(textY[i], (left - 12) / LETTER));
    });
    const places = horizontal.ticks.map((v) => [v, across.kind === "category" ? String(v) : label(across, v)]);
    const slot = w / Math.max(1, places.length), crowded = across.kind === "category" && places.some(([, t]) => t.length * LETTER > slot);
    const skip = crowded ? Math.max(1, Math.ceil(Math.min(9, Math.max(...places.map(([, t]) => t.length))) * LETTER / slot)) : 1;
    places.forEach(([v, t], i) => {
      if (!isLying && across.kind !== "category") make("line", { x1: px(v), x2: px(v), y1: TOP, y2: TOP + h, class: "grid" }, axes);
      if (i % skip === 0) make("text", { x: px(v), y: TOP + h + 17, "text-anchor": "middle", class: "tick x" }, axes, crowded ? cut(t, Math.max(3, slot * skip / LETTER)) : t);
    });
    make("text", { x: left + w / 2, y: height - 6, "text-anchor": "middle", class: "name" }, axes, isLying ? figure.y.title : figure.x.title);
    if (title) make("text", { transform: `translate(13 ${TOP + h / 2}) rotate(-90)`, "text-anchor": "middle", class: "name" }, axes, cut(title, h / LETTER));

    // A nested svg clips what a zoom leaves outside.
    const field = make("svg", { x: left, y: TOP, width: w, height: h, viewBox: `${left} ${TOP} ${w} ${h}`, overflow: "hidden", class: "field" }, svg);
    let taken = Infinity;
    for (const [x, word] of [...figure.marks].reverse()) {
      make("line", { x1: px(x), x2: px(x), y1: TOP, y2: TOP + h, class: "mark" }, field);
      if (px(x) + word.length * LETTER > Math.min(taken, left + w)) continue;
      make("text", { x: px(x) + 4, y: TOP + 12, class: "word" }, field, word);
      taken = px(x);
    }
    if (figure.band) {
      const [a, b] = figure.band.map(isLying ? px : py);
      make("rect", isLying ? { x: a, y: TOP, width: b - a, height: h, class: "band" } : { x: left, y: b, width: w, height: a - b, class: "band" }, field);
    }
    const repeated = shown.filter((one) => one.single.length);
    shown.forEach((one, index) => {
      const aside = isLying || !one.single.length ? 0 : 7 * (repeated.indexOf(one) - (repeated.length - 1) / 2);
      drawSeries(field, figure, one, bars[index], color(one.color), { px, py, w, h, horizontal, vertical, width, aside });
    });
    const frame = { left, w, h, px, py, shown, horizontal, vertical, inside };
    watch(place, svg, figure, state, frame, () => draw(place, figure, color));
  };
  const cut = (text, room) => text.length <= room ? text : `${text.slice(0, Math.max(1, Math.floor(room) - 1))}\u2026`;

  const drawLegend = (place, figure, state, color, again) => {
    place.replaceChildren();
    const entries = figure.series.filter((one) => owner(figure, one) === one);
    if (entries.length > 1) {
      for (const one of entries) {
        const button = html("button", "entry", place);
        button.type = "button";
        button.setAttribute("aria-pressed", String(!state.hidden.has(one.name)));
        const swatch = html("span", `swatch ${one.mark}${one.dashed ? " dashed" : ""}${one.faint ? " faint" : ""}`, button);
        swatch.style.setProperty("--paint", color(one.color));
        html("span", "", button, one.name);
        button.addEventListener("click", () => {
          if (!state.hidden.delete(one.name)) state.hidden.add(one.name);
          again();
        });
      }
    }
    if (state.zoom) {
      const button = html("button", "reset", place, "Whole range");
      button.type = "button";
      button.addEventListener("click", () => { state.zoom = null; again(); });
    }
  };

  const drawSeries = (field, figure, one, stack, paint, { px, py, w, h, horizontal, vertical, width, aside }) => {
    const group = make("g", { class: `series ${one.mark}${one.faint ? " faint" : ""}`, "data-name": one.name, fill: paint }, field);
    if (one.mark === "bars") {
      const thick = Math.max(1, Math.min(56, 0.66 * (figure.horizontal ? h * vertical.band : w * horizontal.band)));
      one.x.forEach((x, i) => {
        const [low, high] = stack[i];
        make("rect", figure.horizontal
          ? { x: px(low), y: py(x) - thick / 2, width: Math.max(0, px(high) - px(low)), height: thick, fill: paint }
          : { x: px(x) - thick / 2, y: py(high), width: thick, height: Math.max(0, py(low) - py(high)), fill: paint }, group);
      });
      return;
    }
    const isLying = figure.horizontal, at = one.x.map((x, i) => isLying ? [px(one.y[i]), py(x)] : [px(x) + aside, py(one.y[i])]);
    if (one.mark !== "points") {
      let path = "", pen = false;
      at.forEach(([x, y], i) => {
        if (!Number.isFinite(x + y)) { pen = false; return; }
        // A branch of the run ends and its trunk goes on from an earlier epoch: the line has a gap there.
        const goesOn = pen && !(typeof one.x[i] === "number" && one.x[i] < one.x[i - 1]);
        path += !goesOn ? `M${x.toFixed(2)} ${y.toFixed(2)}` : one.mark === "steps" ? `H${x.toFixed(2)}V${y.toFixed(2)}` : `L${x.toFixed(2)} ${y.toFixed(2)}`;
        pen = true;
      });
      make("path", { d: path, fill: "none", stroke: paint, "stroke-width": one.faint ? 1 : 2, "stroke-linejoin": "round", ...(one.dashed ? { "stroke-dasharray": "6 4" } : {}) }, group);
    }
    const isFew = one.x.length <= 40 && one.tag === "measured" && one.mark === "line";
    at.forEach(([x, y], i) => {
      if (!Number.isFinite(x + y)) return;
      const isBelow = figure.y.floor !== null && one.y[i] < figure.y.floor;
      for (const value of one.single[i] || []) make("circle", { cx: isLying ? px(value) : x, cy: isLying ? y + 0.22 * h * vertical.band : py(value), r: 2.5, fill: paint, "fill-opacity": 0.5 }, group);
      if (isBelow) make("text", { x: x + (isLying ? 8 : -8), y: y + 4, "text-anchor": isLying ? "start" : "end", class: "word" }, field, `${exact(figure.y, one.y[i])}, off the scale`);
      else if (one.low.length && isLying) make("path", { d: `M${px(one.low[i])} ${y}H${px(one.high[i])}M${px(one.low[i])} ${y - 4}v8M${px(one.high[i])} ${y - 4}v8`, stroke: paint, "stroke-width": 1.6, class: "spread" }, group);
      else if (one.low.length) make("path", { d: `M${x} ${py(one.low[i])}V${py(one.high[i])}M${x - 4} ${py(one.low[i])}h8M${x - 4} ${py(one.high[i])}h8`, stroke: paint, "stroke-width": 1.2, class: "spread" }, group);
      if (one.mark === "points" || isFew) make("circle", { cx: x.toFixed(2), cy: y.toFixed(2), r: one.mark === "points" ? 4.5 : 3, fill: paint }, group);
      if (one.labels.length && one.labels.length <= 12 && width >= 560) make("text", { x: x + 6, y: y + 15, class: "word", fill: paint }, group, one.labels[i]);
    });
  };

  // ---- hover and zoom: a mouse drags a stretch of the axis, a finger reads values
  const near = (figure, frame, x, y) => {
    const { shown, px, py, inside } = frame;
    if (figure.x.kind === "category") {
      const name = figure.horizontal ? frame.vertical.from((y - TOP) / frame.h) : frame.horizontal.from((x - frame.left) / frame.w);
      return { head: name, x: figure.horizontal ? x : px(name), rows: shown.flatMap((one) => one.x.flatMap((v, i) => v === name ? [[one, i]] : [])) };
    }
    const closest = (one, far) => one.x.reduce((best, v, i) => inside([v]) && Number.isFinite(py(one.y[i])) && (best < 0 || far(i) < far(best)) ? i : best, -1);
    const found = shown.map((one) => [one, closest(one, (i) => Math.abs(px(one.x[i]) - x) + (one.mark === "points" ? 1e-3 * Math.abs(py(one.y[i]) - y) : 0))]).filter(([, i]) => i >= 0);
    if (!found.length) return null;
    const gap = ([one, i]) => Math.abs(px(one.x[i]) - x), best = found.reduce((a, b) => gap(b) < gap(a) ? b : a);
    const at = px(best[0].x[best[1]]);
    return { head: `${figure.x.title.replace(/ \[.*/, "")} ${figure.x.kind === "log2" ? label(figure.x, best[0].x[best[1]]) : short(best[0].x[best[1]])}`, x: at, rows: found.filter(([one, i]) => one.mark !== "points" || Math.abs(px(one.x[i]) - at) < 8) };
  };
  const watch = (place, svg, figure, state, frame, again) => {
    const tip = html("div", "tip", place), line = make("line", { y1: TOP, y2: TOP + frame.h, class: "pointer", visibility: "hidden" }, svg);
    const box = make("rect", { y: TOP, height: frame.h, class: "selection", visibility: "hidden" }, svg);
    const point = (event) => { const at = svg.getBoundingClientRect(); return [event.clientX - at.left, event.clientY - at.top]; };
    const part = (x) => Math.min(1, Math.max(0, (x - frame.left) / frame.w));
    const canZoom = figure.x.kind !== "category";
    let from = null;
    const hide = () => { tip.classList.remove("on"); line.setAttribute("visibility", "hidden"); };
    const show = ([x, y]) => {
      const found = x >= frame.left - 4 && x <= frame.left + frame.w + 4 ? near(figure, frame, x, y) : null;
      if (!found || !found.rows.length) { hide(); return; }
      tip.replaceChildren();
      html("b", "", tip, String(found.head));
      for (const [one, i] of found.rows.slice(0, 12)) {
        const row = html("div", "", tip);
        html("span", "swatch", row).style.setProperty("--paint", state.color(one.color));
        html("span", "", row, `${one.name}: ${valueText(figure, one, i)}`);
      }
      tip.classList.add("on");
      const wide = tip.offsetWidth, total = place.clientWidth;
      tip.style.left = `${Math.max(0, found.x + 14 + wide <= total ? found.x + 14 : Math.min(total - wide, found.x - 14 - wide))}px`;
      tip.style.top = `${TOP}px`;
      for (const key of ["x1", "x2"]) line.setAttribute(key, found.x);
      line.setAttribute("visibility", figure.horizontal ? "hidden" : "visible");
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0 && canZoom) { from = point(event)[0]; svg.setPointerCapture(event.pointerId); event.preventDefault(); }
      else show(point(event));
    });
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = point(event);
      show([x, y]);
      if (from === null) return;
      const [a, b] = [from, x].map(part).sort((one, other) => one - other);
      box.setAttribute("x", frame.left + a * frame.w);
      box.setAttribute("width", (b - a) * frame.w);
      box.setAttribute("visibility", "visible");
    });
    svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [a, b] = [from, point(event)[0]].map(part).sort((one, other) => one - other);
      from = null;
      box.setAttribute("visibility", "hidden");
      if ((b - a) * frame.w > 8) { state.zoom = [frame.horizontal.from(a), frame.horizontal.from(b)]; again(); }
    });
    svg.addEventListener("dblclick", () => { if (state.zoom) { state.zoom = null; again(); } });
    svg.addEventListener("pointerleave", () => { if (from === null) hide(); });
  };

  return { draw, bytes, seconds };
})();
