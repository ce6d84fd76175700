"""Tuning constants of the search: limits of its effort, and the least gains that justify a trial.

Each has its meaning, its unit and the decision (docs/decisions) that chose it, where there is one. Effort is counted in
rounds, launches and blocks, never in seconds, so that plans do not depend on the machine. The file is beside the
packages of `mbc.optimize`, not in `search`: the lowest of them read it, and none of them imports `search`.

Constants that model the machine are elsewhere (`schedule.contention`, `search.overhead`), and so are those that
represent numbers.
"""

from __future__ import annotations

# --- candidates ---

# Most micro-batches of one operation: more calls cost more launches than they save.
MAX_MICRO_BATCHES = 1 << 14
# Least time of the fastest single call over that of a division, for the division to be used (008): measurements differ
# by as much.
DIVISION_GAIN = 1.01

# Least share of the operations of a step that must have been measured at a number of rows for that number to count as
# measured. The share is of the operations that were measured for any rows (043).
MEASURED_SHARE = 0.75

# Least time of a step over that of the best serial schedule with unlimited workspace, for micro-batches to be measured
# (063).
MEASURING_GAIN = 1.01

# Share of an estimate that counts as the time of an unmeasured kernel, when it is decided which kernels to measure next
# (067): one estimate in ten is too high by more than this.
OPTIMISM = 0.7
# The share for times that are scaled from a similar GPU (069), or from another batch (070).
SCALED_OPTIMISM = 0.8
# Largest ratio of rows from which a time may be scaled with that share (070).
NEAR_TIMES = 4
# Share of the time of a step, planned with that optimism, that may stay unmeasured (067).
UNDECIDED_SHARE = 0.01

# --- selection ---

# CP-SAT's deterministic time to divide workspace, in seconds of a nominal machine: ResNet-50 needs a fraction of one
# (005).
KNAPSACK_DETERMINISTIC_TIME = 20.0
# Bisections of the range of prices of workspace (005).
PRICE_BISECTIONS = 24
# Upper end of that range, in us per byte: no kernel gains more (005).
MAX_US_PER_BYTE = 1e-2

# --- fusion ---

# Ratio by which one launch for many updates or casts must be faster than separate launches where only one of the two
# times was measured: estimates of work bound by memory and launches have much smaller errors (062).
CLEARLY_FASTER = 2.0
# Most operations of one generated launch: longer programs need more registers and compile longer (075).
FUSION_MEMBERS = 24
# Clusters of operations that an operation tries to join, those that save most bytes first (075).
FUSION_TRIES = 4

# Share of the available bytes that a group may keep live for longer than its operations one by one would (093).
HELD_SHARE = 1 / 8
# A group is not asked about those of its operations that it runs at most so many operations later than they would run
# by themselves (093).
HELD_NEAR = 4

# --- schedule ---

# Numbers of launches into which one multi-tensor update is split for the concurrent stream (024).
UPDATE_SPLITS = (2, 4, 8)
# Least time in us of a part of a split launch (081): a launch costs 1 to 2 us.
UPDATE_PART_MIN_US = 5.0
# Within a budget: share of the available bytes that the operands of one part may keep live until it runs (037).
UPDATE_HELD_SHARE = 1 / 200
# Numbers of buckets of about the same bytes in which gradients are summed.
BUCKET_COUNTS = (1, 2, 3, 4, 6, 8)
# Numbers of times that the last bucket is halved.
LAST_BUCKET_CUTS = (0, 1, 2, 3)
# Time in us that a copy ends before it is needed, for a later kernel to wait for it: predictions are off by some us
# (027).
WAIT_SLACK_US = 50.0

# --- placement ---

