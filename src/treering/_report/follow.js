// Asks the server of `treering report --serve` once a second whether the report has changed, and draws the new one.
"use strict";
(() => {
  const place = location.pathname.replace(/\/?$/, "/document");
  const told = document.createElement("p");
  told.id = "follows";
  told.setAttribute("role", "status");
  Object.assign(told.style, {
    position: "fixed", insetInlineEnd: "1rem", insetBlockEnd: "1rem", margin: "0", padding: ".25rem .75rem",
    maxWidth: "60ch", border: "1px solid", borderRadius: ".5rem", background: "Canvas", color: "CanvasText",
    zIndex: "10", font: ".85rem system-ui",
  });
  document.body.append(told);

  const say = (text) => {
    if (told.textContent !== text) told.textContent = text; // else it would be read aloud each time
  };

  let tag = document.documentElement.dataset.tag || "";
  const draw = async (answer) => {
    const found = await answer.json();
    tag = answer.headers.get("ETag");
    if (found.error !== undefined) {
      say(`▲ This is as it was; the report cannot be made now: ${found.error}`);
    } else {
      window.treeringReport.show(found.document);
      say(`● Following: changed at ${new Date().toLocaleTimeString()}`);
    }
  };

  const look = async () => {
    const options = { headers: { "If-None-Match": tag }, cache: "no-store", signal: AbortSignal.timeout(60000) };
    const answer = await fetch(place, options).catch(() => null);
    setTimeout(look, answer === null ? 5000 : 1000);
    if (answer === null) {
      say("▲ This is as it was; the server does not answer: has `treering report --serve` ended?");
      tag = ""; // so that the first answer is drawn, and said
    } else if (answer.status === 200) {
      await draw(answer);
    } else if (answer.status !== 304) {
      say(`▲ This is as it was; the server answers ${answer.status}`);
    }
  };
  say("● Following: a new step appears here by itself");
  setTimeout(look, 1000);
})();
