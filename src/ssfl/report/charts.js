// Charts in plain SVG: no build step, no dependency, no network. One global, `ssflCharts`.
//
//   line(parent, spec)    curves over x. Returns {update(spec)}, which draws anew in place (live pages).
//     spec = {title, xLabel, yLabel, format, series: [{name, points: [[x, y], ...], band?: [[x, low, high], ...],
//             look?}], range?: [low, high], xRange?: [first, last], log?, marks?: [{x, text}], levels?: [{y, text}], height?, note?}
//     `look` (a whole number; by itself the place in the list) picks colour, dash and marker together, so that
//     a run looks the same in every chart. A y of null leaves a gap. `marks` are vertical lines, `levels` horizontal ones.
//   matrix(parent, spec)  a grid of shaded cells, or of numbered groups. Returns {update(spec)}.
//     spec = {title, rows: [name], columns: [name], values: [[number or null]], rowLabel, columnLabel, format,
//             counts? (a second number for each cell), kinds? (values are small whole numbers, each with a colour and its number), most? (full shade), note?}
//   bars(parent, spec)    level bars with their values written beside them. Returns {update(spec)}.
//     spec = {title, items: [{name, value, text? (instead of the value)}], format, note?}
//   table(head, rows)     a <table> in a box that scrolls; cells are text, or {text, number: true} to stand right.
//   el(tag, attributes, ...children)   an HTML element; strings become text, never HTML.
//   show(format, value)   a value in words: "percent" (of 0..1), "seconds", "bytes", "count" or "number".
//
// Every chart is a <figure> that is read by hovering, by touch, or by keyboard (Tab to it, then arrows, Home, End,
// Escape), and has its data as a table in <details>. Colours come from report.css (--s0 ... --s7), light or dark.
"use strict";

