// The tooltip of a token, by pointer or arrow keys. Text of the data enters the page through textContent only.
"use strict";
const tip = document.getElementById("tip");
const sections = new Map();
let current = null;

// The spans of a pack, the first token of each, and the numbers of all tokens; made when a pack is first looked at.
function tokensOf(section) {
  if (!sections.has(section)) {
    const numbers = JSON.parse(section.querySelector("script").textContent);
    const elements = [...section.querySelectorAll(".block i")];
    const starts = [0];
    for (const count of numbers.spans) starts.push(starts[starts.length - 1] + count);
    const index = new Map(elements.map((element, at) => [element, at]));
    sections.set(section, { numbers, elements, starts, index });
  }
  return sections.get(section);
}

function intervalOf(bounds, token) {
  let low = 0;
  while (low + 2 < bounds.length && bounds[low + 1] <= token) low += 1;
  return low;
}

// One column a token; several tokens where they share a character.
function rowsOf(element) {
  const { numbers, elements, starts, index } = tokensOf(element.closest("section"));
  const at = index.get(element);
  const textOf = (token) => {
    const span = token < starts[at + 1] ? at : at + 1;
    return span < elements.length ? JSON.stringify(elements[span].textContent) : "";
  };
  const rows = { "token id": [], role: [], trained: [], "label to predict": [], "its weight": [], position: [], document: [], conversation: [] };
  for (let token = starts[at]; token < starts[at + 1]; token += 1) {
    const conversation = intervalOf(numbers.conversations, token);
    const isFirst = numbers.conversations[conversation] === token;
    const isTrained = !isFirst && numbers.labels[token - 1] === numbers.ids[token] && numbers.weights[token - 1] > 0;
    const label = numbers.labels[token];
    const nextText = label === numbers.ids[token + 1] ? ` ${textOf(token + 1)}` : "";
    rows["token id"].push(numbers.ids[token]);
    rows.role.push(numbers.role_names[numbers.roles[token]]);
    rows.trained.push(isTrained ? "yes" : "no");
    rows["label to predict"].push(label === numbers.ignore_index ? "none" : `${label}${nextText}`);
    rows["its weight"].push(numbers.weights[token]);
    rows.position.push(numbers.positions[token]);
    rows.document.push(intervalOf(numbers.documents, token));
    rows.conversation.push(conversation);
  }
  return rows;
}

function show(element) {
  if (current) current.classList.remove("at");
  current = element;
  tip.hidden = !element;
  if (!element) return;
  element.classList.add("at");
  const table = document.createElement("table");
  for (const [name, values] of Object.entries(rowsOf(element))) {
    const row = table.insertRow();
    const head = document.createElement("th");
    head.textContent = name;
    row.append(head);
    for (const value of values) row.insertCell().textContent = value;
  }
  tip.replaceChildren(table);
  const box = element.getClientRects()[0];
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.top = `${below ? box.bottom + 8 : Math.max(4, box.top - 8 - tip.offsetHeight)}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
}

document.addEventListener("pointerover", (event) => show(event.target.closest?.(".block i") ?? null));
document.addEventListener("keydown", (event) => {
  const blocks = event.target.closest?.(".blocks");
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") show(null);
  if (!blocks || !step) return;
  event.preventDefault();
  const elements = [...blocks.querySelectorAll("i")];
  const next = elements[current && blocks.contains(current) ? elements.indexOf(current) + step : 0];
  if (!next) return;
  next.scrollIntoView({ block: "nearest" });
  show(next);
});
document.addEventListener("focusout", () => show(null));
document.addEventListener("scroll", () => { if (current && !current.matches(":hover") && !document.activeElement.matches(".blocks")) show(null); }, { passive: true });
