"use strict";
document.documentElement.classList.add("script");
const byId = id => document.getElementById(id);
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text; // names are the user's: text, never markup
  return made;
};
const unpacked = async id => {
  const bytes = Uint8Array.from(atob(byId(id).textContent.trim()), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
};

// Texts: diffs and the program are unpacked when they are opened.
for (const details of document.querySelectorAll("details[data-text]")) {
  details.addEventListener("toggle", async () => {
    const code = details.querySelector("code");
    if (!details.open || code.childElementCount) return;
    const runs = await unpacked(details.dataset.text);
    code.replaceChildren(...runs.map(([kind, text]) => element("span", kind, text || " ")));
  });
}

// Verdicts: a search opens the groups that have a match and counts what it shows.
const form = byId("filters");
if (form) {
  const search = form.querySelector("input"), count = form.querySelector("output");
  const buttons = [...form.querySelectorAll("button")];
  const groups = [...document.querySelectorAll("details.group")].map(group => ({
    group, outcome: group.dataset.outcome, head: group.querySelector("summary").textContent.toLowerCase(),
    rows: [...group.querySelectorAll("tbody tr")].map(row => ({row, text: row.textContent.toLowerCase()})),
  }));
  const total = groups.reduce((sum, {group}) => sum + Number(group.dataset.number), 0);
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = new Set(buttons.filter(b => b.getAttribute("aria-pressed") === "true").map(b => b.dataset.outcome));
    let shown = 0;
    for (const {group, outcome, head, rows} of groups) {
      const wanted = !chosen.size || chosen.has(outcome);
      const whole = words.every(word => head.includes(word));
      let here = 0;
      for (const {row, text} of rows) {
        row.hidden = !(wanted && (whole || words.every(word => (head + " " + text).includes(word))));
        here += !row.hidden;
      }
      if (wanted && whole) here = Number(group.dataset.number);
      group.hidden = !here;
      if (words.length) group.open = here > 0 && !whole;
      shown += here;
    }
    count.textContent = shown === total ? `${total.toLocaleString("en")} verdicts` : `${shown.toLocaleString("en")} of ${total.toLocaleString("en")} verdicts`;
    byId("no-match").hidden = shown > 0;
  };
  for (const button of buttons) button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    apply();
  });
  search.addEventListener("input", apply);
  form.addEventListener("submit", event => event.preventDefault());
  apply();
}

