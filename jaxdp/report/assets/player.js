// The player: who holds whose contributions, round by round, on a clock of model time.
// Needs schedule.js.  Each <section class="player"> holds its data as JSON.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SECONDS_PER_ROUND = 1.2; // of watching, where all rounds take equally long
  let lastId = 0;

  function add(parent, tag, attributes = {}, text = "") {
    const inSvg = tag === "svg" || (parent instanceof SVGElement && tag !== "div");
    const element = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  function words(value, units) { // [[factor, "name"], ..], largest first
    const [factor, name] = units.find(([f]) => value >= f) ?? units.at(-1);
    const scaled = value / factor;
    return `${scaled >= 100 ? Math.round(scaled) : Number(scaled.toPrecision(3))} ${name}`;
  }
  const seconds = (s) => words(s, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
  const bytes = (b) => words(b, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
  const rate = (r) => r === Infinity ? "no limit" : words(r, [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]]);
  const bits = (mask) => Array.from({ length: 16 }, (_, r) => r).filter((r) => (mask >>> r) & 1);

  // --- the picture of one track --------------------------------------------------------------

  function draw(parent, track) {
    const article = add(parent, "article", { class: "track", "data-name": track.name });
    add(article, "h3", {}, track.name);
    add(article, "p", {}, track.about);
    const svg = add(article, "svg", {
      class: "picture", viewBox: `0 0 400 ${track.height}`, role: "img",
      "aria-label": `${track.n} ranks and the chunks they hold`,
    });
    for (const [x, y, w, h] of track.nodes) add(svg, "rect", { class: "node", x, y, width: w, height: h, rx: 8 });
    const head = `head${++lastId}`;
    const marker = add(add(svg, "defs"), "marker", {
      id: head, class: "head", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 7, markerHeight: 7, orient: "auto",
    });
    add(marker, "path", { d: "M0 0L6 3L0 6z" });
    const wires = add(svg, "g");
    const cells = track.places.map(([x, y], rank) => drawRank(svg, track, rank, x, y));
    const packets = add(svg, "g");
    const status = add(article, "p", { class: "status number" });
    const text = add(article, "p", { class: "words", role: "status" });
    return { article, head, wires, cells, packets, status, text };
  }

  function drawRank(svg, track, rank, x, y) {
    const [w, h] = [track.size, track.size * track.aspect];
    const [left, top] = [x - w / 2, y - h / 2];
    const g = add(svg, "g", { class: "rank", "data-rank": rank });
    add(g, "rect", { class: "box", x: left - 2, y: top - 2, width: w + 4, height: h + 4, rx: 3 });
    const label = add(g, "text", { x, y: top - 6, "text-anchor": "middle", "font-size": 11 });
    const rows = Array.from({ length: track.chunks }, (_, chunk) => {
      const height = h / track.chunks;
      const row = add(g, "g", { "data-chunk": chunk });
      const squares = Array.from({ length: track.n }, (_, r) => add(row, "rect", {
        class: "cell", x: left + (r * w) / track.n + 0.4, y: top + chunk * height + 0.4,
        width: w / track.n - 0.8, height: height - 0.8,
      }));
      const frame = add(row, "rect", {
        class: "row", x: left, y: top + chunk * height, width: w, height, "stroke-width": Math.min(1.4, height / 8),
      });
      return { row, squares, frame };
    });
    return { label, rows };
  }

  function showHeld(view, track, held) {
    view.cells.forEach(({ label, rows }, rank) => {
      rows.forEach(({ row, squares, frame }, chunk) => {
        const mask = held[rank][chunk];
        row.setAttribute("data-held", bits(mask).join(" "));
        squares.forEach((square, r) => {
          square.style.fill = (mask >>> r) & 1 ? `var(--c${r % 10})` : "none";
        });
        frame.classList.toggle("whole", mask === track.goals[chunk]);
      });
      const done = track.ends[rank].every((chunk) => held[rank][chunk] === track.goals[chunk]);
      label.textContent = done ? `${rank} ✓` : rank;
    });
  }

  // A message's way between two boxes, a little to its right, so that an exchange shows two.
  function way(track, source, destination) {
    const [[x1, y1], [x2, y2]] = [track.places[source], track.places[destination]];
    const length = Math.hypot(x2 - x1, y2 - y1);
    const [dx, dy] = [(x2 - x1) / length, (y2 - y1) / length];
    const edge = Math.min((track.size / 2 + 3) / Math.max(Math.abs(dx), 1e-9),
      ((track.size * track.aspect) / 2 + 3) / Math.max(Math.abs(dy), 1e-9), length / 2);
    const at = (d) => [x1 + dx * d - dy * 4, y1 + dy * d + dx * 4];
    return [at(edge), at(length - edge)];
  }

  function showRound(view, track, round) {
    view.wires.replaceChildren();
    view.packets.replaceChildren();
    const messages = round ? Schedule.messages(round) : [];
    view.moving = messages.map(({ source, destination, chunks, reduce }) => {
      const [from, to] = way(track, source, destination);
      const kind = reduce ? "reduce" : "keep";
      add(view.wires, "line", {
        class: `wire ${kind}`, x1: from[0], y1: from[1], x2: to[0], y2: to[1],
        "marker-end": `url(#${view.head})`,
      });
      const which = chunks.length > 2 ? `${chunks.length}×` : chunks.join(",");
      const crowded = messages.length > 12 || track.chunks === 1;
      const label = `${reduce ? "+" : "="}${crowded ? "" : which}`;
      const packet = add(view.packets, "g", { class: `packet ${kind}` });
      const width = 7 + 5.5 * label.length;
      add(packet, "rect", { x: -width / 2, y: -7, width, height: 14, rx: 3 });
      add(packet, "text", {}, label);
      return { packet, from, to };
    });
    view.text.textContent = messages.map(({ source, destination, chunks, reduce }) => {
      const which = track.chunks === 1 ? "all" : `chunk${chunks.length > 1 ? "s" : ""} ${chunks.join(", ")}`;
      return `${source}→${destination} ${which}${reduce ? " added" : ""}`;
    }).join(" · ") || "done";
  }

  function movePackets(view, fraction) {
    for (const { packet, from, to } of view.moving) {
      const [x, y] = from.map((start, i) => start + (to[i] - start) * fraction);
      packet.setAttribute("transform", `translate(${x} ${y})`);
    }
  }

  // --- the strip: a track's rounds on the common clock ------------------------------------------

  function drawStrip(parent, name) {
    const line = add(parent, "div");
    add(line, "span", {}, name);
    const svg = add(line, "svg", { class: "strip", viewBox: "0 0 1000 20", preserveAspectRatio: "none", "aria-hidden": true });
    return { svg, total: add(line, "span", { class: "number" }) };
  }

  function showStrip({ svg, total }, track, ends, nbytes, links, longest) {
    const id = `hatch${++lastId}`;
    svg.replaceChildren();
    const pattern = add(add(svg, "defs"), "pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
    add(pattern, "rect", { class: "latency", width: 6, height: 6 });
    add(pattern, "path", { class: "hatch", d: "M0 6L6 0" });
    const scale = 1000 / longest;
    track.rounds.forEach((round, i) => {
      const start = i ? ends[i - 1] : 0;
      const latency = Schedule.roundSeconds(track, round, 0, links);
      const rect = (x, width, attributes) =>
        add(svg, "rect", { x: x * scale, y: 2, width: width * scale, height: 16, ...attributes });
      rect(start, latency, { fill: `url(#${id})` });
      rect(start + latency, Math.max(0, ends[i] - start - latency), { class: "carrying" });
      add(svg, "line", { class: "edge", x1: ends[i] * scale, x2: ends[i] * scale, y1: 0, y2: 20 });
    });
    const now = add(svg, "line", { class: "now", y1: 0, y2: 20 });
    total.textContent = seconds(ends.at(-1));
    return (t) => { for (const end of ["x1", "x2"]) now.setAttribute(end, Math.min(t * scale, 999)); };
  }

  // --- the knobs ----------------------------------------------------------------------------------

  function knob(parent, name, low, high, value, show, changed) { // logarithmic, in base 2
    const label = add(parent, "label", {}, name);
    const shown = add(label, "span", { class: "number" }, show(value));
    // a fitted network may have no latency, or no limit of bandwidth: at the end of the slider
    const place = value === 0 ? low : value === Infinity ? high : value;
    const [min, max] = [Math.min(low, place), Math.max(high, place)].map(Math.log2);
    const input = add(label, "input", { type: "range", min, max, step: "any", "aria-label": name });
    input.value = Math.log2(place);
    input.addEventListener("input", () => {
      const now = 2 ** Number(input.value);
      shown.textContent = show(now);
      input.setAttribute("aria-valuetext", show(now));
      changed(now);
    });
  }

  // --- all of it --------------------------------------------------------------------------------

  function start(section) {
    const data = JSON.parse(section.querySelector("script").textContent);
    const { links, tracks } = data;
    let { nbytes } = data;
    let time = 0, playing = false, lastFrame = null;

    const stage = add(section, "div", { class: "tracks" });
    const views = tracks.map((track) => ({ ...draw(stage, track), held: Schedule.replay(track), shown: null }));
    const strips = add(section, "div", { class: "strips" });
    for (const [view, track] of views.map((v, i) => [v, tracks[i]])) view.strip = drawStrip(strips, track.name);

    const controls = add(section, "div", { class: "controls" });
    const button = (name, hint, action) => {
      const made = add(controls, "button", { type: "button", title: hint }, name);
      made.addEventListener("click", action);
      return made;
    };
    button("Start", "to the beginning (Home)", () => seek(0));
    button("Back", "one round back (left arrow)", () => stepBy(-1));
    const toggle = button("Play", "play or pause (space)", () => play(!playing));
    button("Next", "one round on (right arrow)", () => stepBy(1));
    button("End", "to the end (End)", () => seek(longest));
    const scrub = add(controls, "input", { type: "range", min: 0, max: 1000, step: "any", value: 0, "aria-label": "model time" });
    scrub.addEventListener("input", () => seek((Number(scrub.value) / 1000) * longest));
    const speed = add(controls, "select", { "aria-label": "speed" });
    for (const s of ["0.5", "1", "2", "4"]) add(speed, "option", { value: s, ...(s === "1" && { selected: "" }) }, `${s}×`);

    const verdict = add(section, "p", { class: "verdict", role: "status" });
    const knobs = add(section, "div", { class: "knobs" });
    const set = (name) => (value) => { links[name] = value; price(); };
    knob(knobs, "message", 2 ** 8, 2 ** 30, nbytes, bytes, (value) => { nbytes = Math.round(value); price(); });
    knob(knobs, "α: a message takes", 1e-7, 1e-2, links.alpha, seconds, set("alpha"));
    knob(knobs, "1/β: a link carries", 1e7, 1e12, 1 / links.beta, rate, (value) => { links.beta = 1 / value; price(); });
    if (links.localSize) {
      knob(knobs, "α between nodes", 1e-7, 1e-2, links.alphaInter, seconds, set("alphaInter"));
      knob(knobs, "1/β between nodes", 1e7, 1e12, 1 / links.betaInter, rate, (value) => { links.betaInter = 1 / value; price(); });
    }
    const legend = add(section, "p", { class: "legend" });
    legend.innerHTML =
      "A box is a rank, a row a chunk; square <i>i</i> of a row is filled when rank <i>i</i>’s contribution is in it. " +
      "A framed row is complete. A packet with + is added to what is there, one with = replaces it. " +
      'On the clock: <span class="swatch latency"></span> latency (α), <span class="swatch carrying"></span> carrying and adding bytes.';

    let longest = 0;
    function price() { // the knobs have moved: the same round, on the new clock
      const fraction = longest ? time / longest : 0;
      for (const [i, view] of views.entries()) {
        view.ends = Schedule.ends(tracks[i], nbytes, links);
        view.sent = Schedule.sent(tracks[i], nbytes);
      }
      longest = Math.max(...views.map((view) => view.ends.at(-1)));
      for (const [i, view] of views.entries()) {
        view.showNow = showStrip(view.strip, tracks[i], view.ends, nbytes, links, longest);
      }
      verdict.textContent = compared();
      seek(fraction * longest, false);
    }

    function compared() {
      if (tracks.length < 2) return "";
      const order = views.map((view, i) => [view.ends.at(-1), tracks[i].name]).sort((a, b) => a[0] - b[0]);
      const [[first, name], [second]] = order;
      const factor = second / first;
      if (factor < 1.005) return "equally fast";
      return `${name} is done first: ${seconds(first)} against ${seconds(second)}, ${Number(factor.toPrecision(3))} times faster`;
    }

    function render() {
      for (const [i, view] of views.entries()) {
        const track = tracks[i];
        const ongoing = view.ends.findIndex((end) => time < end * (1 - 1e-9));
        const round = ongoing < 0 ? track.rounds.length : ongoing;
        if (view.shown !== round) {
          view.shown = round;
          showHeld(view, track, view.held[round]);
          showRound(view, track, track.rounds[round]);
        }
        const begun = round ? view.ends[round - 1] : 0;
        movePackets(view, (time - begun) / (view.ends[round] - begun));
        view.showNow(time);
        const most = (rows) => Math.max(...rows);
        view.article.setAttribute("data-round", round);
        view.status.textContent =
          `${round} of ${track.rounds.length} rounds done · ${seconds(Math.min(time, view.ends.at(-1)))} of ` +
          `${seconds(view.ends.at(-1))} · busiest rank sent ${bytes(most(view.sent[round]))} of ${bytes(most(view.sent.at(-1)))}`;
      }
      scrub.value = (time / longest) * 1000;
      scrub.setAttribute("aria-valuetext", seconds(time));
    }

    function seek(t, pause = true) {
      if (pause) play(false);
      time = Math.min(Math.max(t, 0), longest);
      render();
    }

    function stepBy(direction) { // to the next, or last, end of a round in any track
      const marks = [0, ...views.flatMap((view) => view.ends)].sort((a, b) => a - b);
      const slack = longest * 1e-9;
      const target = direction > 0
        ? marks.find((mark) => mark > time + slack)
        : marks.findLast((mark) => mark < time - slack);
      seek(target ?? time);
    }

    function play(on) {
      if (on && time >= longest) time = 0;
      playing = on;
      toggle.textContent = on ? "Pause" : "Play";
      lastFrame = null;
      if (on) requestAnimationFrame(tick);
    }

    function tick(now) {
      if (!playing) return;
      const rounds = Math.max(...tracks.map((track) => track.rounds.length));
      const whole = Math.min(Math.max(rounds * SECONDS_PER_ROUND, 4), 30) / Number(speed.value);
      if (lastFrame !== null) time = Math.min(time + (((now - lastFrame) / 1000) * longest) / whole, longest);
      lastFrame = now;
      render();
      if (time >= longest) play(false);
      else requestAnimationFrame(tick);
    }

    const keys = {
      " ": () => play(!playing), ArrowRight: () => stepBy(1), ArrowLeft: () => stepBy(-1),
      Home: () => seek(0), End: () => seek(longest),
    };
    function onKey(event) {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest("input, select") || (event.key === " " && event.target.closest("button"))) return;
      event.preventDefault();
      keys[event.key]();
    }
    section.addEventListener("keydown", onKey);
    if (section === document.querySelector(".player")) { // keys reach the first one without a click
      document.addEventListener("keydown", (event) => { if (event.target === document.body) onKey(event); });
    }
    price();
  }

  for (const section of document.querySelectorAll(".player")) start(section);
})();