# Ratio of the arena to its lower bound (peak live bytes) at which the search stops.
PLACEMENT_GOOD_ENOUGH = 1.001
# Blocks times orders that greedy placement tries; larger programs try fewer orders.
GREEDY_PLACEMENT_WORK = 40_000
# Divisors of the lower bound: smaller blocks than these parts fill the gaps that other blocks leave. Blocks above the
# second part are annealed (013).
SMALL_BLOCK_DIVISORS = (2000, 20_000)
# Skyline placement: rounds times blocks (013).
SKYLINE_WORK = 60_000
# Skyline placement: most rounds (013).
SKYLINE_MAX_ROUNDS = 200
# Skyline placement: rounds where the question is only whether the blocks fit (022).
SKYLINE_QUICK_ROUNDS = 8
# Skyline placement: largest factor by which blocks that end too high come earlier in the next round (013).
SKYLINE_HIGH_PROMOTION = 2.5
# Skyline placement: largest factor by which any block comes earlier or later in the next round (013).
SKYLINE_ANY_PROMOTION = 1.02
# Annealing: most rounds (004).
ANNEAL_MAX_ROUNDS = 8000
# Annealing: rounds times blocks squared (004).
ANNEAL_WORK = 60_000_000
# Annealing: fewest rounds for which it is started (004).
ANNEAL_MIN_ROUNDS = 2000
# Annealing: share of the lower bound by which a round may be worse at the start (004).
ANNEAL_START_TOLERANCE = 0.002
# Skyline search: most blocks that are tried (064).
SKYLINE_SEARCH_NODES = 1_500_000
# Skyline search: most blocks that are tried, times the square of the number of blocks (064).
SKYLINE_SEARCH_WORK = 160_000_000_000
# Skyline search: number of limits that are tried, each with half of the remaining effort (064).
SKYLINE_SEARCH_LIMITS = 6
# Skyline search: heights that fail, where the smallest height is asked for (079).
SKYLINE_SEARCH_LOWEST_FAILURES = 8
# Skyline search: most blocks that are tried for each of these heights (079).
SKYLINE_SEARCH_LOWEST_NODES = 200_000
# Skyline search: most blocks that are tried so that a plan fits its budget (080), or for each smaller arena (079).
SKYLINE_SEARCH_PLAN_NODES = 20_000
# Skyline search: part of the effort for the lower bound where the budget is above it, as a divisor (064).
SKYLINE_SEARCH_BOUND_DIVISOR = 8
# Skyline search: blocks that the first restart tries (064).
SKYLINE_SEARCH_RESTART_NODES = 300
# Skyline search: ratio of the blocks that a restart tries to those of the restart before (064).
SKYLINE_SEARCH_RESTART_GROWTH = 1.02
# Skyline search: a block's rank is its life to one of these powers, in turn (064).
SKYLINE_SEARCH_LIFE_EXPONENTS = (1.0, 0.0, 0.5)
# Skyline search: largest random factor of a rank (064).
SKYLINE_SEARCH_PROMOTION = 3.0
# Skyline search: factor of the rank of a block that is flush with the lower wall of its gap (064).
SKYLINE_SEARCH_FLUSH_PROMOTION = 4.0
# Skyline search: weight of wasted area, relative to the block's own (064).
SKYLINE_SEARCH_WASTE_AVERSION = 100.0

# --- remat: greedy ---

# Share of the available bytes below which a value is always kept.
ALWAYS_KEPT_SHARE = 1 / 20_000
# Least share of the available bytes that a value must take to be converted back from the layout that is needed first,
# where both layouts are needed once more (072).
CONVERTED_BACK_SHARE = 1 / 100
# Rounds of greedy choice, each measured in the rewritten program (009).
GREEDY_ROUNDS = 40
# Greedy choice stops after this number of rounds in a row without a lower peak (009).
GREEDY_PATIENCE = 10
# Recomputation is abandoned when it takes longer than this number of steps.
MAX_RECOMPUTED_STEPS = 1.0
# The search also stops when recomputations cost this factor times what the best step so far, or other segments, leave
# for them. The factor is above 1 since some recomputations are dropped again at the end (018).
RECOMPUTE_OVERSHOOT = 1.5
# Lengths of segments that are tried, in shares of the available bytes (018).
SEGMENT_SHARES = (1.0, 0.7, 0.5, 0.4, 0.3)
# Rounds of greedy choice where a segment does not fit (018).
SEGMENT_ROUNDS = 3
# Factor of its length by which a segment may grow to end where fewer bytes are live (018).
SEGMENT_STRETCH = 1.5
# Regions times trials of dropping a recomputation. Each trial looks at the whole program.
KEEP_WORK = 60_000_000
# Values of one recomputation chain, times regions. A deep network keeps some intermediate values, from which the others
# are recomputed.
CHAIN_WORK = 1_500_000
# Values that a recomputation chain may have in any program.
CHAIN_MIN_VALUES = 60
# Most gaps of which all sets are compared (009).
EXHAUSTIVE_GAPS = 12
# Number of the fastest of these sets that are measured (009).
EXHAUSTIVE_MEASURED = 1000

# --- remat: local search ---