// A link into something folded opens it.
const reveal = () => {
  const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
  for (let around = target; around; around = around.parentElement) if (around.tagName === "DETAILS") around.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", reveal);
if (location.hash) reveal();

// The timeline: lanes of one canvas each, all showing the same stretch of time.
const ROW = 17;
const timeline = async box => {
  const data = await unpacked("timeline-data");
  const tip = byId("tip"), found = byId("found"), range = byId("range");
  const view = {from: 0, to: data.length};
  const state = {words: [], folded: true, hits: [], hit: -1};
  const lanes = [];
  const seconds = ticks => {
    const ms = ticks * data.tick * 1e3;
    return ms >= 1000 ? `${(ms / 1e3).toFixed(2)} s` : ms >= 10 ? `${ms.toFixed(1)} ms` : ms >= .1 ? `${ms.toFixed(2)} ms` : `${(ms * 1e3).toFixed(1)} µs`;
  };

  const spread = (flat, width, start) => {
    const rows = [];
    for (let at = start, index = 0; index < flat.length; index += width) {
      at += flat[index];
      rows.push([at, at + flat[index + 1], ...flat.slice(index + 2, index + width)]);
    }
    return rows;
  };

  // Modules as rows: phase, repeated layers as one, the layer, what is inside it.
  const levelsOf = place => {
    const parts = place.split(" ");
    const phase = /^(forward|backward|update)$/.test(parts[0]) ? parts.shift() : "";
    const path = parts.join(" ").split(".").filter(Boolean);
    const layer = path.findIndex(part => /^\d+$/.test(part));
    if (layer < 0) return [phase, path.join(".") || "", "", ""];
    return [phase, path.slice(0, layer).join(".") + ".*", path.slice(0, layer + 1).join("."), path.slice(layer + 1).join(".")];
  };
  const moduleRows = computed => {
    const levels = data.places.map(levelsOf);
    const rows = [[], [], [], []], open = [null, null, null, null];
    for (const [from, to, core, name, place] of computed) {
      if (place < 0) continue; // helpers of no module end no module
      const own = levels[place];
      let same = true;
      for (let level = 0; level < 4; level++) {
        const label = own[level], last = open[level];
        if (!label) break;
        same = same && last && last.label === label;
        if (same) { last.to = to; last.nodes += 1; if (level === 1) last.layers.add(own[2]); continue; }
        open[level] = {from, to, label, nodes: 1, layers: new Set([own[2]]), phase: own[0]};
        open.fill(null, level + 1);
        rows[level].push(open[level]);
      }
    }
    const length = computed.at(-1)[1] - computed[0][0];
    rows[1] = rows[1].filter(block => block.phase !== "update");
    return rows.map((row, level) => joined(row, length / (level < 2 ? 50 : 500)));
  };
  const alike = (one, other) => one.label === other.label && one.phase === other.phase;
  const extend = (block, more) => {
    block.to = more.to; block.nodes += more.nodes;
    if (alike(block, more)) for (const layer of more.layers) block.layers.add(layer);
  };
  // What is interrupted shortly goes on: a few nodes of the update stand among those of the backward.
  const joined = (blocks, short) => {
    const kept = [];
    for (const block of blocks) {
      const last = kept.at(-1), before = kept.at(-2);
      if (last && alike(last, block)) extend(last, block);
      else if (before && alike(before, block) && block.from - before.to < Math.min(short, before.to - before.from)) { kept.pop(); extend(before, last); extend(before, block); }
      else kept.push(block);
    }
    return kept;
  };
  const moduleText = (block, level) => level === 1 && block.layers.size > 1 ? `${block.label} × ${block.layers.size}` : block.label;

  const addLane = (parent, label, kind, height, content) => {
    const row = element("div", "lane");
    const canvas = element("canvas", kind);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", content.describes + " " + label);
    row.append(element("span", "label", label), canvas);
    parent.append(row);
    const lane = {canvas, kind, height, ...content};
    lanes.push(lane);
    canvas.addEventListener("pointermove", event => { if (!drag) point(lane, event); });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("dblclick", event => zoomAt(event, .25));
    return lane;
  };

  for (const track of data.tracks) {
    const part = element("div", "timeline"), head = element("header");
    head.append(element("h3", "", track.title));
    if (track.source) head.append(element("span", "", track.source));
    head.append(element("span", "", `step ${seconds(track.seconds)} · perfect overlap ${seconds(track.overlapped)} · no communication ${seconds(track.alone)}`));
    part.append(head);
    box.append(part);
    const computed = spread(track.computation, 5, track.start);
    const exposed = spread(track.exposed, 3, track.start);
    const marks = [[track.start + track.overlapped, "--after"], [track.start + track.alone, "--before"]];
    if (data.places.length && computed.length) {
      const rows = moduleRows(computed);
      if (rows.some(row => row.length)) addLane(part, "modules", "modules", () => ROW * (state.folded ? 2 : 4), {rows, describes: track.title});
    }
    addLane(part, "computation", "computation", () => 28, {spans: computed, exposed, marks, describes: track.title, stretched: track.stretched});
    for (const group of track.groups)
      addLane(part, `communication ${group.label}`, "communication", () => 20, {spans: spread(group.spans, 5, track.start), exposed, about: group.about, describes: track.title});
  }
  if (data.memory.length) {
    const part = element("div", "timeline");
    box.append(part);
    addLane(part, `memory, peak ${data.peak}`, "memory", () => 60, {points: data.memory, describes: data.tracks[0].title});
  }
  const axisPart = element("div", "timeline");
  addLane(axisPart, "", "axis", () => 20, {describes: "time"});
  box.append(axisPart);

  let colours = {};
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["computed", "stretched", "travelled", "exposed", "memory", "line", "ink", "soft", "before", "after", "sunken", "forward", "backward", "update", "found", "surface"])
      colours[name] = style.getPropertyValue("--" + name).trim();
  };

  // The first row that ends after a time: rows are sorted by their start, and hardly overlap.
  const firstAfter = (rows, time, ends = row => row[1]) => {
    let low = 0, high = rows.length;
    while (low < high) { const middle = (low + high) >> 1; if (ends(rows[middle]) < time) low = middle + 1; else high = middle; }
    return Math.max(0, low - 3);
  };
  const matches = name => state.words.every(word => name.includes(word));
  const nameOf = number => data.names[number];
  const hit = number => state.words.length > 0 && state.matching.has(number);

  const draw = () => {
    readColours();
    const shown = view.to - view.from;
    box.dataset.from = view.from; box.dataset.to = view.to;
    range.textContent = shown >= data.length ? "" : `${seconds(view.from)} to ${seconds(view.to)}`;
    for (const lane of lanes) {
      const {canvas} = lane, height = lane.height(), width = canvas.clientWidth, ratio = devicePixelRatio || 1;
      if (canvas.style.height !== height + "px") canvas.style.height = height + "px";
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); }
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      lane.scale = width / shown;
      painters[lane.kind](lane, pen, width, height, time => (time - view.from) * lane.scale);
    }
  };
  let waiting = false;
  const redraw = () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } };

  const text = (pen, words, x, width, y, colour) => {
    if (width < 26) return;
    pen.font = "11px " + getComputedStyle(document.body).fontFamily;
    pen.fillStyle = colour;
    const room = Math.floor((width - 8) / 6.2);
    const shown = words.length <= room ? words : room > 3 ? words.slice(0, room - 1) + "…" : "";
    if (shown) pen.fillText(shown, x + 4, y);
  };
  const dimmed = number => state.words.length && !state.matching.has(number);

  const painters = {
    modules(lane, pen, width, height, at) {
      lane.rows.slice(0, state.folded ? 2 : 4).forEach((row, level) => {
        let until = -1;
        for (let index = firstAfter(row, view.from, block => block.to); index < row.length; index++) {
          const block = row[index];
          if (block.from > view.to) break;
          const from = Math.max(at(block.from), 0), to = Math.min(at(block.to), width);
          if (to - from < .6 && from < until + .6) continue; // too narrow to see, beside one that is drawn
          pen.fillStyle = colours[block.phase] || colours.forward;
          pen.globalAlpha = level % 2 ? .62 : .9;
          pen.fillRect(from, level * ROW, Math.max(.6, to - from - (to - from > 3 ? 1 : 0)), ROW - 1.5);
          pen.globalAlpha = 1;
          text(pen, moduleText(block, level), from, to - from, level * ROW + 12, "#fff");
          until = to;
        }
      });
    },
    computation(lane, pen, width, height, at) {
      let pixel = -1, wall = 0, core = 0, strong = false;
      const flush = () => {
        if (pixel >= 0 && wall > 0) {
          const covered = Math.min(1, wall * lane.scale), share = core / wall;
          pen.globalAlpha = Math.max(.25, covered) * (state.words.length && !strong ? .3 : 1);
          pen.fillStyle = colours.stretched; pen.fillRect(pixel, 2, 1, height - 4);
          pen.fillStyle = strong ? colours.found : colours.computed; pen.fillRect(pixel, 2 + (height - 4) * (1 - share), 1, (height - 4) * share);
          pen.globalAlpha = 1;
        }
        pixel = -1; wall = core = 0; strong = false;
      };
      for (let index = firstAfter(lane.spans, view.from); index < lane.spans.length; index++) {
        const [start, end, own, name] = lane.spans[index];
        if (start > view.to) break;
        if (end < view.from) continue;
        const from = at(start), to = at(end);
        if (to - from < 3) {
          const column = Math.floor(from);
          if (column !== pixel) { flush(); pixel = column; }
          wall += end - start; core += own; strong = strong || hit(name);
          continue;
        }
        flush();
        const x = Math.max(from, 0), wide = Math.min(to, width) - x - .7, share = end > start ? own / (end - start) : 1;
        pen.globalAlpha = dimmed(name) ? .3 : 1;
        pen.fillStyle = colours.stretched; pen.fillRect(x, 2, wide, height - 4);
        pen.fillStyle = hit(name) ? colours.found : colours.computed; pen.fillRect(x, 2 + (height - 4) * (1 - share), wide, (height - 4) * share);
        pen.globalAlpha = 1;
        text(pen, nameOf(name), x, wide, height / 2 + 4, share > .55 ? "#fff" : colours.ink);
      }
      flush();
      still(lane, pen, width, height, at, true);
      for (const [time, colour] of lane.marks) {
        const x = at(time);
        if (x >= 0 && x <= width + 1) { pen.fillStyle = colours[colour.slice(2)]; pen.fillRect(Math.min(x, width - 2) - 1, 0, 2, height); }
      }
    },
    communication(lane, pen, width, height, at) {
      lane.spans.forEach(([start, end, queued, exposed, name]) => {
        if (start > view.to || end < view.from) return;
        const x = Math.max(at(start), 0), wide = Math.max(1, Math.min(at(end), width) - x - (at(end) - at(start) > 4 ? .7 : 0));
        pen.globalAlpha = dimmed(name) ? .3 : 1;
        pen.fillStyle = hit(name) ? colours.found : colours.travelled;
        pen.fillRect(x, 2, wide, height - 4);
        pen.globalAlpha = 1;
        text(pen, nameOf(name), x, wide, height / 2 + 4, "#fff");
      });
      still({...lane, exposed: lane.exposed.filter(([, , name]) => lane.own.has(name))}, pen, width, height, at, false);
    },
    memory(lane, pen, width, height, at) {
      const most = Math.max(...lane.points.map(point => point[1]), 1);
      pen.beginPath();
      pen.moveTo(at(lane.points[0][0]), height);
      let level = 0;
      for (const [time, size] of lane.points) {
        const x = at(time);
        pen.lineTo(x, height - (height - 3) * level / most);
        level = size;
        pen.lineTo(x, height - (height - 3) * level / most);
      }
      const end = at(data.tracks[0].start + data.tracks[0].seconds);
      pen.lineTo(end, height - (height - 3) * level / most); pen.lineTo(end, height);
      pen.closePath(); pen.fillStyle = colours.memory; pen.fill();
    },
    axis(lane, pen, width, height, at) {
      const shown = view.to - view.from, about = Math.max(2, Math.floor(width / 110));
      const power = 10 ** Math.floor(Math.log10(shown / about)), step = [1, 2, 5, 10].map(f => f * power).find(s => shown / s <= about);
      pen.font = "11px " + getComputedStyle(document.body).fontFamily;
      for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
        const x = at(time), label = time ? seconds(time).replace(/\.?0+ /, " ") : "0";
        pen.fillStyle = colours.line; pen.fillRect(Math.min(x, width - 1), 0, 1, 5);
        pen.fillStyle = colours.soft;
        pen.textAlign = x > width - 40 ? "right" : x < 20 ? "left" : "center";
        pen.fillText(label, x, 16);
      }
    },
  };
  const still = (lane, pen, width, height, at, named) => {
    for (const [start, end, name] of lane.exposed) {
      if (start > view.to || end < view.from) continue;
      const x = Math.max(at(start), 0), wide = Math.max(1, Math.min(at(end), width) - x);
      pen.fillStyle = colours.exposed; pen.fillRect(x, 2, wide, height - 4);
      if (named) text(pen, "waits for " + nameOf(name), x, wide, height / 2 + 4, "#fff");
    }
  };
  for (const lane of lanes) if (lane.kind === "communication") lane.own = new Set(lane.spans.map(span => span[4]));

  // Pointing: what is under the pointer, in words.
  const placeOf = number => number < 0 ? "" : data.places[number];
  const under = (lane, time, y) => {
    const slack = 2 / lane.scale;
    const nearest = rows => rows.find(row => row[0] <= time && time <= row[1]) || rows.find(row => row[0] - slack <= time && time <= row[1] + slack);
    if (lane.kind === "modules") {
      const level = Math.min(state.folded ? 1 : 3, Math.floor(y / ROW));
      const block = lane.rows[level].find(block => block.from - slack <= time && time <= block.to + slack);
      return block && {block, lines: [moduleText(block, level), `${block.phase} · ${seconds(block.to - block.from)} · ${block.nodes.toLocaleString("en")} nodes`]};
    }
    if (lane.kind === "computation") {
      const stands = nearest(lane.exposed);
      if (stands) return {lines: [`stands still for ${nameOf(stands[2])}`, seconds(stands[1] - stands[0])]};
      const node = nearest(lane.spans);
      if (!node) return null;
      const share = lane.stretched ? `${seconds(node[2])} on a core, ${seconds(node[1] - node[0] - node[2])} stretched` : "";
      return {lines: [nameOf(node[3]), `${seconds(node[1] - node[0])} at ${seconds(node[0])}`, share, placeOf(node[4])].filter(Boolean)};
    }
    if (lane.kind === "communication") {
      const sent = nearest(lane.spans);
      return sent && {lines: [nameOf(sent[4]), lane.about[lane.spans.indexOf(sent)], `under way ${seconds(sent[1] - sent[0])}, from ${seconds(sent[0])}` + (sent[2] > 0 ? `, ${seconds(sent[2])} after its launch` : ""), sent[3] ? `exposed ${seconds(sent[3])}` : "hidden"]};
    }
    return null;
  };
  const timeAt = (lane, event) => { const box = lane.canvas.getBoundingClientRect(); return [view.from + (event.clientX - box.left) / box.width * (view.to - view.from), event.clientY - box.top]; };
  const point = (lane, event) => {
    const what = under(lane, ...timeAt(lane, event));
    tip.hidden = !what;
    if (!what) return;
    tip.replaceChildren(...what.lines.map((line, index) => element(index ? "span" : "b", "", line)));
    const {width, height} = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18) + "px";
  };

  // Moving: zoom about a time, pan, all kept inside the run.
  const show = (from, to) => {
    const length = Math.min(Math.max(to - from, 20), data.length);
    view.from = Math.min(Math.max(0, from), data.length - length);
    view.to = view.from + length;
    redraw();
  };
  const zoom = (factor, about = (view.from + view.to) / 2) => show(about - (about - view.from) * factor, about + (view.to - about) * factor);
  const anyLane = event => lanes.find(lane => lane.canvas === event.target) || lanes[0];
  const zoomAt = (event, factor) => zoom(factor, timeAt(anyLane(event), event)[0]);
  byId("zoom-in").addEventListener("click", () => zoom(.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-all").addEventListener("click", () => show(0, data.length));
  const fold = byId("fold");
  fold.addEventListener("click", () => { state.folded = !state.folded; fold.setAttribute("aria-pressed", state.folded); redraw(); });
  box.addEventListener("wheel", event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!event.ctrlKey && !event.metaKey && !sideways) return; // the page scrolls
    event.preventDefault();
    const length = view.to - view.from;
    if (sideways) { const by = (event.deltaX || event.deltaY) / box.clientWidth * length; show(view.from + by, view.to + by); }
    else zoomAt(event, Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * .008));
  }, {passive: false});
  box.addEventListener("keydown", event => {
    const length = view.to - view.from;
    const does = {"+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": () => show(0, data.length),
      ArrowLeft: () => show(view.from - length / 5, view.to - length / 5), ArrowRight: () => show(view.from + length / 5, view.to + length / 5)}[event.key];
    if (does) { event.preventDefault(); does(); }
  });
  const pointers = new Map();
  let drag = null, pinch = 0;
  box.addEventListener("pointerdown", event => {
    if (event.target.tagName !== "CANVAS") return;
    pointers.set(event.pointerId, event);
    drag = {x: event.clientX, from: view.from, to: view.to, moved: false, lane: anyLane(event)};
    pinch = 0;
  });
  addEventListener("pointermove", event => {
    if (!drag || !pointers.has(event.pointerId)) return;
    pointers.set(event.pointerId, event);
    if (pointers.size === 2) {
      const [one, other] = [...pointers.values()], apart = Math.abs(one.clientX - other.clientX) + 1;
      if (pinch) zoom(pinch / apart);
      pinch = apart; drag.moved = true;
      return;
    }
    const by = (drag.x - event.clientX) / drag.lane.canvas.clientWidth * (drag.to - drag.from);
    if (Math.abs(drag.x - event.clientX) > 4) drag.moved = true;
    if (drag.moved) { tip.hidden = true; show(drag.from + by, drag.from + by + drag.to - drag.from); }
  });
  const lift = event => {
    if (!pointers.delete(event.pointerId)) return;
    if (drag && !drag.moved && event.type === "pointerup") click(drag.lane, event);
    if (!pointers.size) drag = null;
  };
  addEventListener("pointerup", lift);
  addEventListener("pointercancel", lift);
  const click = (lane, event) => {
    const what = under(lane, ...timeAt(lane, event));
    if (!what || !what.block) return;
    if (what.block.layers.size > 1 && state.folded) fold.click();
    show(what.block.from, what.block.to);
  };

  // Search: nodes, collectives and modules by name; Enter goes from match to match.
  const search = byId("find");
  const spansOf = () => lanes.filter(lane => lane.spans).flatMap(lane => lane.spans.map(span => [span[0], span[1], lane.kind === "computation" ? span[3] : span[4]]));
  const lowered = data.names.map(name => name.toLowerCase()), places = new Map();
  for (const lane of lanes) if (lane.kind === "computation") for (const span of lane.spans) if (span[4] >= 0) places.set(span[3], data.places[span[4]].toLowerCase());
  const find = () => {
    state.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    state.matching = new Set(lowered.flatMap((name, index) => matches(name + " " + (places.get(index) || "")) ? [index] : []));
    state.hits = state.words.length ? spansOf().filter(([, , name]) => state.matching.has(name)).sort((a, b) => a[0] - b[0]) : [];
    state.hit = -1;
    found.textContent = state.words.length ? `${state.hits.length.toLocaleString("en")} found` : "";
    redraw();
  };
  search.addEventListener("input", find);
  search.addEventListener("keydown", event => {
    if (event.key !== "Enter" || !state.hits.length) return;
    event.preventDefault();
    state.hit = (state.hit + (event.shiftKey ? state.hits.length - 1 : 1)) % state.hits.length;
    const [start, end, name] = state.hits[state.hit], room = Math.max((end - start) * 4, data.length / 200);
    found.textContent = `${state.hit + 1} of ${state.hits.length.toLocaleString("en")}: ${nameOf(name)}`;
    show((start + end) / 2 - room, (start + end) / 2 + room);
  });

  new ResizeObserver(redraw).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  draw();
  box.dataset.ready = "yes";
};
const lanesBox = byId("lanes");
if (lanesBox) timeline(lanesBox).catch(error => {
  lanesBox.append(element("p", "note", `The timeline needs a newer browser (${error.message}); the trace has it all.`));
  console.error(error);
});
