// The page's behavior: charts, and the table of all candidates to filter, hover and compare. Words go in as text only.
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const make = (tag, words, attributes) => {
    const made = document.createElement(tag);
    if (words !== undefined) made.textContent = words;
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    return made;
  };
  const digits = (x, n) => Number(x.toPrecision(n)).toString();
  const seconds = (x) => (x >= 1 ? `${digits(x, 4)} s` : `${digits(1e3 * x, 4)} ms`);
  const percent = (x) => `${digits(100 * x, Math.abs(x) < 0.1 ? 2 : 3)}%`;
  const views = (window.reportViews = {}); // by the names of the charts

  // Tables beside charts are open without scripts, and closed with them.
  for (const closed of document.querySelectorAll("details.beside")) closed.open = false;
  for (const hidden of document.querySelectorAll(".scripted")) hidden.hidden = false;

  const draw = async (place) => {
    const name = place.dataset.chart, spec = report.charts[name];
    const large = name === "candidates" || JSON.stringify(spec.data).length > 150000;
    const options = { actions: false, renderer: large ? "canvas" : "svg", tooltip: { theme: "custom" } };
    if (name === "candidates") spec.data.values = drawn();
    const { view } = await vegaEmbed(place, spec, options);
    views[name] = view;
    for (const button of document.querySelectorAll(`button[data-of="${name}"]`))
      button.addEventListener("click", () => zoom(view, name === "step" ? "zoom_begin" : "zoom_seconds", button.dataset));
  };

  // Buttons do what dragging and the wheel do, for keyboards and fingers.
  const zoom = (view, signal, { factor, shift }) => {
    const [low, high] = view.scale("x").domain(), middle = (low + high) / 2, half = (high - low) / 2;
    const at = middle + 2 * half * Number(shift || 0), wide = half * Number(factor || 1);
    view.signal(signal, factor === "0" ? null : [at - wide, at + wide]).runAsync();
  };

  // --- Candidates -----------------------------------------------------------------------------------------------------

  const table = report.candidates, last = table.seconds.length;
  const value = (column, i) => column.values[column.codes[i]];
  const settings = (i) => table.columns.map((column) => [column.label, value(column, i)]);
  const asked = (i) => {
    const own = Object.fromEntries(table.columns.map((column) => [column.name, value(column, i)]));
    const parts = [];
    for (const column of table.columns) {
      let word = value(column, i);
      if (!column.flag || (column.name === "chunks" && word === "1")) continue;
      if (column.name === "backward_rank" && own.backward === "none") continue;
      if (column.name === "data_rank" && word === "0") continue;
      if (column.name === "schedule") word = word.split(":")[0];
      parts.push(`--${column.flag}=${word}`);
    }
    const kinds = [];
    if (own.backward && own.backward !== "none") kinds.push(own.backward);
    if (own.data_rank && own.data_rank !== "0") kinds.push("data");
    if (own.backward || own.data_rank) parts.push(`--compress=${kinds.join(",") || "none"}`);
    return `${table.command} ${parts.join(" ")}`;
  };
  const sizes = (i) => table.columns.slice(0, 3).map((column) => value(column, i)).join("x");
  const plan = (i) => `${sizes(i)} ` + settings(i).slice(3)
    .filter(([label, word]) => word !== "0" && word !== "no" && !(label === "virtual stages" && word === "1"))
    .map(([label, word]) => `${label} ${word}`).join(", ");
  const took = (i) => {
    const words = seconds(table.seconds[i]), known = table.details[i];
    if (!table.state[i]) return `${words} at least (lower bound, not simulated)`;
    if (table.state[i] < 2) return `${words} (devices in order, not placed)`;
    return known && known.low ? `${words} (${seconds(known.low)} to ${seconds(known.high)} with 80%)` : words;
  };
  const memory = (i) => {
    const over = table.mb[i] / 1e3 - table.limit;
    const words = `${digits(table.mb[i] / 1e3, 3)} GB`;
    return over > 1e-3 ? `${words}, does not fit, ${digits(over, 3)} GB too much` : words;
  };
  const termsOf = (i) => {
    const known = table.details[i];
    if (!known) return table.state[i] ? "not told for this one; the best of its mesh has them" : "only a lower bound is known";
    const parts = known.terms.map((x, n) => [x, table.terms[n]]).filter(([x]) => x > 5e-4 * known.seconds);
    return parts.map(([x, name]) => `${name} ${seconds(x)}`).join(", ");
  };

  const filters = {};
  let limit = Infinity, colored = "state", chosen = [], matching = [];
  const row = (i) => {
    const known = table.details[i] || {}, state = table.states[table.state[i]];
    const column = table.columns.find((one) => one.name === colored);
    return {
      i, state, seconds: table.seconds[i], gb: table.mb[i] / 1e3, low: known.low, high: known.high,
      shown: column ? value(column, i) : state, plan: plan(i), step: took(i), said: memory(i),
      why: termsOf(i), run: asked(i),
    };
  };
  const fits = (i) => {
    if (table.seconds[i] === null || table.mb[i] / 1e3 > limit) return false;
    return table.columns.every((column) => filters[column.name] === undefined || filters[column.name] === column.codes[i]);
  };

  // The rows that match; what is drawn last lies on top.
  const drawn = () => {
    matching = [];
    for (let i = 0; i < last; i++) if (fits(i)) matching.push(i);
    return [...matching].sort((a, b) => table.state[a] - table.state[b]).map(row);
  };
  const refresh = () => {
    views.candidates.data("candidates", drawn()).runAsync();
    tell();
  };
  const tell = () => {
    const count = (state) => matching.filter((i) => table.state[i] >= state).length;
    const inside = matching.filter((i) => table.mb[i] / 1e3 <= table.limit);
    const number = (x) => x.toLocaleString("en-US");
    const words = `${number(matching.length)} of ${number(last)} candidates: ${number(inside.length)} fit in memory, ` +
      `${number(count(1))} were simulated, ${number(count(2))} are ranked.`;
    document.getElementById("count").textContent = words;
    // The search takes those for slow: some like them, with other settings alike in effect, were slower when simulated.
    const best = Math.min(...inside.filter((i) => table.state[i]).map((i) => table.seconds[i]));
    const open = inside.filter((i) => !table.state[i] && table.seconds[i] < best).map((i) => table.seconds[i]);
    document.getElementById("open").textContent = !open.length ? "" : `Of those that fit, ${number(open.length)} were not ` +
      `simulated, though their bounds, from ${seconds(Math.min(...open))} on, lie below all that were: some like them are ` +
      "slower than the chosen plan. Planned again with flags for these, the search simulates the best of them.";
    list();
  };

  // The quickest of those that match: simulated ones first, since others are only bounded.
  const list = () => {
    const body = document.querySelector("#quickest tbody");
    const order = (i) => (table.mb[i] / 1e3 > table.limit ? 2 : table.state[i] ? 0 : 1);
    const quickest = [...matching].sort((a, b) => order(a) - order(b) || table.seconds[a] - table.seconds[b]).slice(0, 10);
    body.replaceChildren(...quickest.map((i) => {
      const line = make("tr", undefined, { "data-i": i });
      const at = chosen.indexOf(i), cell = make("td");
      const told = { "aria-label": `compare ${plan(i)}`, "aria-pressed": at >= 0 };
      const button = make("button", at < 0 ? "compare" : `is ${"AB"[at]}`, told);
      button.addEventListener("click", () => choose(i));
      cell.append(button);
      line.append(cell, ...[plan(i), took(i), memory(i)].map((words) => make("td", words, { class: "words" })));
      return line;
    }));
  };

  const choose = (i) => {
    chosen = chosen.includes(i) ? chosen.filter((other) => other !== i) : [...chosen, i].slice(-2);
    const held = document.activeElement?.closest("#quickest");
    list();
    if (held) document.querySelector(`#quickest tr[data-i="${i}"] button`)?.focus(); // it is another button now
    compare();
  };

  const reason = (a, b) => {
    const [ta, tb] = [a, b].map((i) => table.seconds[i]);
    const [quick, slow, names] = ta <= tb ? [a, b, "AB"] : [b, a, "BA"];
    const least = table.seconds[slow], most = table.seconds[quick];
    const head = `${names[0]} is quicker than ${names[1]} by ${percent(least / most - 1)} of its step` +
      (table.state[quick] > 1 && table.state[slow] === 1 ? `, placed beside ${names[1]} with devices in order` : "");
    if (!table.state[quick]) return `Only a lower bound of ${names[0]} is known, ${seconds(most)}: it takes that or longer.`;
    if (!table.state[slow]) return `${head}, or by more: of ${names[1]} only a lower bound is known.`;
    const [one, other] = [table.details[quick], table.details[slow]];
    if (!one || !other) return `${head}. The terms of both are not known; the best of each mesh has them.`;
    const parts = table.terms.map((name, n) => [(other.terms[n] - one.terms[n]) / one.seconds, name]);
    const told = parts.filter(([x]) => Math.abs(x) >= 5e-4).sort(([x], [y]) => Math.abs(y) - Math.abs(x));
    const words = told.map(([x, name]) => `${percent(Math.abs(x))} ${x > 0 ? "more" : "less"} ${name}`);
    return `${head}: of this step ${names[1]} has ${words.join(", ") || "the same terms"}.`;
  };

  const compare = () => {
    const place = document.getElementById("compared");
    place.replaceChildren();
    if (!chosen.length) return;
    if (chosen.length === 1) place.append(make("p", `A: ${plan(chosen[0])}. Choose another one to compare it with.`));
    const [a, b] = chosen;
    if (b !== undefined) place.append(make("p", reason(a, b), { class: "note", id: "reason" }));
    const grid = make("table"), lines = [["", ..."AB".slice(0, chosen.length)], ["step", ...chosen.map(took)]];
    lines.push(["memory", ...chosen.map(memory)]);
    settings(a).forEach(([label], n) => {
      const words = chosen.map((i) => settings(i)[n][1]);
      if (chosen.length === 1 || words[0] !== words[1]) lines.push([label, ...words]);
    });
    const known = chosen.map((i) => table.details[i]);
    table.terms.forEach((name, n) => {
      if (known.some((one) => one && one.terms[n] > 0))
        lines.push([name, ...known.map((one) => (one ? seconds(one.terms[n]) : "not known"))]);
    });
    if (known.some(Boolean)) lines.push(["layers and codecs", ...known.map((one) => (one ? one.words : "not known"))]);
    lines.push(["planned again by", ...chosen.map(asked)]);
    lines.forEach((cells, n) => {
      const line = make("tr");
      cells.forEach((words, k) => line.append(make(n && k ? "td" : "th", words, { class: n > 2 || k ? "words long" : "words" })));
      grid.append(line);
    });
    const scroll = make("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": "comparison" });
    scroll.append(grid);
    place.append(scroll);
  };

  const control = (label, inner) => {
    const whole = make("label", label);
    whole.append(inner);
    document.getElementById("filters").append(whole);
  };
  const select = (label, name, options, changed) => {
    const box = make("select", undefined, { name });
    for (const [key, words] of options) box.append(make("option", words, { value: key }));
    box.addEventListener("change", () => { changed(box.value); refresh(); });
    control(label, box);
  };
  const interact = () => {
    for (const column of table.columns)
      if (column.values.length > 1)
        select(column.label, column.name, [["", "any"], ...column.values.map((word, n) => [n, word])],
          (key) => { filters[column.name] = key === "" ? undefined : Number(key); });
    const box = make("input", undefined, { name: "limit", type: "number", min: "0", step: "any", placeholder: "any" });
    box.addEventListener("input", () => { limit = box.value === "" ? Infinity : Number(box.value); refresh(); });
    control("at most, GB with the margin", box);
    const colors = [["state", "what is known"], ...table.columns.filter((c) => c.values.length > 1).map((c) => [c.name, c.label])];
    select("color by", "color", colors, (name) => { colored = name; });
    views.candidates.addEventListener("click", (_, item) => {
      if (item && item.datum && item.datum.i !== undefined) choose(item.datum.i);
    });
    tell();
  };

  (async () => {
    for (const place of document.querySelectorAll("[data-chart]")) await draw(place);
    if (table && views.candidates) interact();
    document.documentElement.dataset.ready = "yes";
  })();
})();