# Most rounds (014; twice as many save another 0.1 %, 038).
LOCAL_SEARCH_ROUNDS = 200
# Numbers of decisions that a round undoes (038).
NEIGHBOURHOOD_SIZES = (2, 4, 8, 16, 32)
# Largest relative perturbation of a price in a round (014; a quarter and nine tenths were worse, 038).
PRICE_NOISE = 0.5
# Share of the rounds that offload other values than before (014).
SWAP_OFFLOAD_SHARE = 0.3
# Improvements by the ledger after which the program is measured (014).
MEASURE_AFTER = 8
# Rounds of freeing bytes where the ledger proves wrong (014).
SETTLE_ROUNDS = 3
# Least gain that counts as an improvement, in us.
IMPROVEMENT_US = 1e-3

# --- remat: offloading and fused rematerialization ---

# Least time in us of a copy: shorter ones do not justify the waits between them and kernels (020).
MIN_COPY_US = 100.0
# Share of the available bytes that coalesced copies leave to workspaces, and to fragmentation (027).
COALESCE_SPARE_SHARE = 0.1
# An operation is moved behind a reduction only if the operands and results of both take at most this share of the bytes
# beside the states (093).
DEFERRED_SHARE = 1 / 2
# Number of regions after a reduction within which a value that it recomputed must be read first: the value occupies
# memory until then (021).
FUSED_REMAT_NEAR_REGIONS = 6

# --- bounds ---

# Number of operations at which the time within a budget is bounded, spread evenly over the step; the best bound counts
# (009).
BUDGET_BOUND_POSITIONS = 64
# Operations that the I/O bound looks back to recompute a value; values further away are read. 30 find the optimum of a
# ResNet, and all but 0.3 % of a DenseNet's. More make the linear program of a network of 2,500 layers slow to solve.
IO_BOUND_REACH = 50

# --- search: fitting a budget ---

# A step that fits is not improved further if it takes longer than the limit on a step's time (`Limits.slowest_us`)
# divided by this number (090).
SLOW_PROBE = 1.6

# Rounds of reducing workspaces in a step that keeps everything.
KEEP_ALL_ROUNDS = 8
# Ratio of a step's time to that of the fastest step without a limit, up to which no other techniques are tried.
FIT_GOOD_ENOUGH = 1.02
# Relative difference of times below the precision of predictions.
FIT_NEGLIGIBLE = 1e-3
# Square of the number of operations, times the number of sets of techniques. Up to this product, a step that fits but
# is slow is searched with the techniques that are usually tried only if nothing fits (100).
SLOW_STEP_WORK = 60_000
# Share of the available bytes below which optimizer states stay on the device if a step fits with them (037).
STATES_OFFLOAD_SHARE = 0.1
# Share of the available bytes above which offloading optimizer states is tried first (037).
STATES_CROWDING_SHARE = 0.4
# Time that states are on the device before and after their update, in times of their copy.
STATES_LEAD = 2.0
# Parts of the states that are offloaded first: (factor of the lacking bytes, lead). The bytes that one update needs
# are added.
STATES_TRIALS = ((1.0, 0.5), (1.5, 0.0))
# Share of the time that decisions add to a step which is sure to be added to a step with fewer bytes for them (090).
DECISIONS_SHARE = 0.5
# Depth-first micro-batches: values above these shares of the available bytes are divided (009, 018, 025).
DIVIDED_VALUE_SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
# Depth-first micro-batches: least share of the available bytes of the largest value, where a step fits undivided (009,
# 018, 025).
DIVIDED_MIN_SHARE = 0.2
# Depth-first micro-batches: largest share of the available bytes of one micro-batch; several are live together.
MICRO_BATCH_SHARES = (1 / 8, 1 / 16)
# Depth-first micro-batches: operations times divisions of the same values that are compared.
DIVISIONS_WORK = 1000
# Depth-first micro-batches: time to recompute a value, in passes over it (one read and one write), above which it may
# be kept as a whole for the backward pass.
KEPT_WHOLE_PASSES = 6
# Most repeated fits where many launches leave fewer available bytes (022).
MAX_REFITS = 3
# Margin on the bytes that launches take (022).
REFIT_MARGIN = 1.25
# Sizes for which the smallest step is searched, in shares of the lower bound of its live bytes (100).
SMALLEST_SHARES = (1.0, 1.08)
# Least ratio of the fastest steps without and with ReLU bit masks, for masks to be tried within a budget (030).
RELU_MASKS_GAIN = 1.01

# --- search: variants ---

