"use strict";
(function () {
  const WIDTH = 1200, PAD = 10, LETTER = 7;
  const byId = (id) => document.getElementById(id);
  const frames = Array.from(document.querySelectorAll("#frames > .f")).map((g) => ({
    g: g,
    rect: g.querySelector("rect"),
    text: g.querySelector("text"),
    title: g.querySelector("title").textContent,
    name: g.dataset.n,
    x: Number(g.dataset.x),
    w: Number(g.dataset.w),
    d: Number(g.dataset.d),
  }));
  const NEAR = 1e-7;
  let term = "";

  function label(name, width) {
    const room = Math.floor((width - 6) / LETTER);
    if (name.length <= room) return name;
    return room < 3 ? "" : name.slice(0, room - 2) + "..";
  }

  // Shows the frame `to` in the whole width, with its callers below and its callees above.
  function zoom(to) {
    const scale = (WIDTH - 2 * PAD) / to.w;
    for (const f of frames) {
      const caller = f.d < to.d && f.x <= to.x + NEAR && f.x + f.w >= to.x + to.w - NEAR;
      const callee = f.d >= to.d && f.x >= to.x - NEAR && f.x + f.w <= to.x + to.w + NEAR;
      f.g.classList.toggle("hide", !caller && !callee);
      f.g.classList.toggle("dim", caller);
      const x = caller ? PAD : PAD + (f.x - to.x) * scale;
      const width = caller ? WIDTH - 2 * PAD : f.w * scale;
      f.rect.setAttribute("x", x);
      f.rect.setAttribute("width", width);
      f.text.setAttribute("x", x + 3);
      f.text.textContent = label(f.name, width);
    }
    byId("reset").classList.toggle("hide", to.d === 0);
  }

  // Marks the frames whose names contain `wanted`, and shows their share. Nested frames count once.
  function search(wanted) {
    term = wanted;
    const found = [];
    for (const f of frames) {
      const is = wanted !== "" && f.name.toLowerCase().includes(wanted.toLowerCase());
      f.g.classList.toggle("found", is);
      if (is) found.push(f);
    }
    found.sort((a, b) => a.x - b.x || b.w - a.w);
    let end = -1, share = 0;
    for (const f of found) {
      if (f.x >= end - NEAR) {
        share += f.w;
        end = f.x + f.w;
      }
    }
    byId("matched").textContent = wanted === "" ? " " : "Matched: " + (100 * share).toFixed(2) + "%";
    byId("search").textContent = wanted === "" ? "Search" : "Clear search";
  }

  function ask() {
    if (term !== "") return search("");
    const wanted = prompt("Part of a function's name:", "");
    if (wanted) search(wanted);
  }

  const root = frames.find((f) => f.d === 0);
  for (const f of frames) {
    f.g.addEventListener("click", () => zoom(f));
    f.g.addEventListener("mouseover", () => { byId("details").textContent = f.title; });
    f.g.addEventListener("mouseout", () => { byId("details").textContent = " "; });
  }
  byId("reset").addEventListener("click", () => root && zoom(root));
  byId("search").addEventListener("click", ask);
  addEventListener("keydown", (event) => {
    if (event.key === "f" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    } else if (event.key === "Escape") {
      search("");
      if (root) zoom(root);
    }
  });
})();
