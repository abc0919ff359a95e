// Plays an all-reduce on the grid of workers: who sends to whom, step by step, and what each worker then holds.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg", CELL = 96, BOX = 62, MAX_PACKETS = 400, LOOP_SECONDS = 14;
  let torus = null, algorithm = null, ticks = [], states = [], at = 0, playing = false, frame = 0, before = 0;
  const report = () => window.megabatchReport;
  const byId = (id) => document.getElementById(id);
  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.appendChild(element);
    return element;
  };
  const centre = (worker) => [(worker % torus.columns + 0.5) * CELL, (Math.floor(worker / torus.columns) + 0.5) * CELL];

  // A straight way between neighbours, a bow for longer ones, so that the way round a ring does not cross the others.
  const along = (from, to, part) => {
    const [x0, y0] = centre(from), [x1, y1] = centre(to), dx = x1 - x0, dy = y1 - y0;
    const length = Math.hypot(dx, dy), bow = length > 1.3 * CELL ? 0.18 : 0.05;
    const cx = (x0 + x1) / 2 + dy * bow, cy = (y0 + y1) / 2 - dx * bow, rest = 1 - part;
    return [rest * rest * x0 + 2 * rest * part * cx + part * part * x1, rest * rest * y0 + 2 * rest * part * cy + part * part * y1];
  };

  // Channels run side by side: tick t shows step t of every channel.
  const plan = (phases) => {
    const channels = new Map();
    phases.forEach((phase, index) => {
      const channel = channels.get(phase.channel) || [];
      phase.steps.forEach((moves, step) => channel.push({ index, step, moves }));
      channels.set(phase.channel, channel);
    });
    const length = Math.max(0, ...[...channels.values()].map((channel) => channel.length));
    return Array.from({ length }, (_, t) => [...channels.values()].map((channel) => channel[t]).filter(Boolean));
  };

  // What a worker holds of the message (from, width) and over how many workers it is summed, before the first and after every tick.
  const follow = (phases, timeline) => {
    const count = torus.rows * torus.columns, numChannels = Math.max(...phases.map((phase) => phase.channel)) + 1;
    let now = Array.from({ length: count }, () => Array.from({ length: numChannels }, (_, channel) => ({ from: channel / numChannels, width: 1 / numChannels, summed: 1, waits: false })));
    const all = [now];
    for (const tick of timeline) {
      now = now.map((channels) => channels.map((one) => ({ ...one })));
      for (const { index, step } of tick) {
        const phase = phases[index];
        if (step === phase.steps.length - 1) finish(phase, now);
      }
      all.push(now);
    }
    return all;
  };
  const finish = (phase, now) => {
    const members = new Set(phase.steps.flat(2));
    const size = phase.axis === -1 ? torus.rows * torus.columns : phase.axis === 1 ? torus.columns : torus.rows;
    for (const worker of members) {
      const one = now[worker][phase.channel];
      const place = phase.axis === -1 ? worker : phase.axis === 1 ? worker % torus.columns : Math.floor(worker / torus.columns);
      if (phase.operation === "reduce_scatter") { one.width /= size; one.from += place * one.width; one.summed *= size; }
      if (phase.operation === "all_gather") { one.from -= place * one.width; one.width *= size; }
      if (phase.operation === "all_reduce" || phase.operation === "exchange") one.summed *= size;
      if (phase.operation === "reduce") { if (place === 0) one.summed *= size; else one.waits = true; }
      if (phase.operation === "broadcast") { one.summed = torus.rows * torus.columns; one.waits = false; }
    }
  };

  const build = () => {
    const box = byId("torus-drawing"), width = torus.columns * CELL, height = torus.rows * CELL;
    box.replaceChildren();
    box.setAttribute("viewBox", `-14 -14 ${width + 28} ${height + 28}`);
    const paint = (name) => `var(${name})`, count = torus.rows * torus.columns;
    make("g", { id: "torus-links" }, box);
    make("g", { id: "torus-packets" }, box);
    const workers = make("g", { id: "torus-workers" }, box);
    for (let worker = 0; worker < count; worker += 1) {
      const [x, y] = centre(worker), group = make("g", { "data-worker": worker }, workers);
      make("rect", { x: x - BOX / 2, y: y - BOX / 2, width: BOX, height: BOX, rx: 10, fill: paint("--worker"), stroke: paint("--line"), "stroke-width": 1.5 }, group);
      const label = make("text", { x, y: y - 8, "text-anchor": "middle", "font-size": 18, "font-weight": 600, fill: paint("--ink") }, group);
      label.textContent = String(worker);
      make("rect", { x: x - BOX / 2 + 7, y: y + 4, width: BOX - 14, height: 9, rx: 2, fill: paint("--grid") }, group);
      make("g", { class: "held" }, group);
      make("text", { class: "summed", x, y: y + 25, "text-anchor": "middle", "font-size": 10, fill: paint("--soft") }, group);
    }
    links();
    hold(0);
  };

  const links = () => {
    const group = byId("torus-links"), seen = new Set();
    group.replaceChildren();
    for (const phase of algorithm.phases) for (const [a, b] of phase.steps.flat()) {
      if (seen.size > 600 || seen.has(`${a},${b}`)) continue;
      seen.add(`${a},${b}`);
      const points = Array.from({ length: 13 }, (_, i) => along(a, b, i / 12).map((v) => v.toFixed(1)).join(",")).join(" ");
      make("polyline", { points, fill: "none", stroke: "var(--line)", "stroke-width": 1 }, group);
    }
  };

  const hold = (tick) => {
    const state = states[tick] || states[states.length - 1], count = torus.rows * torus.columns, paint = report().color(`algorithm:${algorithm.name}`);
    document.querySelectorAll("#torus-workers > g").forEach((group, worker) => {
      const [x, y] = centre(worker), held = group.querySelector(".held");
      held.replaceChildren();
      for (const one of state[worker]) {
        make("rect", { x: x - BOX / 2 + 7 + one.from * (BOX - 14), y: y + 4, width: Math.max(1, one.width * (BOX - 14)), height: 9, rx: 2, fill: paint, opacity: one.waits ? 0.15 : 0.3 + 0.7 * Math.min(1, one.summed / count) }, held);
      }
      const summed = Math.min(...state[worker].map((one) => one.summed));
      group.querySelector(".summed").textContent = state[worker][0].waits ? "waits" : summed >= count ? "sum of all" : `sum of ${summed}`;
    });
  };

  const show = (progress) => {
    const packets = byId("torus-packets"), tick = ticks[at] || [];
    packets.replaceChildren();
    let left = MAX_PACKETS;
    for (const { index, moves } of tick) {
      const phase = algorithm.phases[index], radius = 4 + 5 * Math.sqrt(Math.min(1, phase.sent_share / Math.max(1, phase.num_steps)));
      for (const [from, to] of moves) {
        if (left-- <= 0) return;
        const [cx, cy] = along(from, to, progress);
        make("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: radius.toFixed(1), fill: report().color(`algorithm:${algorithm.name}`), opacity: 0.9 }, packets);
      }
    }
  };

  const tell = () => {
    const current = new Set((ticks[at] || []).map((one) => one.index));
    document.querySelectorAll("#torus-phases li").forEach((item, index) => {
      if (current.has(index)) item.setAttribute("aria-current", "step"); else item.removeAttribute("aria-current");
    });
    const first = (ticks[at] || [])[0];
    const phase = first && algorithm.phases[first.index];
    byId("torus-status").textContent = phase ? `${phase.name}, step ${first.step + 1} of ${phase.steps.length}` : "";
  };

  const list = () => {
    const place = byId("torus-phases");
    place.replaceChildren();
    for (const phase of algorithm.phases) {
      const item = document.createElement("li"), name = document.createElement("b"), facts = document.createElement("span");
      name.textContent = phase.name;
      const parts = [`${phase.num_steps.toLocaleString("en")} step${phase.num_steps === 1 ? "" : "s"}`];
      parts.push(torus.message_bytes ? `${report().bytes(phase.sent_share * torus.message_bytes)} sent by the busiest worker` : `${phase.sent_share.toPrecision(3)} of the message sent`);
      if (phase.seconds !== null) parts.push(`${report().seconds(phase.seconds)} (simulated)`);
      facts.textContent = parts.join(" - ");
      facts.className = "soft";
      item.append(name, facts);
      place.append(item);
    }
  };

  const advance = (now) => {
    if (!playing) return;
    const length = Math.min(900, Math.max(140, LOOP_SECONDS * 1000 / Math.max(1, ticks.length)));
    const progress = Math.min(1, (now - before) / length);
    show(progress);
    if (progress >= 1) {
      at = (at + 1) % ticks.length;
      before = now;
      hold(at);
      tell();
      byId("torus-drawing").dataset.tick = String(at);
    }
    frame = requestAnimationFrame(advance);
  };

  const play = (wanted) => {
    playing = wanted && ticks.length > 0;
    cancelAnimationFrame(frame);
    const button = byId("torus-play");
    button.textContent = playing ? "Pause" : "Play";
    byId("torus-status").setAttribute("aria-live", playing ? "off" : "polite");
    if (playing) { before = performance.now(); frame = requestAnimationFrame(advance); }
  };
  const choose = (name) => {
    algorithm = torus.algorithms.find((one) => one.name === name) || torus.algorithms[0];
    ticks = plan(algorithm.phases);
    states = follow(algorithm.phases, ticks);
    at = 0;
    build();
    list();
    tell();
    show(0.5);
    before = performance.now();
  };

  window.megabatchTorus = {
    start(found) {
      torus = found;
      if (!torus || !byId("torus-drawing")) return;
      const select = byId("torus-algorithm");
      choose(select.value || torus.chosen);
      select.onchange = () => choose(select.value);
      byId("torus-play").onclick = () => play(!playing);
      byId("torus-step").onclick = () => { play(false); at = (at + 1) % ticks.length; hold(at); tell(); show(0.5); byId("torus-drawing").dataset.tick = String(at); };
      play(!matchMedia("(prefers-reduced-motion: reduce)").matches);
    },
    // What every worker holds when the algorithm is over: for tests.
    end(name) {
      const phases = torus.algorithms.find((one) => one.name === name).phases;
      return follow(phases, plan(phases)).at(-1);
    },
    repaint() { if (torus && algorithm) { build(); hold(at); show(0.5); } },
  };
})();
