// The live page: a list of runs, the curves of those that are chosen, drawn by charts.js. Text of a run is only
// ever set as text. What is chosen stands in the address (?run=NAME&run=NAME), so that a page can be kept.
"use strict";

(() => {
  const { el, line, show, table } = ssflCharts;
  const MOST = 8; // as many as charts tell apart
  const LIST_EVERY = 3000, CURVES_EVERY = 1000;
  const byId = (id) => document.getElementById(id);
  let chosen = [], runs = [], shown = { key: "", charts: [] }, descriptions = new Map(), drawn = "", listed = "", loaded = false;

  // One run: these curves together, by the first name. Several runs: a chart for each curve, by the second.
  const CHARTS = [
    { title: "Accuracy", yLabel: "accuracy", format: "percent", range: [0, 1],
      curves: { accuracy: ["test images", "Test accuracy"], validation_accuracy: ["validation images", "Validation accuracy"] } },
    { title: "Pseudo-labels", yLabel: "share", format: "percent", range: [0, 1],
      curves: { mask_rate: ["confident (mask rate)", "Mask rate: confident pseudo-labels"],
        pseudo_accuracy: ["correct, of the confident", "Confident pseudo-labels that are correct"] } },
    { title: "Loss", yLabel: "loss", format: "number", curves: { loss: ["users", "Users' loss"], server_loss: ["server", "Server's loss"] } },
    { title: "Gradient diversity", yLabel: "diversity (Definition 1)", format: "number", log: true,
      curves: { diversity: ["all participants", "Gradient diversity"] } },
    { title: "Time of a round", yLabel: "seconds", format: "seconds", curves: { seconds: ["training", "Time of a round"] } },
  ];

  function ago(seconds) {
    if (seconds === null) return "–";
    const steps = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [Infinity, 86400, "d"]];
    const [, unit, name] = steps.find(([most]) => seconds < most);
    return `${Math.floor(seconds / unit)} ${name} ago`;
  }

  async function get(path) {
    const answer = await fetch(path, { signal: AbortSignal.timeout(20000) });
    return answer.ok ? answer.json() : { missing: (await answer.text()).trim() };
  }

  // The list

  function choose(names, keep) {
    chosen = [...new Set(names)].slice(0, MOST);
    const query = new URLSearchParams(chosen.map((name) => ["run", name])).toString();
    if (keep) history.pushState(null, "", query ? `/?${query}` : "/");
    descriptions = new Map([...descriptions].filter(([name]) => chosen.includes(name)));
    drawList();
    refresh();
  }

  function row(run) {
    const on = chosen.includes(run.name);
    const box = el("input", { type: "checkbox", "aria-label": `compare ${run.name}` });
    box.checked = on;
    box.disabled = !on && chosen.length >= MOST;
    box.addEventListener("change", () =>
      choose(box.checked ? [...chosen, run.name] : chosen.filter((name) => name !== run.name), true));
    const name = el("button", { type: "button", title: "show only this run" }, run.name);
    name.addEventListener("click", () => choose([run.name], true));
    const rounds = run.rounds ? `${show("count", run.round ?? 0)} / ${show("count", run.rounds)}` : show("count", run.round);
    const bar = run.state === "running" && run.rounds
      ? el("progress", { max: run.rounds, value: run.round ?? 0, "aria-label": "rounds played" }) : null;
    const about = [run.method, run.data].filter(Boolean).join(" on ");
    return el("tr", { class: on ? "chosen" : null },
      el("td", {}, box), el("th", { scope: "row" }, name, el("span", { class: "more" }, about)),
      el("td", {}, el("span", { class: `state ${run.state}` }, run.state), bar),
      el("td", { class: "number" }, rounds), el("td", { class: "number" }, accuracyCell(run)),
      el("td", { class: "number wide" }, ago(run.age)));
  }

  function accuracy(run) { // where the test images come last, that of validation images until then
    const early = run.accuracy === null && run.validation !== null;
    const [correct, count] = early ? [run.validation_correct, run.validation_count] : [run.correct, run.count];
    const of = count ? `${show("count", correct)} of ${show("count", count)}` : null;
    const kind = early ? "validation" : run.folds ? "folds" : null;
    return { value: show("percent", early ? run.validation : run.accuracy), of, kind,
      interval: early ? run.validation_interval : run.interval };
  }
  function accuracyCell(run) {
    const score = accuracy(run), more = [score.of, score.kind].filter(Boolean).join(", ");
    return [score.value, more ? el("span", { class: "more" }, more) : null];
  }

  function drawList() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (run) => words.every((word) => `${run.name} ${run.method} ${run.data} ${run.state}`.toLowerCase().includes(word));
    const matching = runs.filter(fits), focus = document.activeElement;
    const now = JSON.stringify([matching.map((run) => ({ ...run, age: ago(run.age) })), chosen, runs.length, loaded]);
    if (now === listed) return; // nothing moves under a reader's hand without need
    listed = now;
    const spot = byId("list").contains(focus) ? [focus.closest("tr")?.dataset.run, focus.tagName] : null;
    const rows = matching.map((run) => { const made = row(run); made.dataset.run = run.name; return made; });
    const head = ["", "run", "state", { text: "round", number: true }, { text: "accuracy", number: true },
      { text: "last event", number: true, wide: true }];
    const top = el("tr", {}, head.map((cell) => el("th", { scope: "col",
      class: [cell.number && "number", cell.wide && "wide"].filter(Boolean).join(" ") || null }, cell.text ?? cell)));
    byId("list").replaceChildren(el("table", {}, el("thead", {}, top), el("tbody", {}, rows)));
    if (spot) rows.find((one) => one.dataset.run === spot[0])?.querySelector(spot[1].toLowerCase())?.focus();
    byId("hint").textContent = runs.length === 0 && loaded ? "There are no runs yet. Start one with `ssfl run`; it appears here automatically."
      : matching.length === 0 && loaded ? "No run matches the filter." : `Select up to ${MOST} runs to compare them.`;
  }

  // What is chosen

  function specs(selected) { // the charts to draw, each with a key that stays the same as long as its lines do
    const rounds = Math.max(1, ...selected.map((run) => run.rounds ?? 0)), made = [];
    const played = Math.max(8, ...selected.map((run) => run.round ?? 0));
    const end = Math.min(rounds, 2 ** Math.ceil(Math.log2(played))); // a young run is seen large, and seldom rescaled
    const base = (chart) => ({ ...chart, xLabel: "round", xRange: [0, end], height: 240 });
    for (const chart of CHARTS) {
      if (selected.length === 1) {
        const series = Object.entries(chart.curves).filter(([curve]) => selected[0].curves[curve]?.length)
          .map(([curve, [name]], look) => ({ name, points: selected[0].curves[curve], look }));
        if (series.length) made.push({ ...base(chart), series });
        continue;
      }
      for (const [curve, [, title]] of Object.entries(chart.curves)) {
        const series = selected.map((run, look) => ({ name: run.name, points: run.curves[curve] ?? [], look }))
          .filter((one) => one.points.length);
        if (series.length) made.push({ ...base(chart), title, series });
      }
    }
    return made;
  }

  function drawCharts(selected) {
    const wanted = specs(selected), key = JSON.stringify([chosen, wanted.map((spec) => spec.title)]);
    if (key === shown.key) {
      wanted.forEach((spec, k) => shown.charts[k].update(spec));
      return;
    }
    byId("charts").replaceChildren();
    shown = { key, charts: wanted.map((spec) => line(byId("charts"), spec)) };
  }

  function tiles(run) {
    const score = accuracy(run), percent = (share) => (100 * share).toFixed(1);
    const of = [score.of, score.interval && `95 % interval ${score.interval.map(percent).join(" to ")} %`].filter(Boolean);
    const facts = [["state", run.state], ["round", `${show("count", run.round ?? 0)} of ${show("count", run.rounds)}`],
      [score.kind ? `accuracy (${score.kind})` : "accuracy", score.value, ...of], ["method", run.method], ["data", run.data]];
    if (run.left !== null) facts.push(["time left, about", show("seconds", Math.max(1, Math.round(run.left)))]);
    return el("dl", { class: "tiles" }, facts.map(([name, value, ...more]) => el("div", { class: "tile" }, el("dt", {}, name),
      el("dd", {}, value || "–", more.map((line) => el("span", { class: "beside" }, line))))));
  }

  function drawAbout(selected, missing) {
    const title = selected.length === 1 ? selected[0].name : selected.length ? `${selected.length} runs compared` : "";
    byId("detail-title").textContent = title || (runs.length ? "Choose a run" : "");
    document.title = title ? `${title} – ssfl board` : "ssfl board";
    const parts = [];
    for (const name of missing) parts.push(el("p", { class: "say warn" }, `${name} no longer exists.`));
    for (const run of selected) {
      if (run.error) parts.push(el("p", { class: "say warn" }, el("strong", {}, `${run.name} failed: `), run.error));
      if (run.damaged) parts.push(el("p", { class: "say warn" }, `${run.name}: its events.jsonl is damaged; only the events before the damage are shown.`));
      if (run.verdict) parts.push(el("p", { class: "say" }, selected.length > 1 ? el("strong", {}, `${run.name}: `) : null, run.verdict));
      if (run.state === "stopped") parts.push(el("p", { class: "note" }, `${run.name} was stopped; continue it with \`ssfl resume\`.`));
    }
    if (selected.length === 1) parts.push(tiles(selected[0]));
    if (selected.length) {
      const query = new URLSearchParams(selected.map((run) => ["run", run.name]));
      const what = selected.length === 1 ? "Report of this run" : `Report of these ${selected.length} runs`;
      parts.push(el("p", {}, el("a", { class: "action", href: `/report?${query}`, target: "_blank", rel: "noopener" }, what),
        el("span", { class: "note" }, "opens in a new tab; this takes a few seconds")));
    }
    byId("about").replaceChildren(...parts);
  }

  function drawSettings(selected) {
    const keys = [...new Set(selected.flatMap((run) => Object.keys(run.settings)))];
    const value = (run, key) => run.settings[key] ?? "–";
    const open = byId("settings").querySelector("details")?.open;
    const rows = selected.length === 1 ? keys.map((key) => [key, value(selected[0], key)])
      : keys.filter((key) => new Set(selected.map((run) => value(run, key))).size > 1)
        .map((key) => [key, ...selected.map((run) => value(run, key))]);
    const inner = rows.length ? table(["setting", ...(selected.length === 1 ? ["value"] : selected.map((run) => run.name))], rows)
      : el("p", {}, "The settings are the same.");
    const details = el("details", {}, el("summary", {}, selected.length === 1 ? "Settings" : "Settings that differ"), inner);
    details.open = open ?? selected.length > 1;
    byId("settings").replaceChildren(...(selected.length ? [details] : []));
  }

  function draw() {
    const selected = chosen.map((name) => descriptions.get(name)).filter((run) => run && !run.missing);
    const missing = chosen.filter((name) => descriptions.get(name)?.missing);
    const now = JSON.stringify([chosen, selected.map((run) => ({ ...run, age: 0 })), missing]);
    if (now === drawn) return;
    drawn = now;
    drawAbout(selected, missing);
    drawCharts(selected);
    drawSettings(selected);
  }

  async function refresh() {
    const wanted = chosen.filter((name) => descriptions.get(name)?.state !== "finished");
    const answers = await Promise.all(wanted.map(async (name) => [name, await get(`/run?${new URLSearchParams({ name })}`)]));
    for (const [name, run] of answers) if (chosen.includes(name)) descriptions.set(name, run);
    draw();
  }

  // The clock

  function every(pause, work) { // repeats the work while the page is visible; after an error it shows the error and tries again
    const turn = async () => {
      try {
        if (!document.hidden) await work();
        trouble("");
      } catch (error) {
        trouble(`The board does not answer (${error.message}); trying again. Is \`ssfl board\` still running?`);
      }
      setTimeout(turn, pause);
    };
    turn();
  }
  function trouble(text) {
    const place = byId("trouble");
    if (place.textContent === text) return;
    place.textContent = text;
    place.hidden = !text;
  }

  const fromAddress = () => new URLSearchParams(location.search).getAll("run").slice(0, MOST);
  window.addEventListener("popstate", () => choose(fromAddress(), false));
  byId("filter").addEventListener("input", drawList);
  chosen = fromAddress();
  every(LIST_EVERY, async () => {
    const answer = await get("/runs");
    byId("folder").textContent = answer.folder;
    runs = answer.runs;
    const first = !loaded;
    loaded = true;
    if (first && !chosen.length && runs.length) {
      choose([(runs.find((run) => run.state === "running") ?? runs[0]).name], false);
    } else drawList();
  });
  every(CURVES_EVERY, refresh);
})();