# Limits of workspace that are tried, in shares of the available bytes; the rest is for kept values (018).
WORKSPACE_SHARES = (1.0, 0.6, 0.42, 0.3, 1 / 5, 1 / 8, 1 / 16, 1 / 64, 0.0)
# Largest shares of the excess that are offloaded, tried after no limit on them.
OFFLOAD_SHARES = (0.5, 0.0)
# Ratio of peak live bytes to available bytes above which similar variants are skipped where something fits (018).
GIVE_UP_PEAK = 1.2
# Ratio of peak live bytes to available bytes above which local search does not reach a fit (018).
REACHABLE_PEAK = 2.0
# Thorough search of a variant and similar ones ends where it leaves more than this share of the lacking bytes, and more
# than NEAR_FIT_SHARE of the available bytes.
HOPELESS_LACK = 0.5
# Share of the available bytes by which a variant may exceed them and still be searched further.
NEAR_FIT_SHARE = 0.02
# Work of one fit, in launches of rewritten programs, after which the search ends if nothing fits yet. The most that a
# step needed that fits was 3.7 million (ResNet-50).
NOT_FOUND_WORK = 4_000_000
# That work for each operation of the step, if the product is larger.
NOT_FOUND_WORK_OF_OPERATION = 1_000
# Work of computing the price of a gap, in that unit.
PRICE_WORK = 4
# Ratio of the smallest step's arena to the available bytes above which no other kind of step (without fusion, with ReLU
# bit masks) is tried: the smallest arenas of different kinds differed by 1.4 at most.
HOPELESS_ARENA = 2.0
# Launches times variants that are compared; a longer program is fitted in fewer variants.
VARIANTS_WORK = 15_000
# Launches times rounds of local search for every variant (014).
QUICK_SEARCH_WORK = 8_000
# Launches times rounds of local search for a variant that is to be placed (014).
THOROUGH_SEARCH_WORK = 80_000
# Most variants that are searched thoroughly (027).
MAX_THOROUGH = 3
# Largest ratio of their time to that of the fastest (027).
THOROUGH_WITHIN = 1.05
# Fewest rounds for which thorough search is started (027).
THOROUGH_MIN_ROUNDS = 10
# Most repetitions of those rounds (025).
MAX_REPEATS = 4
# Share by which the last rounds must have shortened the step for another repetition (025).
REPEAT_GAIN = 1e-3
# Stop retrying when more than this share of the available bytes is reserved for fragmentation, that is, for gaps that
# placement leaves between buffers (027).
MAX_SPARED_SHARE = 0.15
# Least share of the available bytes that a retry reserves for fragmentation (027).
MIN_SPARED_SHARE = 0.004
# A retry reserves at least this factor times the bytes by which the last placement did not fit (027).
SPARED_FACTOR = 1.5
# Share of its time by which a variant that is retried may be slower, since its placement is likelier to fit (018).
RETRY_BONUS = 0.01
# Most variants that are placed.
MAX_PLACEMENTS = 8
# Variants that are placed in any program.
MIN_PLACEMENTS = 5
# Variants that are placed after the first that fits (022).
PLACEMENTS_AFTER_FIT = 2
# Sum of the launches of the variants that are placed.
PLACEMENTS_WORK = 15_000

# --- search: after placement ---

# Reclaimed workspace: most placements of workspaces together with values (022).
RECLAIM_MAX_TRIALS = 10
# Reclaimed workspace: launches times these placements (022).
RECLAIM_WORK = 20_000
# Reclaimed workspace: share of the kernels' time that does not justify another trial (022).
RECLAIM_NEGLIGIBLE = 1e-3
# Concurrent stream: least times in us of the launches that move to it, one attempt for each; fewer launches need fewer
# waits (019).
CONCURRENT_MIN_US = (4.0, 10.0, 25.0)
# Concurrent stream: time in us above which a launch fills every multiprocessor, however far it is from the roofline
# (019).
CONCURRENT_MAX_US = 60.0
# Concurrent stream: largest ratio of the time to that of the serial schedule (019).
CONCURRENT_MAX_TIME = 0.99
# Concurrent stream: largest ratio of the arena to that of the serial schedule: operands of concurrent launches are live
# for longer (019).
CONCURRENT_MAX_ARENA = 1.1

# --- search: requests to measure ---

# Weight of inference relative to a training step's launches: inference is planned once.
INFERENCE_WEIGHT = 0.1
# Weight of layout conversions relative to a training step's launches: most are never chosen.
CONVERSION_WEIGHT = 0.05
