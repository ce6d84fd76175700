// The sections of the page of a plan. Those below the first are created after the browser has painted the first ones.
const programs = select("program", [["train", "training step"], ["infer", "inference"]], choosePart);
byId("program").append(programs);
function chooseProgram(name) {
  programs.querySelector("select").value = name;
  choosePart(name);
}
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