const ssflCharts = (() => {
  const LOOKS = 8, DASHES = ["", "7 4", "2 3", "10 3 2 3", "12 5", "4 2", "1 4", "8 2 2 2 2 2"];
  const DOTS = 9; // at most so many markers on a line
  const LETTER = 6.7, BOLD = 7.6; // the width of a letter in labels, pixels

  function grown(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }
  const el = (tag, attributes, ...children) => grown(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    grown(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const look = (series, place) => (series.look ?? place) % LOOKS;
  const cut = (text, most) => (text.length > most ? text.slice(0, Math.max(most - 1, 1)) + "…" : text);
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  function show(format, value) {
    if (!isNumber(value)) return "–";
    if (format === "percent") return (100 * value).toFixed(1) + " %";
    if (format === "count") return value.toLocaleString("en");
    if (format === "bytes") {
      const units = ["B", "kB", "MB", "GB", "TB", "PB"];
      let place = 0;
      while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
      return plain(value) + " " + units[place];
    }
    if (format === "seconds") {
      if (value >= 7200) return plain(value / 3600) + " h";
      return value >= 120 ? plain(value / 60) + " min" : plain(value) + " s";
    }
    return plain(value);
  }
  function plain(value) { // three digits that count
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
    return String(size >= 100 ? Math.round(value) : Number(value.toPrecision(3)));
  }

  function ticks(low, high, count) { // round numbers: 1, 2 or 5 times a power of ten apart
    const rough = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
    const values = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
      values.push(Number((k * step).toPrecision(12)));
    }
    return values;
  }
  function logTicks(low, high) {
    const values = [], wide = Math.log10(high / low) > 2.2;
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const times of wide ? [1] : [1, 2, 5]) values.push(Number((times * 10 ** power).toPrecision(6)));
    }
    const kept = values.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return kept.length > 2 ? kept : ticks(low, high, 4).filter((tick) => tick > 0);
  }

  // The frame that charts share: caption, drawing, read-out, note, and the data as a table made when opened.
  function framed(parent, spec, tableOf) {
    const caption = el("figcaption"), plot = el("div", { class: "plot" });
    const tip = el("div", { class: "tip", hidden: "" }), note = el("p", { class: "note" });
    const box = el("div"), details = el("details", { class: "data" }, el("summary", {}, "Data as a table"), box);
    const figure = el("figure", { class: "chart" }, caption, plot, note, details);
    const frame = { figure, plot, tip, width: 0, fill };
    function fill(next) {
      caption.textContent = next.title;
      note.textContent = next.note || "";
      note.hidden = !next.note;
      frame.table = () => box.replaceChildren(tableOf());
      if (details.open) frame.table();
    }
    details.addEventListener("toggle", () => details.open && frame.table());
    parent.append(figure);
    fill(spec);
    return frame;
  }
  function watch(frame, draw) { // draw now and whenever the width changes
    new ResizeObserver(() => {
      const width = Math.round(frame.plot.clientWidth);
      if (width && width !== frame.width) { frame.width = width; draw(); }
    }).observe(frame.plot);
    frame.width = Math.round(frame.plot.clientWidth) || 640;
    draw();
  }
  function place(frame, x, y, lines) { // the read-out beside a point, inside the drawing
    const tip = frame.tip;
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const right = x + 14 + tip.offsetWidth > frame.width;
    tip.style.left = Math.max(0, right ? x - 14 - tip.offsetWidth : x + 14) + "px";
    tip.style.top = Math.max(0, y) + "px";
  }

  function table(head, rows) {
    const cell = (tag) => (content) => {
      const number = typeof content === "object" && content !== null && content.number;
      return el(tag, number ? { class: "number" } : {}, String(content?.text ?? content ?? "–"));
    };
    const body = rows.map((row) => el("tr", {}, row.map((content, k) => cell(k ? "td" : "th")(content))));
    for (const row of body) row.firstChild?.setAttribute("scope", "row");
    const top = el("tr", {}, head.map((content) => cell("th")(content)));
    for (const one of top.children) one.setAttribute("scope", "col");
    const whole = el("table", {}, el("thead", {}, top), el("tbody", {}, body));
    return sideways(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, whole));
  }
  function sideways(box) { // a line above a box that is wider than the page: what is cut can be scrolled to
    const hint = el("p", { class: "sideways" }, "Scroll sideways to see all columns →");
    new ResizeObserver(() => hint.classList.toggle("needed", box.scrollWidth > box.clientWidth + 2)).observe(box);
    return el("div", { class: "holds-table" }, hint, box);
  }

  function marker(kind, x, y, size = 3.6) {
    const paths = [
      `M${-size},0a${size},${size} 0 1,0 ${2 * size},0a${size},${size} 0 1,0 ${-2 * size},0`,
      `M${-size},${-size}h${2 * size}v${2 * size}h${-2 * size}z`,
      `M0,${-size * 1.3}L${size * 1.2},${size}H${-size * 1.2}z`,
      `M0,${-size * 1.4}L${size * 1.4},0L0,${size * 1.4}L${-size * 1.4},0z`,
      `M${-size},${-size}L${size},${size}M${-size},${size}L${size},${-size}`,
      `M0,${size * 1.3}L${size * 1.2},${-size}H${-size * 1.2}z`,
      `M${-size * 1.3},0H${size * 1.3}M0,${-size * 1.3}V${size * 1.3}`,
      `M${-size},0a${size},${size} 0 1,0 ${2 * size},0a${size},${size} 0 1,0 ${-2 * size},0M${-size},0h${2 * size}`,
    ];
    return svg("path", { class: `mark s${kind}`, d: paths[kind], transform: `translate(${x},${y})` });
  }
  const sample = (kind) => svg("svg", { class: "sample", width: 34, height: 12, "aria-hidden": "true" },
    svg("path", { class: `line s${kind}`, d: "M1,6H33", "stroke-dasharray": DASHES[kind] }), marker(kind, 17, 6));

  function line(parent, spec) {
    let at = null, byX = [], x = null, y = null, area = null, cursor = null;
    const frame = framed(parent, spec, asTable);
    const drawing = svg("svg", { class: "drawing", tabindex: "0", role: "slider" });
    const legend = el("div", { class: "legend" });
    frame.plot.append(drawing, frame.tip);
    frame.plot.before(legend);
    drawing.addEventListener("pointermove", (event) => hover(event.clientX));
    drawing.addEventListener("pointerdown", (event) => hover(event.clientX));
    drawing.addEventListener("pointerleave", () => read(null));
    drawing.addEventListener("blur", () => read(null));
    drawing.addEventListener("focus", () => drawing.matches(":focus-visible") && read(at ?? byX.length - 1));
    drawing.addEventListener("keydown", (event) => {
      const last = byX.length - 1, now = at ?? last;
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, ArrowDown: now - 1, ArrowUp: now + 1, Home: 0, End: last,
        PageUp: now + 10, PageDown: now - 10, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      read(to === null ? null : Math.min(Math.max(to, 0), last));
    });
    watch(frame, draw);
    return { update(next) { spec = next; frame.fill(next); draw(); } };

    function asTable() {
      const rows = byX.map(([at, values]) => [{ text: String(at), number: true },
        ...values.map((value) => ({ text: show(spec.format, value), number: true }))]);
      return table([{ text: spec.xLabel, number: true },
        ...spec.series.map((one) => ({ text: one.name, number: true }))], rows);
    }

    function gather() { // every x once, with the value of each series there
      const rows = new Map();
      spec.series.forEach((one, k) => one.points.forEach(([at, value]) => {
        if (!rows.has(at)) rows.set(at, new Array(spec.series.length).fill(null));
        rows.get(at)[k] = value;
      }));
      return [...rows.entries()].sort((a, b) => a[0] - b[0]);
    }

    function scales(width, height) {
      const xs = byX.map(([at]) => at).concat((spec.marks || []).map((mark) => mark.x), spec.xRange || []);
      const [first, last] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
      const values = spec.series.flatMap((one) =>
        [...one.points.map((point) => point[1]), ...(one.band || []).flatMap((point) => point.slice(1))])
        .concat((spec.levels || []).map((level) => level.y))
        .filter((value) => isNumber(value) && (!spec.log || value > 0));
      let [low, high] = spec.range || (values.length ? [Math.min(...values), Math.max(...values)] : [0, 1]);
      if (!spec.range && spec.log) [low, high] = [low / 1.7, high * 1.2];
      else if (!spec.range) {
        const room = (high - low || Math.abs(high) || 1) * 0.06;
        [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
      }
      const up = spec.log ? Math.log : (value) => value;
      x = (at) => area.left + (last > first ? (at - first) / (last - first) : 0.5) * width;
      y = (value) => area.top + (1 - (up(value) - up(low)) / (up(high) - up(low))) * height;
      const whole = xs.every(Number.isInteger);
      const across = ticks(first, last > first ? last : first + 1, Math.max(2, Math.floor(width / 80)));
      return { across: across.filter((tick) => tick <= last && (!whole || Number.isInteger(tick))),
        upward: spec.log ? logTicks(low, high) : ticks(low, high, height > 140 ? 5 : 3) };
    }

    function draw() {
      byX = gather();
      at = at === null ? null : Math.min(at, byX.length - 1);
      const names = spec.series.map((one) => one.name), width = frame.width;
      const longest = Math.max(0, ...names.map((name) => name.length));
      const direct = width >= 520 && names.length <= LOOKS;
      const tail = direct ? Math.min(Math.max(longest * BOLD + 16, 140), width * 0.28) : 14; // 140: axes line up
      const height = spec.height || 260;
      area = { left: 54, top: spec.marks?.length ? 24 : 10, bottom: 42 };
      area.width = Math.max(width - area.left - tail, 40);
      area.height = height - area.top - area.bottom;
      const { across, upward } = scales(area.width, area.height);
      const floor = area.top + area.height, parts = [];
      for (const tick of upward) {
        parts.push(svg("path", { class: "grid", d: `M${area.left},${y(tick)}h${area.width}` }),
          svg("text", { class: "tick", x: area.left - 8, y: y(tick) + 4, "text-anchor": "end" },
            spec.format === "percent" ? `${plain(100 * tick)} %` : show(spec.format, tick)));
      }
      for (const tick of across) {
        parts.push(svg("path", { class: "axis", d: `M${x(tick)},${floor}v5` }),
          svg("text", { class: "tick", x: x(tick), y: floor + 19, "text-anchor": "middle" }, tick.toLocaleString("en")));
      }
      parts.push(svg("path", { class: "axis", d: `M${area.left},${floor}h${area.width}` }),
        svg("text", { class: "label", x: area.left + area.width / 2, y: height - 5, "text-anchor": "middle" }, spec.xLabel));
      for (const level of spec.levels || []) {
        const under = y(level.y) + 16 < floor ? 14 : -5;
        parts.push(svg("path", { class: "level", d: `M${area.left},${y(level.y)}h${area.width}` }),
          svg("text", { class: "hint", x: area.left + 6, y: y(level.y) + under }, level.text));
      }
      for (const mark of spec.marks || []) {
        const end = x(mark.x) > area.left + area.width * 0.6;
        parts.push(svg("path", { class: "level", d: `M${x(mark.x)},${area.top - 8}V${floor}` }),
          svg("text", { class: "hint", x: x(mark.x) + (end ? -5 : 5), y: area.top - 9, "text-anchor": end ? "end" : "start" },
            mark.text));
      }
      spec.series.forEach((one, k) => parts.push(...curve(one, look(one, k), k)));
      if (direct) parts.push(...endings(floor));
      cursor = svg("g", { class: "cursor", "aria-hidden": "true" });
      drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
      drawing.setAttribute("aria-label", `${spec.title}. ${spec.yLabel} over ${spec.xLabel}; arrow keys read the values.`);
      drawing.replaceChildren(...parts, cursor);
      legend.replaceChildren(el("span", { class: "axis-name" }, spec.yLabel), ...(direct ? [] :
        spec.series.map((one, k) => el("span", { class: "key" }, sample(look(one, k)), one.name))));
      read(at);
    }

    function curve(one, kind, place) {
      const points = one.points.filter(([, value]) => !spec.log || value === null || value > 0), parts = [];
      const band = (one.band || []).filter((point) => point.every(isNumber) && (!spec.log || point[1] > 0));
      if (band.length > 1) {
        const edge = [...band.map(([at, , top]) => [x(at), y(top)]), ...band.reverse().map(([at, low]) => [x(at), y(low)])];
        parts.push(svg("polygon", { class: `band s${kind}`, points: edge.map((pair) => pair.join(",")).join(" ") }));
      }
      let path = "", open = false;
      for (const [at, value] of points) {
        if (isNumber(value)) path += `${open ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
        open = isNumber(value);
      }
      if (path) parts.push(svg("path", { class: `line s${kind}`, d: path, "stroke-dasharray": DASHES[kind] }));
      const seen = points.filter(([, value]) => isNumber(value)), step = Math.max(1, Math.ceil(seen.length / DOTS));
      seen.forEach(([at, value], k) => { // lines that lie over each other show their markers in turn
        if (k % step === (place * 2) % step || seen.length === 1) parts.push(marker(kind, x(at), y(value)));
      });
      return parts;
    }

    function endings(floor) { // names at the lines' ends, pushed apart
      const ends = spec.series.map((one, k) => {
        const last = one.points.filter((point) => isNumber(point[1])).at(-1);
        return last && { name: one.name, kind: look(one, k), from: y(last[1]), y: y(last[1]), x: x(last[0]) };
      }).filter(Boolean).sort((a, b) => a.y - b.y);
      ends.forEach((end, k) => { if (k) end.y = Math.max(end.y, ends[k - 1].y + 15); });
      for (let k = ends.length - 1, most = floor; k >= 0; k -= 1, most = ends[k + 1].y - 15) {
        ends[k].y = Math.min(ends[k].y, most);
      }
      const start = area.left + area.width, letters = Math.floor((frame.width - start - 12) / BOLD);
      return ends.flatMap((end) => [
        svg("path", { class: `lead s${end.kind}`, d: `M${start + 2},${end.from}L${start + 9},${end.y}` }),
        svg("text", { class: `end s${end.kind}`, x: start + 12, y: end.y + 4 },
          cut(end.name, letters), svg("title", {}, end.name))]);
    }

    function hover(clientX) {
      const box = drawing.getBoundingClientRect(), to = (clientX - box.left) * (frame.width / (box.width || 1));
      if (!byX.length) return;
      read(byX.reduce((best, [value], k) => (Math.abs(x(value) - to) < Math.abs(x(byX[best][0]) - to) ? k : best), 0));
    }

    function read(next) {
      at = byX.length ? next : null;
      drawing.setAttribute("aria-valuemin", byX[0]?.[0] ?? 0);
      drawing.setAttribute("aria-valuemax", byX.at(-1)?.[0] ?? 0);
      drawing.setAttribute("aria-valuenow", byX[at ?? byX.length - 1]?.[0] ?? 0);
      cursor.replaceChildren();
      frame.tip.hidden = true;
      if (at === null) return;
      const [value, ys] = byX[at], texts = [`${spec.xLabel} ${value.toLocaleString("en")}`];
      const lines = [el("strong", {}, texts[0])];
      cursor.append(svg("path", { class: "axis", d: `M${x(value)},${area.top}v${area.height}` }));
      spec.series.forEach((one, k) => {
        if (!isNumber(ys[k])) return;
        if (!spec.log || ys[k] > 0) cursor.append(marker(look(one, k), x(value), y(ys[k]), 5));
        texts.push(`${one.name} ${show(spec.format, ys[k])}`);
        lines.push(el("div", {}, sample(look(one, k)), el("span", {}, one.name), el("b", {}, show(spec.format, ys[k]))));
      });
      drawing.setAttribute("aria-valuetext", texts.join(", "));
      place(frame, x(value), area.top, lines);
    }
  }

  function matrix(parent, spec) {
    let at = null, cell = 0, left = 0, top = 0;
    const frame = framed(parent, spec, () => table([`${spec.rowLabel} \\ ${spec.columnLabel}`,
      ...spec.columns.map((name) => ({ text: name, number: true }))], spec.rows.map((name, i) => [name,
      ...spec.values[i].map((value) => ({ text: show(spec.format, value), number: true }))])));
    const drawing = svg("svg", { class: "drawing", tabindex: "0", role: "application" });
    frame.tip.setAttribute("role", "status");
    frame.plot.append(drawing, frame.tip);
    const within = (event) => {
      const box = drawing.getBoundingClientRect(), scale = frame.width / (box.width || 1);
      const i = Math.floor(((event.clientY - box.top) * scale - top) / cell);
      const j = Math.floor(((event.clientX - box.left) * scale - left) / cell);
      read(spec.values[i]?.[j] === undefined ? null : [i, j]);
    };
    drawing.addEventListener("pointermove", within);
    drawing.addEventListener("pointerdown", within);
    drawing.addEventListener("pointerleave", () => read(null));
    drawing.addEventListener("blur", () => read(null));
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, 0] }[event.key];
      if (event.key === "Escape") read(null);
      if (!step || !spec.rows.length) return;
      event.preventDefault();
      const kept = (value, most) => Math.min(Math.max(value, 0), most);
      read(at === null || event.key === "Home" ? [0, 0]
        : [kept(at[0] + step[0], spec.rows.length - 1), kept(at[1] + step[1], spec.columns.length - 1)]);
    });
    watch(frame, draw);
    return { update(next) { spec = next; frame.fill(next); draw(); } };

    function draw() {
      const letters = Math.max(1, ...spec.rows.map((name) => name.length)), count = Math.max(spec.columns.length, 1);
      left = Math.min(letters * LETTER + 34, frame.width * 0.32);
      const tallest = Math.max(34, Math.min(spec.counts ? 84 : 34, 460 / Math.max(spec.rows.length, 1)));
      cell = Math.min((frame.width - left - 2) / count, Math.max(20, Math.min(tallest, 620 / spec.rows.length)));
      const most = spec.most ?? Math.max(1e-12, ...spec.values.flat().filter(isNumber)), wide = cell >= 19;
      const long = Math.max(1, ...spec.columns.map((name) => name.length)), upright = long * LETTER > cell - 4;
      const every = Math.ceil((upright ? 13 : 0) / cell) || 1, tall = Math.ceil(14 / cell), parts = [];
      top = upright ? Math.min(long, 16) * LETTER + 30 : 40;
      parts.push(svg("text", { class: "label", x: left, y: 12 }, spec.columnLabel + " →"),
        svg("text", { class: "label", transform: `translate(12,${top}) rotate(-90)`, "text-anchor": "end" }, spec.rowLabel));
      spec.columns.forEach((name, j) => {
        const x = left + (j + 0.5) * cell + (upright ? 4 : 0);
        if (j % every) return;
        parts.push(svg("text", upright ? { class: "tick", transform: `translate(${x},${top - 5}) rotate(-90)` }
          : { class: "tick", x, y: top - 6, "text-anchor": "middle" }, cut(name, 16), svg("title", {}, name)));
      });
      spec.rows.forEach((name, i) => {
        if (i % tall) return;
        parts.push(svg("text", { class: "tick", x: left - 6, y: top + (i + 0.5) * cell + 4, "text-anchor": "end" },
          cut(name, Math.floor((left - 24) / LETTER)), svg("title", {}, name)));
      });
      spec.values.forEach((row, i) => row.forEach((value, j) => {
        const x = left + j * cell, y = top + i * cell, share = isNumber(value) ? Math.min(Math.max(value / most, 0), 1) : 0;
        const kind = spec.kinds && isNumber(value) ? ` kind s${(value - 1) % LOOKS}` : "";
        parts.push(svg("rect", { class: `cell${kind}`, x: x + 0.5, y: y + 0.5, width: Math.max(cell - 1, 0.6),
          height: Math.max(cell - 1, 0.6), "fill-opacity": spec.kinds ? (kind ? 0.3 : 0.04) : (0.04 + 0.96 * share).toFixed(3) }));
        if (!isNumber(value) || value === 0 || !wide) return;
        const label = spec.format === "percent" ? String(Math.round(100 * value)) : plain(value);
        if (label.length > 3) return;
        const many = cell >= 40 ? spec.counts?.[i]?.[j] : undefined, over = share > 0.5 && !spec.kinds ? " over" : "";
        const unit = many !== undefined && spec.format === "percent" ? " %" : "";
        parts.push(svg("text", { class: `inside${over}`, x: x + cell / 2, y: y + cell / 2 + (many === undefined ? 4 : -2),
          "text-anchor": "middle" }, label + unit));
        if (many !== undefined) {
          parts.push(svg("text", { class: `inside small${over}`, x: x + cell / 2, y: y + cell / 2 + 13, "text-anchor": "middle" },
            `${many}`));
        }
      }));
      drawing.setAttribute("viewBox", `0 0 ${frame.width} ${Math.ceil(top + spec.rows.length * cell + 2)}`);
      drawing.setAttribute("aria-label", `${spec.title}. ${spec.rowLabel} by ${spec.columnLabel}; arrow keys read the cells.`);
      drawing.replaceChildren(...parts, svg("rect", { class: "pick", visibility: "hidden" }));
      read(at);
    }

    function read(next) {
      at = next;
      const pick = drawing.querySelector(".pick");
      pick.setAttribute("visibility", at ? "visible" : "hidden");
      frame.tip.hidden = true;
      if (!at) return;
      const [i, j] = at, x = left + j * cell, y = top + i * cell;
      for (const [name, value] of Object.entries({ x, y, width: cell, height: cell })) pick.setAttribute(name, value);
      place(frame, x + cell, y + cell, [
        el("div", {}, el("span", {}, `${spec.rowLabel} ${spec.rows[i]}, ${spec.columnLabel} ${spec.columns[j]}`),
          el("b", {}, show(spec.format, spec.values[i][j])))]);
    }
  }

  function bars(parent, spec) {
    const frame = framed(parent, spec, () => table(["", { text: spec.title, number: true }],
      spec.items.map((item) => [item.name, { text: show(spec.format, item.value), number: true }])));
    const list = el("dl", { class: "bars" });
    frame.plot.append(list);
    draw();
    return { update(next) { spec = next; frame.fill(next); draw(); } };

    function draw() {
      const most = Math.max(1e-12, ...spec.items.map((item) => item.value).filter(isNumber));
      list.replaceChildren(...spec.items.flatMap((item) => {
        const bar = el("span", { class: "bar", title: `${item.name}: ${show(spec.format, item.value)}` });
        bar.style.width = `${isNumber(item.value) ? Math.max(0.4, (68 * item.value) / most) : 0}%`;
        return [el("dt", {}, item.name), el("dd", {}, bar, el("span", {}, item.text ?? show(spec.format, item.value)))];
      }));
    }
  }

  return { line, matrix, bars, table, el, show };
})();
