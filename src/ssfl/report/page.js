// Draws a report from the JSON that is embedded in its page; see sections.py for what that holds.
// Everything is set as text: names and values of a run cannot become HTML.
"use strict";

(() => {
  const { el, line, matrix, bars, table, show } = ssflCharts;
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");

  const image = (address, alt) => { // only what predictions.py writes is shown
    const safe = String(address).startsWith("data:image/png;base64,");
    return el("img", { src: safe ? address : null, alt, decoding: "async" });
  };

  function example(item) {
    const verdict = item.correct ? `${item.predicted}, correct` : `${item.predicted}, true: ${item.true}`;
    return el("li", { class: item.correct ? "correct" : "wrong" }, image(item.image, `true class ${item.true}`),
      el("div", { class: "verdict" }, `${item.correct ? "✓" : "✗"} ${verdict}`), el("div", { class: "soft" }, `confidence ${show("percent", item.confidence)}`));
  }

  function views(block) {
    const head = ["image", ...block.items[0].weak.map((_, k) => `weak ${k + 1}`),
      ...block.items[0].strong.map((_, k) => `strong ${k + 1}`), "prediction for weak 1"];
    const rows = block.items.map((item) => el("tr", {},
      [item.image, ...item.weak, ...item.strong].map((one, k) => el("td", {}, image(one, `${head[k]} of ${item.true ?? "an image"}`))),
      el("td", {}, el("div", {}, `${item.predicted}, confidence ${show("percent", item.confidence)}`),
        el("div", { class: "soft" }, [
          item.counts === null ? null : item.counts ? "used" : "not used, confidence below the threshold",
          item.true === null ? null : item.true === item.predicted ? "correct" : `wrong, true: ${item.true}`,
        ].filter((word) => word !== null).join("; ")))));
    return el("div", { class: "scroll views", tabindex: "0", role: "region", "aria-label": block.title }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)));
  }

  const drawn = {
    text: (block) => el("p", { class: block.look || null }, block.text),
    heading: (block) => el("h3", {}, block.text),
    say: (block) => el("div", { class: block.bad ? "say warn" : "say" },
      el("p", {}, block.head ? el("strong", {}, `${block.bad ? "⚠ " : ""}${block.head} `) : null, block.text)),
    tiles: (block) => el("dl", { class: "tiles" },
      block.items.map(([name, value, ...more]) => el("div", { class: "tile" }, el("dt", {}, name),
        el("dd", {}, value, more.map((line) => el("span", { class: "beside" }, line)))))),
    table: (block) => (block.title ? el("div", { class: "titled" }, el("h3", {}, block.title), table(block.head, block.rows))
      : table(block.head, block.rows)),
    images: (block) => el("ul", { class: "images", "aria-label": block.title }, block.items.map(example)),
    views,
    pre: (block) => el("details", block.open ? { open: "" } : {}, el("summary", {}, block.summary), el("pre", {}, block.text)),
  };
  const charts = { line, matrix, bars };

  main.append(el("header", {}, el("h1", {}, data.title), el("p", { class: "soft" }, data.subtitle),
    el("nav", { class: "contents", "aria-label": "Contents" },
      data.sections.map((section) => el("a", { href: `#${section.id}` }, section.title)))));
  for (const section of data.sections) {
    const part = el("section", { id: section.id, "aria-label": section.title }, el("h2", {}, section.title));
    main.append(part);
    let pair = null; // blocks of half the width stand side by side where there is room
    for (const block of section.blocks) {
      if (!block.half) pair = null;
      else if (pair === null) part.append(pair = el("div", { class: "pair" }));
      const place = pair ?? part;
      if (charts[block.kind]) charts[block.kind](place, block);
      else place.append(drawn[block.kind](block));
    }
  }
  main.append(el("footer", { class: "note" }, data.footer));
})();
