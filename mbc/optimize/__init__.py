"""From a training graph to a plan: choose -> order -> place -> synchronise -> simulate, with `search` as the loop."""
