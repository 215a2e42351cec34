"use strict";
// Draws a report from its document. Every text of it is put in as text, never as HTML.
window.treeringReport = (() => {
  const state = { search: "", sort: "nbytes", down: true, zoom: [], shown: 200 };
  const FIRST = 200, MORE = 1000, MOST_TILES = 600, WIDEST_NEST = 200;
  let doc, root, rows, damaged, colors;

  // ------------------------------------------------------------------------------------------------------- elements

  const fill = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  };
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const plain = (text) => String(text);
  const count = (number) => number.toLocaleString("en-US");
  const several = (number, thing, things = thing + "s") => `${count(number)} ${number === 1 ? thing : things}`;
  const bytes = (number) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = 0;
    while (number >= 1023.5 && step < units.length - 1) { number /= 1024; step += 1; }
    return `${step === 0 ? number : number < 9.995 ? number.toFixed(2) : number < 99.95 ? number.toFixed(1) : Math.round(number)} ${units[step]}`;
  };
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "");
  const section = (id, title, ...children) => h("section", { id, "aria-label": title }, h("h2", {}, title), ...children);

  // ----------------------------------------------------------------------------------------------------------- tree

  const newNode = (name, key, above) => ({ name, key, above, nbytes: 0, leaves: 0, children: null, row: null, mix: [] });

  const addLeaf = (key, nbytes, leaves, color, row, folded) => {
    const path = [];
    let node = root;
    for (const part of key === "" ? [] : key.split("/")) {
      path.push(node);
      node.children = node.children || new Map();
      if (!node.children.has(part)) node.children.set(part, newNode(part, node === root ? part : `${node.key}/${part}`, node));
      node = node.children.get(part);
    }
    if (folded) {
      path.push(node);
      node.children = node.children || new Map();
      const rest = newNode(`${several(leaves, "smaller leaf", "smaller leaves")}`, key, node);
      node.children.set("\u0000rest", rest);
      node = rest;
    } else node.row = row;
    for (const each of [...path, node]) {
      each.nbytes += nbytes;
      each.leaves += leaves;
      each.mix[color] = (each.mix[color] || 0) + nbytes;
    }
  };

  const build = () => {
    colors = new Map(doc.dtypes.map(([name], place) => [name, Math.min(place, 7)]));
    damaged = new Set(doc.damaged || []);
    root = newNode("", "", null);
    rows = doc.leaves.keys.map((key, place) => {
      const [dtype, detail, chunks, sharding] = doc.types[doc.leaves.types[place]];
      const nbytes = doc.leaves.nbytes[place], color = colors.get(dtype) ?? 7;
      const row = { key, dtype, detail, chunks, sharding, nbytes, color, place, bad: damaged.has(key) };
      addLeaf(key, nbytes, 1, color, row, false);
      return row;
    });
    for (const [key, leaves, nbytes] of doc.folded) addLeaf(key, nbytes, leaves, 7, null, true);
  };

  const sorted = (node) => node.order || (node.order = [...node.children.values()].sort((a, b) => b.nbytes - a.nbytes));
  const colorOf = (node) => node.mix.reduce((best, part, place) => (part > (node.mix[best] || 0) ? place : best), 7);

  // -------------------------------------------------------------------------------------------------------- treemap

  // Squarified: a row takes tiles for as long as that makes the worst of them squarer.
  const squarify = (items, x, y, w, height) => {
    const found = [];
    let rest = items.reduce((sum, item) => sum + item.nbytes, 0), at = 0;
    while (at < items.length && rest > 0 && w > 0 && height > 0) {
      const short = Math.min(w, height), scale = (w * height) / rest, first = at;
      let sum = 0, worst = Infinity;
      for (; at < items.length; at += 1) {
        const total = sum + items[at].nbytes, side = (total * scale) / short;
        const big = items[first].nbytes * scale, small = items[at].nbytes * scale;
        const ratio = Math.max(big / (side * side), (side * side) / small);
        if (ratio > worst) break;
        worst = ratio;
        sum = total;
      }
      const side = (sum * scale) / short;
      let along = 0;
      for (let place = first; place < at; place += 1) {
        const length = (items[place].nbytes * scale) / side;
        found.push(w >= height ? [items[place], x, y + along, side, length] : [items[place], x + along, y, length, side]);
        along += length;
      }
      if (w >= height) { x += side; w -= side; } else { y += side; height -= side; }
      rest -= sum;
    }
    return found;
  };

  const zoomed = () => {
    let node = root;
    for (const [place, name] of state.zoom.entries()) {
      const below = node.children && node.children.get(name);
      if (!below || !below.children) { state.zoom = state.zoom.slice(0, place); break; }
      node = below;
    }
    return node;
  };

  const describe = (node) => {
    const what = node.row ? `${node.row.dtype} ${node.row.detail}` : several(node.leaves, "leaf", "leaves");
    const parts = [node.key || "(the root)", what, bytes(node.nbytes), percent(node.nbytes, root.nbytes)];
    if (node.row && node.row.bad) parts.push("damaged");
    if (!node.row && !node.children) parts[0] = `${node.key || "(the root)"}, its ${node.name}`;
    return parts.filter(Boolean).join(" · ");
  };

  const drawTreemap = (focus) => {
    const map = document.getElementById("map"), top = zoomed();
    const width = map.clientWidth, height = map.clientHeight;
    let left = MOST_TILES;
    const place = (node, x, y, w, t, depth, target) => {
      const all = sorted(node).filter((child) => child.nbytes > 0), shown = all.slice(0, WIDEST_NEST);
      if (all.length > shown.length) {
        const rest = newNode(`${count(all.length - shown.length)} smaller`, node.key, node);
        for (const child of all.slice(WIDEST_NEST)) { rest.nbytes += child.nbytes; rest.leaves += child.leaves; }
        shown.push(rest);
      }
      for (const [child, cx, cy, cw, ch] of squarify(shown, x, y, w, t)) {
        if ((left -= 1) < 0) return;
        const nested = child.children && cw > 52 && ch > 40 && depth < 4;
        const bad = child.row ? child.row.bad : false;
        const tile = h(depth ? "div" : "button", {
          class: `tile c${colorOf(child)}${nested ? " branch" : ""}${bad ? " bad" : ""}`,
          title: describe(child),
          ...(depth ? { "aria-hidden": "true" } : { type: "button", tabindex: "-1", "aria-label": describe(child) }),
        }, cw > 34 && ch > 15 ? h("span", {}, child.name, cw > 110 && !nested && ch > 34 ? h("small", {}, bytes(child.nbytes)) : null) : null);
        Object.assign(tile.style, { left: `${cx}px`, top: `${cy}px`, width: `${Math.max(cw - 1, 1)}px`, height: `${Math.max(ch - 1, 1)}px` });
        tile.node = child;
        tile.target = target || child;
        map.append(tile);
        if (nested) place(child, cx + 3, cy + 18, cw - 7, ch - 22, depth + 1, tile.target);
      }
    };
    map.replaceChildren();
    if (top.children && top.nbytes) place(top, 0, 0, width, height, 0, null);
    else map.append(h("p", {}, "There are no bytes to draw."));
    const tiles = [...map.querySelectorAll("button")];
    const chosen = tiles.find((tile) => focus && tile.node.name === focus) || tiles[0];
    if (chosen) {
      chosen.tabIndex = 0;
      if (focus !== undefined) chosen.focus();
    }
    const crumbs = [root];
    for (const name of state.zoom) crumbs.push(crumbs.at(-1).children.get(name));
    document.getElementById("crumbs").replaceChildren(...crumbs.map((node, at) =>
      h("button", { type: "button", "aria-current": at === crumbs.length - 1 ? "location" : null, onclick: () => zoomTo(state.zoom.slice(0, at)) },
        node.name || "all leaves")));
    document.getElementById("pointed").textContent = describe(top);
  };

  const zoomTo = (path, focus = null) => { state.zoom = path; drawTreemap(focus); };

  const enter = (node) => {
    if (node.children) return zoomTo(pathOf(node));
    if (node.row) { document.getElementById("search").value = state.search = node.row.key; state.shown = FIRST; drawRows(); }
  };
  const pathOf = (node) => {
    const path = [];
    for (; node.above; node = node.above) path.unshift(node.name);
    return path;
  };

  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const moveFocus = (event) => {
    if (event.key === "Escape" && state.zoom.length) {
      event.preventDefault();
      return zoomTo(state.zoom.slice(0, -1), state.zoom.at(-1));
    }
    const way = arrows[event.key], from = event.target.closest("button");
    if (!way || !from) return;
    event.preventDefault();
    const middle = (tile) => { const box = tile.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; };
    const [x, y] = middle(from);
    let best = null, least = Infinity;
    for (const tile of document.querySelectorAll("#map button")) {
      const [tx, ty] = middle(tile), ahead = (tx - x) * way[0] + (ty - y) * way[1];
      const aside = Math.abs((tx - x) * way[1]) + Math.abs((ty - y) * way[0]);
      if (tile !== from && ahead > 0.5 && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = tile; }
    }
    if (best) { from.tabIndex = -1; best.tabIndex = 0; best.focus(); }
  };

  const treemap = () => {
    const point = (event) => {
      const tile = event.target.closest(".tile");
      if (tile) document.getElementById("pointed").textContent = describe(tile.node);
    };
    const map = h("div", {
      id: "map", role: "group", "aria-label": "Bytes by key; arrows move, Enter opens, Escape goes up",
      onkeydown: moveFocus, onpointerover: point, onfocusin: point,
      onclick: (event) => { const tile = event.target.closest(".tile"); if (tile) enter(tile.target); },
    });
    return section("treemap", "Bytes by key", h("nav", { id: "crumbs", "aria-label": "Where the map is" }), map,
      h("output", { id: "pointed" }));
  };

  const dtypes = () => {
    const whole = doc.totals.nbytes;
    const bar = h("div", { class: "stack", "aria-hidden": "true" }, doc.dtypes.filter(([, each]) => each.nbytes).map(([name, each]) => {
      const part = h("span", { class: `c${colors.get(name)}`, title: `${name}: ${each.bytes}` });
      part.style.flexGrow = each.nbytes / (whole || 1);
      return part;
    }));
    const list = doc.dtypes.map(([name, each]) => h("li", {}, h("i", { class: `dot c${colors.get(name)}`, "aria-hidden": "true" }), h("b", {}, name), " ",
      h("span", {}, [each.bytes, percent(each.nbytes, whole), several(each.leaves, "leaf", "leaves"), each.parameters ? `${each.elements} ${each.parameters === 1 ? "parameter" : "parameters"}` : ""].filter(Boolean).join(" · "))));
    return section("dtypes", "Data types", bar, h("ul", { class: "legend" }, list));
  };

  // ---------------------------------------------------------------------------------------------------------- table

  const COLUMNS = [["key", "key"], ["dtype", "dtype"], ["detail", "shape or value"], ["nbytes", "bytes"], ["chunks", "boxes"], ["sharding", "sharding"]];

  const matching = () => {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? rows.filter((row) => {
      row.text = row.text || [row.key, row.dtype, row.detail, row.sharding, row.bad ? "damaged" : ""].join(" ").toLowerCase();
      return words.every((word) => row.text.includes(word));
    }) : [...rows];
    const name = state.sort, sign = state.down ? -1 : 1;
    const order = name === "nbytes" || name === "chunks" ? (a, b) => a[name] - b[name]
      : (a, b) => (a[name] < b[name] ? -1 : a[name] > b[name] ? 1 : 0);
    return found.sort((a, b) => sign * order(a, b) || a.place - b.place);
  };

  const drawRows = () => {
    const found = matching(), most = found.reduce((top, row) => Math.max(top, row.nbytes), 1);
    const shown = found.slice(0, state.shown);
    document.querySelector("#leaves tbody").replaceChildren(...shown.map((row) => {
      const bar = h("i", { class: `c${row.color}`, "aria-hidden": "true" });
      bar.style.width = `${(100 * row.nbytes) / most}%`;
      return h("tr", { class: row.bad ? "bad" : null },
        h("th", { scope: "row" }, row.key || "(the root)", row.bad ? h("em", {}, " damaged") : null), h("td", {}, row.dtype), h("td", {}, row.detail),
        h("td", { class: "number bar" }, h("span", {}, bytes(row.nbytes)), bar),
        h("td", { class: "number" }, row.chunks > 1 ? count(row.chunks) : ""), h("td", { class: "dim" }, row.sharding));
    }));
    const sum = found.reduce((total, row) => total + row.nbytes, 0);
    const folded = doc.folded.reduce((total, each) => total + each[1], 0);
    document.getElementById("found").textContent =
      `${several(found.length, "leaf", "leaves")}, ${bytes(sum)}` + (folded ? `; ${several(folded, "smaller one")} have no row of their own` : "");
    const more = document.getElementById("more");
    more.hidden = shown.length === found.length;
    more.textContent = `Show ${count(Math.min(MORE, found.length - shown.length))} more of ${count(found.length)}`;
    for (const head of document.querySelectorAll("#leaves thead th")) {
      if (head.dataset.name === state.sort) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  };

  const leafTable = () => {
    const sortBy = (name) => () => {
      state.down = state.sort === name ? !state.down : name === "nbytes" || name === "chunks";
      state.sort = name;
      drawRows();
    };
    const heads = COLUMNS.map(([name, title]) => h("th", { scope: "col", "data-name": name, class: name === "nbytes" || name === "chunks" ? "number" : null },
      h("button", { type: "button", id: `sort-${name}`, onclick: sortBy(name) }, title)));
    return section("leaves", "Leaves",
      h("div", { class: "tools" },
        h("input", { id: "search", type: "search", placeholder: "Search keys, dtypes, shapes", "aria-label": "Search leaves", autocomplete: "off", spellcheck: "false",
          oninput: (event) => { state.search = event.target.value; state.shown = FIRST; drawRows(); } }),
        h("output", { id: "found" })),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}))),
      h("button", { id: "more", type: "button", onclick: () => { state.shown += MORE; drawRows(); } }));
  };

  // --------------------------------------------------------------------------------------------------- other tables

  const bars = (heights) => svg("svg", { class: "bars", viewBox: "0 0 128 24", role: "img", "aria-label": "histogram", preserveAspectRatio: "none" },
    heights.map((height, place) => svg("rect", { x: place * (128 / heights.length), y: 24 - (24 * height) / 99, width: 128 / heights.length - 0.6, height: (24 * height) / 99 })));

  const table = (told) => {
    const cell = (value, place) => h("td", { class: told.right.includes(place) ? "number" : null, "data-head": told.heads[place] },
      value !== null && typeof value === "object" ? bars(value.bars) : plain(value));
    const body = told.rows.length ? h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": told.title }, h("table", {},
      h("thead", {}, h("tr", {}, told.heads.map((head, place) => h("th", { scope: "col", class: told.right.includes(place) ? "number" : null }, head)))),
      h("tbody", {}, told.rows.map((row) => h("tr", {}, row.map(cell)))))) : null;
    const note = told.note ? h("p", { class: told.state ? `state ${told.state}` : null }, told.note) : null;
    return section(told.id, told.title, note, told.id === "history" ? plots() : null, body);
  };

  const plots = () => h("div", { class: "cards plots" }, doc.history.series.map(([name, values]) => plot(name, values)));

  const plot = (name, values) => {
    const write = (value) => (name === "bytes" ? bytes(value) : Number(value.toPrecision(4)).toString());
    const points = doc.history.steps.map((step, place) => [step, values[place] === null ? NaN : Number(values[place]), doc.history.kept[place]])
      .filter(([, value]) => Number.isFinite(value));
    if (!points.length) return null;
    const W = 280, H = 96, steps = points.map((each) => each[0]), all = points.map((each) => each[1]);
    const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    const x = (step) => 6 + ((W - 12) * (step - steps[0])) / (steps.at(-1) - steps[0] || 1);
    const y = (value) => (high > low ? 8 + (H - 16) * (1 - (value - low) / (high - low)) : H / 2);
    const line = svg("polyline", { points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") });
    const dots = points.length > 300 ? [] : points.map(([step, value, kept]) => svg("circle", { cx: x(step), cy: y(value), r: 3, class: kept ? "kept" : "goes" },
      svg("title", {}, `step ${step}: ${write(value)}${kept ? "" : ", goes"}`)));
    return h("figure", {}, h("figcaption", {}, h("b", {}, name), h("span", {}, `last ${write(all.at(-1))}`)),
      svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "plot", role: "img", "aria-label": `${name} from ${write(all[0])} to ${write(all.at(-1))}` },
        svg("line", { x1: 0, x2: W, y1: H - 1, y2: H - 1 }), line, dots),
      h("p", { class: "axis" }, h("span", {}, `step ${count(steps[0])}`), h("span", {}, `${write(low)} to ${write(high)}`), h("span", {}, count(steps.at(-1)))));
  };

  // ---------------------------------------------------------------------------------------------------------- splits

  // "P('data', None) over data=4, model=2" -> the mesh axes, and for each axis of the array the mesh axes that cut it.
  const parseSharding = (text) => {
    const found = /^P\((.*)\) over ((?:[\w.-]+=\d+(?:, )?)+)$/.exec(text);
    if (!found) return null;
    const axes = [...found[2].matchAll(/([\w.-]+)=(\d+)/g)].map((each) => [each[1], Number(each[2])]);
    const spec = [...found[1].matchAll(/None|'([^']*)'|\(([^)]*)\)/g)].map((each) =>
      each[2] !== undefined ? [...each[2].matchAll(/'([^']*)'/g)].map((one) => one[1]) : each[1] !== undefined ? [each[1]] : []);
    return spec.flat().every((name) => axes.some((axis) => axis[0] === name)) ? { axes, spec } : null;
  };

  const starts = (way, axis) => [...new Set(way.boxes.map((box) => box[2 * axis]))].sort((a, b) => a - b);

  const drawArray = (way) => {
    const axes = way.shape.map((_, axis) => axis), cuts = axes.map((axis) => starts(way, axis).length);
    const two = [...axes].sort((a, b) => cuts[b] - cuts[a] || way.shape[b] - way.shape[a]).slice(0, 2).sort((a, b) => a - b);
    const [down, right] = two.length === 2 ? two : [null, two[0]];
    const others = axes.filter((axis) => !two.includes(axis));
    const rowsLong = down === null ? 1 : way.shape[down], W = 220;
    const H = down === null ? 36 : Math.min(Math.max((W * rowsLong) / way.shape[right], 56), 170);
    const shown = way.boxes.map((box, place) => [box, place]).filter(([box]) => others.every((axis) => box[2 * axis] === 0));
    const tiles = shown.map(([box, place]) => {
      const left = (W * box[2 * right]) / way.shape[right], width = (W * box[2 * right + 1]) / way.shape[right] - left;
      const top = down === null ? 0 : (H * box[2 * down]) / rowsLong, height = down === null ? H : (H * box[2 * down + 1]) / rowsLong - top;
      const who = way.writers.length ? way.writers[place] : place;
      const range = axes.map((axis) => `${box[2 * axis]}:${box[2 * axis + 1]}`).join(", ");
      return svg("g", {}, svg("rect", { x: left + 0.75, y: top + 0.75, width: Math.max(width - 1.5, 0.5), height: Math.max(height - 1.5, 0.5), rx: 2, class: `c${who % 8}` }),
        width > 22 && height > 13 ? svg("text", { x: left + width / 2, y: top + height / 2 + 4 }, plain(who)) : null,
        svg("title", {}, `[${range}]${way.writers.length ? `, written by process ${who}` : ""}`));
    });
    const more = others.filter((axis) => cuts[axis] > 1).map((axis) => `axis ${axis} is cut into ${cuts[axis]} as well`);
    const label = down === null ? `axis ${right}` : `axis ${down} down, axis ${right} to the right`;
    return [svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "boxes", role: "img", "aria-label": `${way.boxes.length} boxes of ${JSON.stringify(way.shape)}` }, tiles),
      h("p", { class: "axis" }, h("span", {}, [label, ...more].join("; ")))];
  };

  // Which box each device of the mesh holds: a box that several hold is a copy.
  const drawMesh = (way) => {
    const parsed = parseSharding(way.sharding);
    if (!parsed || way.writers.length) return null;
    const { axes, spec } = parsed, size = axes.reduce((product, axis) => product * axis[1], 1);
    if (size > 256) return null;
    const cuts = way.shape.map((_, axis) => starts(way, axis));
    const cells = Array.from({ length: size }, (_, device) => {
      const at = {};
      for (let left = device, place = axes.length - 1; place >= 0; place -= 1) { at[axes[place][0]] = left % axes[place][1]; left = Math.floor(left / axes[place][1]); }
      const begins = way.shape.map((_, axis) => cuts[axis][(spec[axis] || []).reduce((part, name) => part * axes.find((each) => each[0] === name)[1] + at[name], 0)]);
      return way.boxes.findIndex((box) => begins.every((begin, axis) => box[2 * axis] === begin));
    });
    if (cells.includes(-1)) return null;
    const across = axes.at(-1)[1], lines = size / across, W = 220, side = Math.min(W / across, 26), tall = Math.min(side, 22);
    const drawn = cells.map((box, device) => {
      const left = (device % across) * side, top = Math.floor(device / across) * tall;
      return svg("g", {}, svg("rect", { x: left + 1, y: top + 1, width: side - 2, height: tall - 2, rx: 3, class: `c${box % 8}` }),
        side > 17 ? svg("text", { x: left + side / 2, y: top + tall / 2 + 4 }, plain(box)) : null, svg("title", {}, `device ${device} holds box ${box}`));
    });
    const named = axes.map(([name, length]) => `${name} ${length}`).join(" × ");
    return [svg("svg", { viewBox: `0 0 ${W} ${lines * tall}`, class: "boxes", role: "img", "aria-label": `the mesh, ${named}` }, drawn),
      h("p", { class: "axis" }, h("span", {}, `mesh ${named}: the box of each device`))];
  };

  const splits = () => section("splits", "How arrays are split", h("p", { class: "dim" },
    "Each card is one way of cutting an array, drawn to scale; those with the most bytes come first."),
  h("div", { class: "cards" }, doc.splits.map((way) => h("figure", {},
    h("figcaption", {}, h("b", {}, `[${way.shape.join(", ")}]`), h("span", {}, several(way.boxes.length, "box", "boxes"))),
    way.sharding ? h("p", { class: "code" }, way.sharding) : null, drawArray(way), drawMesh(way),
    h("p", { class: "dim" }, `${several(way.leaves, "leaf", "leaves")}, ${way.bytes}, such as `, h("code", {}, way.example))))));

  // ------------------------------------------------------------------------------------------------------------ page

  const head = () => {
    const totals = doc.totals;
    const facts = [["bytes of leaves", totals.bytes], ["parameters", totals.elements], ["leaves", count(totals.leaves)], ["bytes of files", bytes(totals.file_bytes)]];
    if (doc.step !== null) facts.unshift(["step", count(doc.step)]);
    const found = doc.tables.find((each) => each.id === "verification");
    return [h("header", {}, h("p", { class: "brand" }, "treering report"), h("h1", {}, doc.path),
      h("p", { class: "dim" }, `${doc.form} · made ${doc.made} by ${doc.by}`),
      found ? h("p", { class: `badge ${found.state}` }, found.title) : null),
    h("section", { id: "totals", "aria-label": "Totals" }, h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))))];
  };

  const about = () => section("about", "About", h("dl", { class: "notes" }, doc.notes.map(([label, text]) => [h("dt", {}, label), h("dd", {}, text)])));

  const show = (document_) => {
    const scroll = [window.scrollX, window.scrollY], active = document.activeElement, kept = active && active.id;
    const caret = kept === "search" ? [active.selectionStart, active.selectionEnd] : null;
    const focused = active && active.node ? active.node.name : undefined;
    doc = document_;
    build();
    const of = (id) => doc.tables.filter((each) => each.id === id).map(table);
    document.getElementById("report").replaceChildren(...[head(), of("verification"), treemap(), dtypes(), doc.history ? of("history") : [],
      of("changes"), of("statistics"), doc.splits.length ? splits() : [], leafTable(), doc.notes.length ? about() : []].flat());
    document.getElementById("search").value = state.search;
    drawTreemap(focused);
    drawRows();
    if (kept && document.getElementById(kept)) document.getElementById(kept).focus({ preventScroll: true });
    if (caret) document.getElementById("search").setSelectionRange(...caret);
    window.scrollTo(...scroll);
  };

  const start = async () => {
    const text = atob(document.getElementById("data").textContent), packed = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) packed[at] = text.charCodeAt(at);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    show(await new Response(stream).json());
    performance.mark("drawn");
    let width = window.innerWidth;
    window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawTreemap(); } });
    // When the first frame with all of it was drawn, in milliseconds from the navigation on.
    return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))));
  };
  const ready = start();
  return { show, ready };
})();
