// What a page must have: no wider than the screen, headings in order, words for pictures, a title, a description.
() => {
  const told = [];
  const of = (selector) => [...document.querySelectorAll(selector)];
  if (document.documentElement.scrollWidth > innerWidth) {
    const wide = of("body *").filter((one) => one.getBoundingClientRect().right > innerWidth + 1).slice(0, 3);
    told.push("scrolls sideways: " + document.documentElement.scrollWidth + " " +
              wide.map((one) => one.tagName + "." + one.className).join(" "));
  }
  let before = 0;
  for (const one of of("h1, h2, h3, h4, h5, h6")) {
    const level = Number(one.tagName[1]);
    if (level > before + 1) told.push(`h${level} after h${before}: ${one.textContent.trim()}`);
    before = level;
  }
  if (of("h1").length != 1) told.push("headings of level 1: " + of("h1").length);
  for (const one of of("img")) if (!(one.alt || "").trim()) told.push("no alt: " + one.src);
  if (!document.title.trim()) told.push("no title");
  const said = of('meta[name="description"]').map((one) => one.content.trim());
  if (said.length != 1 || !said[0]) told.push("descriptions: " + JSON.stringify(said));
  if (!document.documentElement.lang) told.push("no language");
  return told;
}
