// Live parts, times, the list, and the log. Text from jobs arrives as escaped markup of the server, never as code.
"use strict";
const ddpMake = (tag, values, ...children) => {
  const element = Object.assign(document.createElement(tag), values);
  element.append(...children);
  return element;
};
{
  const find = (id) => document.getElementById(id);
  const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto", style: "short" });
  const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
  const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

  function describe(moment) {
    const seconds = (moment - Date.now()) / 1000;
    if (Math.abs(seconds) < 60) return relative.format(Math.round(seconds), "second");
    if (Math.abs(seconds) < 3600) return relative.format(Math.round(seconds / 60), "minute");
    if (Math.abs(seconds) < 86400) return relative.format(Math.round(seconds / 3600), "hour");
    return day.format(moment);
  }

  function showTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const moment = new Date(element.dateTime);
      if (Number.isNaN(moment.getTime())) continue;
      const text = element.hasAttribute("data-clock") ? clock.format(moment) : describe(moment);
      if (element.textContent !== text) element.textContent = text;
      if (!element.title) element.title = exact.format(moment);
    }
  }

  // What the user has opened or sorted stays when a part is drawn again.
  function keep(name, node) {
    return !(name === "open" && node.tagName === "DETAILS") && name !== "title";
  }

  function morph(element, html) {
    Idiomorph.morph(element, html, { morphStyle: "outerHTML", callbacks: { beforeAttributeUpdated: keep } });
  }

  function connect(url, handlers) {
    const live = find("live");
    const source = new EventSource(url);
    const set = (kind, text) => { live.className = `live ${kind}`; live.textContent = text; };
    source.onopen = () => set("on", "live");
    source.onerror = () => set("off", "not connected");
    source.addEventListener("problem", (event) => set("off", JSON.parse(event.data)));
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    addEventListener("pagehide", () => source.close());
    return source;
  }

  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("[data-copy]");
    const renew = event.target.closest("[data-renew]");
    if (renew) fetch(renew.dataset.renew);
    if (!copy) return;
    const text = copy.previousElementSibling.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(copy.previousElementSibling);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });

  // The list of jobs.
  const list = { filter: "", text: "", sort: "order", down: false, order: [] };

  function rowsOf() { return [...find("rows").children]; }

  function compareRows(one, other) {
    if (list.sort === "order") return list.order.indexOf(one.id) - list.order.indexOf(other.id);
    const left = one.dataset[list.sort];
    const right = other.dataset[list.sort];
    if (list.sort === "name") return left.localeCompare(right);
    if (left === "" || right === "") return (left === "") - (right === "") || 0;
    return Number(left) - Number(right);
  }

  function arrange() {
    const rows = rowsOf();
    const counts = {};
    let shown = 0;
    for (const row of rows) {
      const attention = row.dataset.attention;
      counts[attention] = (counts[attention] ?? 0) + 1;
      const isFound = !list.text || row.textContent.toLowerCase().includes(list.text);
      row.hidden = !(isFound && (!list.filter || attention === list.filter));
      shown += !row.hidden;
    }
    for (const chip of document.querySelectorAll("[data-filter]")) {
      chip.querySelector("b").textContent = chip.dataset.filter ? counts[chip.dataset.filter] ?? 0 : rows.length;
      chip.setAttribute("aria-pressed", String(chip.dataset.filter === list.filter));
    }
    const sorted = [...rows].sort((one, other) => (list.down ? -1 : 1) * compareRows(one, other));
    const body = find("rows");
    sorted.forEach((row, place) => { if (body.children[place] !== row) body.insertBefore(row, body.children[place]); });
    find("empty").hidden = shown > 0;
    const chosen = [...body.querySelectorAll("input:checked")].map((box) => box.value);
    const compare = find("compare");
    const isReady = chosen.length >= 2 && chosen.length <= Number(compare.dataset.most);
    compare.textContent = isReady ? `Compare ${chosen.length} jobs` : `Compare: select 2 to ${compare.dataset.most} jobs`;
    compare.toggleAttribute("href", isReady);
    if (isReady) compare.href = `/compare?${chosen.map((key) => `job=${encodeURIComponent(key)}`).join("&")}`;
    body.classList.toggle("places", new Set(rows.map((row) => row.querySelector(".job small").textContent)).size > 1);
  }

  function takeRows(data) {
    for (const key of data.gone) find(key)?.remove();
    for (const [key, html] of Object.entries(data.rows)) {
      const present = find(key);
      if (present) {
        morph(present, html);
      } else {
        find("rows").insertAdjacentHTML("beforeend", html);
      }
    }
    list.order = data.order;
    find("problems").replaceChildren(...data.problems.map((text) => ddpMake("p", {}, text)));
    showTimes(find("rows"));
    arrange();
  }

  function moveFocus(step) {
    const links = rowsOf().filter((row) => !row.hidden).map((row) => row.querySelector("a"));
    const place = links.indexOf(document.activeElement?.closest("tr")?.querySelector("a"));
    links[Math.max(0, Math.min(links.length - 1, place < 0 ? 0 : place + step))]?.focus();
  }

  function startList(url) {
    list.order = rowsOf().map((row) => row.id);
    find("search").addEventListener("input", (event) => { list.text = event.target.value.toLowerCase(); arrange(); });
    find("rows").addEventListener("change", arrange);
    document.addEventListener("click", (event) => {
      const chip = event.target.closest("[data-filter]");
      const head = event.target.closest("[data-sort]");
      if (chip) list.filter = chip.dataset.filter;
      if (head) {
        list.down = list.sort === head.dataset.sort && !list.down;
        list.sort = head.dataset.sort;
        for (const cell of document.querySelectorAll(".jobs th")) cell.removeAttribute("aria-sort");
        head.closest("th").setAttribute("aria-sort", list.down ? "descending" : "ascending");
      }
      if (chip || head) arrange();
    });
    document.addEventListener("keydown", (event) => {
      if (event.target.matches("input[type=search]") || event.ctrlKey || event.metaKey || event.altKey) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      if (event.key === "/") { event.preventDefault(); find("search").focus(); }
      if (event.key === "j") moveFocus(1);
      if (event.key === "k") moveFocus(-1);
      if (event.key === "x") document.activeElement?.closest("tr")?.querySelector("input")?.click();
    });
    arrange();
    connect(url, { rows: takeRows });
  }

  // The log of a job.
  function startLog(section) {
    const lines = find("lines");
    let stream = null;
    let turn = 0;

    const query = () => {
      const rank = /^\d+$/.test(find("log-rank").value) ? `rank=${find("log-rank").value}&` : "";
      return `${rank}q=${encodeURIComponent(find("log-search").value)}`;
    };

    function markAttempts() {
      for (const divider of lines.querySelectorAll(".divider")) divider.remove();
      let before = null;
      for (const line of [...lines.querySelectorAll(".line")]) {
        if (before !== null && line.dataset.attempt !== before) {
          line.before(ddpMake("div", { className: "divider" }, `attempt ${line.dataset.attempt}`));
        }
        before = line.dataset.attempt;
      }
      showTimes(lines);
    }

    function offerOlder(piece) {
      lines.querySelector(".older")?.remove();
      const row = ddpMake("div", { className: "older soft" });
      if (piece.before) row.append(ddpMake("button", { type: "button", onclick: () => load(piece.before) }, "Older lines"), " ");
      row.append(piece.note || (piece.before ? "" : "the beginning of the log"));
      lines.prepend(row);
    }

    async function load(before) {
      const number = before ? turn : ++turn;
      const response = await fetch(`${section.dataset.log}?${query()}&before=${before ?? ""}`);
      const isReplaced = !before || !section.dataset.log.startsWith("/run/");
      if (number !== turn) return;
      if (!response.ok) { lines.textContent = "The log cannot be read; reload the page."; return; }
      const piece = await response.json();
      if (number !== turn) return;
      const height = lines.scrollHeight;
      if (isReplaced) lines.replaceChildren();
      lines.querySelector(".older")?.remove();
      lines.insertAdjacentHTML("afterbegin", piece.html);
      if (!lines.querySelector(".line")) {
        const isChosen = find("log-search").value || find("log-rank").value;
        lines.append(ddpMake("p", { className: "empty" }, isChosen ? "No such line here." : "The log is empty."));
      }
      offerOlder(piece);
      markAttempts();
      lines.scrollTop = before ? lines.scrollTop + lines.scrollHeight - height : lines.scrollHeight;
    }

    function follow() {
      stream?.close();
      stream = null;
      if (!find("log-follow").checked) return;
      stream = new EventSource(`${section.dataset.follow}?${query()}`);
      stream.addEventListener("lines", (event) => {
        const piece = JSON.parse(event.data);
        const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
        lines.querySelector(".empty")?.remove();
        lines.insertAdjacentHTML("beforeend", piece.html);
        const all = lines.querySelectorAll(".line");
        for (let place = 0; place < all.length - 5000; place++) all[place].remove();
        markAttempts();
        if (isAtEnd) lines.scrollTop = lines.scrollHeight;
      });
    }

    let wait = 0;
    const renew = () => { clearTimeout(wait); wait = setTimeout(() => { load(); follow(); }, 250); };
    find("log-search").addEventListener("input", renew);
    find("log-rank").addEventListener("input", renew);
    find("log-follow").addEventListener("change", follow);
    addEventListener("pagehide", () => stream?.close());
    load();
    follow();
  }

  function takeParts(parts) {
    for (const [name, html] of Object.entries(parts)) {
      const element = find(`part-${name}`);
      if (element) { morph(element, html); showTimes(find(`part-${name}`)); }
    }
    const state = document.querySelector("#part-head .pill")?.textContent;
    if (state) document.title = `${document.querySelector("h1").textContent} · ${state}`;
  }

  addEventListener("DOMContentLoaded", start);
  function start() {
    showTimes(document);
    setInterval(() => showTimes(document), 10_000);
    const { list: listUrl, job } = document.body.dataset;
    if (listUrl) startList(listUrl);
    if (job && location.protocol !== "file:") {
      connect(`${job}/events`, { parts: takeParts, curves: (data) => ddpCharts.show(data) });
      startLog(find("log"));
    }
  }
}
