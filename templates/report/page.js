"use strict";
// The sections of the page of a plan. Those below the first are made when the browser has painted what stands above.
byId("program").append(select("program", [["train", "training step"], ["infer", "inference"]], choosePart));
memorySection(byId("memory-view"));
const LATER = [[tableSection, "operations-view"], [lanesSection, "lanes-view"], [rooflineSection, "roofline-view"], [graphSection, "graph-view"],
  [recordedSection, "recorded-view"]];
(function next() {
  const [make, id] = LATER.shift() || [];
  if (!make) {
    document.documentElement.dataset.ready = "yes";
    return;
  }
  if (byId(id)) make(byId(id));
  setTimeout(next);
})();
