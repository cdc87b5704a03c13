"use strict";
// Shows one trajectory at a time and the values of a chart at the pointer. Without it the page still
// has everything, one after the other.
(() => {
  const reader = document.querySelector(".reader");
  const pages = [...reader.querySelectorAll("article")];
  const links = [...reader.querySelectorAll(".index a")];
  let current = 0;

  function show(place, scroll) {
    if (!pages.length) return;
    current = Math.max(0, Math.min(place, pages.length - 1));
    pages.forEach((page, i) => { page.hidden = i !== current; });
    links.forEach((link, i) => {
      if (i === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
    const list = links[current].closest("ol");
    const item = links[current].parentElement;
    list.scrollTop = item.offsetTop - list.clientHeight / 2;
    if (scroll) document.getElementById("trajectories").scrollIntoView();
  }

  reader.classList.add("paged");
  links.forEach((link, i) => link.addEventListener("click", (event) => {
    event.preventDefault();
    show(i, false);
  }));
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = { ArrowRight: 1, j: 1, ArrowLeft: -1, k: -1 }[event.key];
    if (step) show(current + step, true);
  });
  const named = pages.findIndex((page) => "#" + page.id === location.hash);
  show(named < 0 ? 0 : named, named >= 0);

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const column of document.querySelectorAll(".column")) {
    const text = column.querySelector("title").textContent;
    column.querySelector("title").remove(); // the browser would show it a second time
    column.addEventListener("pointermove", (event) => {
      tip.textContent = text;
      tip.hidden = false;
      const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
      tip.style.left = Math.min(event.clientX + 14, room) + "px";
      tip.style.top = event.clientY + 14 + "px";
    });
    column.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
})();
