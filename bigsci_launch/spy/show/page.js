// Shows the facts about a rank next to the grid. Text from the job is only ever inserted as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const detail = document.getElementById("detail");

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function pairs(rows) {
  const list = element("dl");
  for (const [name, words] of rows) list.append(element("dt", name), element("dd", words));
  return list;
}

function stack(thread) {
  const list = element("ol");
  for (const [name, place, path, isWrapper] of thread.frames) {
    const line = element("li", name + " ", isWrapper ? "wrapper" : "");
    line.append(element("span", place));
    line.title = path;
    list.append(line);
  }
  return list;
}

function stacks(rank) {
  if (rank.stack === null) return [element("p", rank.unread ? "not read: " + rank.unread : "none", "soft")];
  const [first, ...others] = data.stacks[rank.stack];
  const parts = [stack(first)];
  if (first.name !== "MainThread") parts.unshift(element("p", "thread " + first.name, "soft"));
  for (const thread of others) {
    const more = element("details");
    more.append(element("summary", "thread " + thread.name), stack(thread));
    parts.push(more);
  }
  return parts;
}

function show(number) {
  const rank = data.ranks[number];
  const cell = document.getElementById("rank-" + number);
  if (!rank || !cell) return;
  for (const old of document.querySelectorAll("[aria-current]")) {
    old.removeAttribute("aria-current");
    old.tabIndex = -1;
  }
  cell.setAttribute("aria-current", "true");
  cell.tabIndex = 0;
  const frame = cell.closest(".scroll");
  frame.scrollLeft += cell.getBoundingClientRect().left - frame.getBoundingClientRect().left - frame.clientWidth / 2;
  const facts = data.tables[rank.facts];
  detail.replaceChildren(
    element("h3", rank.name),
    element("p", rank.pid ? "pid " + rank.pid : "no process found", "soft"),
    ...(rank.why ? [element("p", "Suspect: it " + rank.why, "bad")] : []),
    element("h4", "Waiting"), pairs(data.tables[rank.waits]),
    element("h4", "Stack, innermost call first"), ...stacks(rank),
    ...(facts.length ? [element("h4", "Kernel facts and records"), pairs(facts)] : []),
  );
  detail.scrollTop = 0;
}

function choose(number) {
  show(number);
  history.replaceState(null, "", "#rank=" + number);
}

function neighbour(cell, key) {
  const row = cell.closest("tr");
  const cells = [...row.querySelectorAll("button")];
  const at = cells.indexOf(cell);
  if (key === "ArrowLeft") return cells[at - 1];
  if (key === "ArrowRight") return cells[at + 1];
  const other = key === "ArrowUp" ? row.previousElementSibling : key === "ArrowDown" ? row.nextElementSibling : null;
  return other ? other.querySelectorAll("button")[at] : undefined;
}

const grid = document.querySelector(".grid");
grid.addEventListener("click", (event) => {
  const cell = event.target.closest("button");
  if (cell) choose(cell.id.slice(5));
});
grid.addEventListener("keydown", (event) => {
  const next = event.target.matches("button") ? neighbour(event.target, event.key) : undefined;
  if (!next) return;
  event.preventDefault();
  choose(next.id.slice(5));
  next.focus();
});

function fromAddress() {
  const match = /^#rank=(\d+)$/.exec(location.hash);
  const first = document.querySelector(".grid .suspect") || document.querySelector(".grid button");
  if (match) show(match[1]);
  else if (first) show(first.id.slice(5));
}
addEventListener("hashchange", fromAddress);
fromAddress();
